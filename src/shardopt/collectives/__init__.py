"""The only door to other ranks.

``group`` says what the rooms may ask of the sharding group, and holds the group of one rank; ``rank_group`` is a real
process group, and chooses the primitives; ``hybrid`` is several that replicate one another. ``host`` exchanges between ranks
of one host, through memory that they share (``shared_file``) and messages over pipes (``mailbox``); ``staging`` lends
memory to send from. ``agreement`` lets all ranks raise or none, ``fingerprint`` says what of their options they can
compare, ``flags`` packs what they report, ``in_flight`` keeps a bounded number of collectives in flight and awaits each exactly once.
This room sees flat tensors and plain values; it knows nothing of parameters, layouts or optimizers, and reaches a
framework only through the modules it is handed.
"""

from shardopt.collectives.agreement import (
    any_over_ranks,
    raise_failures,
    raise_if_any_failed,
    raise_together,
    require_equal,
)
from shardopt.collectives.fingerprint import digest, option_fingerprint, options_of
from shardopt.collectives.flags import pack_flags, ranks_by_flag, unpack_flags
from shardopt.collectives.group import Group, LoneRank, Pending
from shardopt.collectives.hybrid import HybridGroup
from shardopt.collectives.in_flight import Finish, InFlightQueue, run_in_flight
from shardopt.collectives.rank_group import RankGroup
from shardopt.collectives.staging import StagingPool

__all__ = [
    "Finish",
    "Group",
    "HybridGroup",
    "InFlightQueue",
    "LoneRank",
    "Pending",
    "RankGroup",
    "StagingPool",
    "any_over_ranks",
    "digest",
    "option_fingerprint",
    "options_of",
    "pack_flags",
    "raise_failures",
    "raise_if_any_failed",
    "raise_together",
    "ranks_by_flag",
    "require_equal",
    "run_in_flight",
    "unpack_flags",
]
