"""The only door to other ranks.

``group`` holds the sharding group: a real process group, or one rank alone on the same path. ``agreement`` lets all
ranks raise or none. ``window`` keeps a bounded number of collectives in flight and awaits each exactly once.
This room sees flat tensors and plain values; it knows nothing of parameters, layouts or optimizers, and reaches a
framework only through the modules it is handed.
"""

from shardopt.collectives.agreement import (
    digest,
    raise_as_settled,
    raise_together,
    require_equal,
    settle,
)
from shardopt.collectives.group import Group, LoneRank, Pending, RankGroup
from shardopt.collectives.window import Finish, Window, run_windowed

__all__ = [
    "Finish",
    "Group",
    "LoneRank",
    "Pending",
    "RankGroup",
    "Window",
    "digest",
    "raise_as_settled",
    "raise_together",
    "require_equal",
    "run_windowed",
    "settle",
]
