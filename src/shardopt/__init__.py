"""shardopt: ZeRO as a plain optimizer. Each of N ranks keeps about 1/N of the optimizer's state.

``ZeroRedundancyOptimizer`` here is the one for torch; it is loaded on first use, so that ``import shardopt`` needs no
framework.
"""

from typing import TYPE_CHECKING, Any

from shardopt.errors import (
    CheckpointError,
    NotConsolidatedError,
    OverlapError,
    ParameterChangedError,
    RankMismatchError,
    RemoteRankError,
    ShardoptError,
    StateMismatchError,
)
from shardopt.partition import newton_schulz_work
from shardopt.sharding import Sharding

if TYPE_CHECKING:
    from shardopt.torch import ZeroRedundancyOptimizer

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "NotConsolidatedError",
    "OverlapError",
    "ParameterChangedError",
    "RankMismatchError",
    "RemoteRankError",
    "Sharding",
    "ShardoptError",
    "StateMismatchError",
    "ZeroRedundancyOptimizer",
    "newton_schulz_work",
]


def __getattr__(name: str) -> Any:
    """Load the torch front when its class is asked for.

    Raises:
        ImportError: torch is not installed.
    """
    if name != "ZeroRedundancyOptimizer":
        raise AttributeError(f"module 'shardopt' has no attribute {name!r}")
    try:
        import torch  # noqa: F401 - only to tell a missing torch from a fault in our own modules
    except ModuleNotFoundError as error:
        raise ImportError(
            "shardopt.ZeroRedundancyOptimizer needs torch; install it with: pip install 'shardopt[torch]'"
        ) from error
    from shardopt.torch import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer
