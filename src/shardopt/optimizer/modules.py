"""What ties the optimizer to the model that is trained."""

from __future__ import annotations

from typing import Any

from shardopt.optimizer.base import OptimizerBase
from shardopt.step import Attachment, equalize_buffers


class ModuleMethods(OptimizerBase):
    """Let a module wait for its parameters, and say how evenly they are shared."""

    def attach(self, module: Any, *, broadcast_buffers: bool = False) -> None:
        """Let ``step()`` return while parameters travel; each submodule's forward waits for those it holds. Collective.

        Whatever reads parameters elsewhere between ``step()`` and the end of the next forward has to call ``wait()`` first;
        ``module.state_dict()`` does. Where ranks share memory, nothing travels by itself, so ``step()`` waits all the same.

        Args:
            module: The module that is called in training; holds some or all parameters.
            broadcast_buffers: Make its buffers those of the first rank of the group now.

        Raises:
            ValueError: Parameters are no bucket views, which the exchange could write to meanwhile.
            RankMismatchError: Modules of different ranks have different buffers.
        """
        attachment = Attachment(
            module, self._pieces.exchange, self.shards, self.framework.outside_of_graphs
        )
        self._pieces.stepper.attach(attachment)
        if broadcast_buffers:
            equalize_buffers(self._group, module)

    @property
    def imbalance(self) -> float:
        """What the rank that carries most carries, over the mean of all ranks: 1.0 is even; see ``Sharding.cost``."""
        return self.shards.imbalance
