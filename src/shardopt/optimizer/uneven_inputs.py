"""The protocol of ``Join``, for training on uneven inputs."""

from __future__ import annotations

from typing import Any

from shardopt.errors import OverlapError
from shardopt.frameworks import stand_last
from shardopt.optimizer.base import OptimizerBase


class JoinMethods(OptimizerBase):
    """What makes the optimizer a ``Joinable``."""

    @property
    def _join_config(self) -> Any:
        """What ``Join`` tells the optimizer."""
        return self._membership.config

    @_join_config.setter
    def _join_config(self, config: Any) -> None:
        self._membership.config = config

    def join_hook(self, **kwargs: Any) -> Any:
        """Return the hook with which this rank goes on to update its shard after its inputs ran out. Local.

        ``kwargs`` are those given to ``Join``; none is used.
        """
        stand_in = stand_last(self, lambda joinable: isinstance(joinable, JoinMethods))
        if stand_in is not self:
            return stand_in.join_hook(**kwargs)
        if self._pieces.steps_in_backward or self._group.num_members > self._group.world_size:
            raise OverlapError(
                "Join cannot be combined with steps in backward, or with a grid of ranks; for uneven inputs use "
                "overlap_with_ddp=False, step_in_backward=False and one process group"
            )
        return self.framework.shadow_step(self._shadow_step, self._membership.leave)

    @property
    def join_device(self) -> Any:
        """The device of the first parameter, for the collectives of ``Join``."""
        return self.shards.params[0].device

    @property
    def join_process_group(self) -> Any:
        """The sharding group, for the collectives of ``Join``."""
        return self._group.process_group

    def _shadow_step(self) -> None:
        self._is_fresh = False
        self._pieces.stepper.shadow_step()
