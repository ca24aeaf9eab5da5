"""The only door to other ranks.

``group`` says what the rooms may ask of the sharding group, and holds the group of one rank; ``rank_group`` is a real
process group, and chooses the primitives; ``grid`` is several that replicate one another. ``host`` exchanges between ranks
of one host, through memory that they share (``shared_file``) and messages over pipes (``mailbox``); ``staging`` lends
memory to send from. ``agreement`` lets all ranks raise or none, ``facts`` says what of their options they can compare,
``window`` keeps a bounded number of collectives in flight and awaits each exactly once.
This room sees flat tensors and plain values; it knows nothing of parameters, layouts or optimizers, and reaches a
framework only through the modules it is handed.
"""

from shardopt.collectives.agreement import (
    raise_as_settled,
    raise_together,
    require_equal,
    settle,
)
from shardopt.collectives.facts import digest, option_facts, options_of
from shardopt.collectives.grid import RankGrid
from shardopt.collectives.group import Group, LoneRank, Pending
from shardopt.collectives.rank_group import RankGroup
from shardopt.collectives.staging import StagingPool
from shardopt.collectives.window import Finish, Window, run_windowed

__all__ = [
    "Finish",
    "Group",
    "LoneRank",
    "Pending",
    "RankGrid",
    "RankGroup",
    "StagingPool",
    "Window",
    "digest",
    "option_facts",
    "options_of",
    "raise_as_settled",
    "raise_together",
    "require_equal",
    "run_windowed",
    "settle",
]
