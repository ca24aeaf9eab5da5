"""What the groups of methods share: the attributes of one sharded optimizer, as the constructor leaves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from shardopt.collectives import Group
from shardopt.frameworks import Framework
from shardopt.optimizer.assembly import Pieces
from shardopt.sharding import Sharding
from shardopt.shards import Shards
from shardopt.step import JoinMembership


class OptimizerBase:
    """Attributes only; the groups of methods derive from it, and ``ShardedOptimizer`` from those."""

    framework: ClassVar[Framework]
    optim: Any
    """The wrapped optimizer of this rank."""
    shards: Shards
    state: Any
    defaults: dict[str, Any]
    _group: Group
    _pieces: Pieces
    _groups: list[dict[str, Any]]
    _membership: JoinMembership
    _sharding: Sharding
    _is_fresh: bool
    """Whether nothing was stepped or loaded yet, so that there is no state."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, whose options are the truth; always the same list, which the pieces know too."""
        return self._groups

    @param_groups.setter
    def param_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        self._groups[:] = groups

    def wait(self) -> None:
        """Wait until all parameters are what the last ``step()`` made of them. Local."""
        self._pieces.exchange.drain()
