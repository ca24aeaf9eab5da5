"""The TensorPlay front: ``ZeroRedundancyOptimizer`` as a ``tensorplay.optim.Optimizer`` and a ``Joinable``."""

from __future__ import annotations

try:
    import tensorplay as _framework  # noqa: F401 - only to tell a missing framework from a fault in our own modules
except ModuleNotFoundError as error:
    raise ImportError(
        "shardopt.tensorplay needs TensorPlay; install it with: pip install 'shardopt[tensorplay]'"
    ) from error

from tensorplay.distributed.algorithms.join import Joinable
from tensorplay.optim import Optimizer

from shardopt.frameworks.tensorplay import TENSORPLAY
from shardopt.optimizer import ShardedOptimizer


class ZeroRedundancyOptimizer(ShardedOptimizer, Optimizer, Joinable):  # type: ignore[misc]
    """Wrap any optimizer class of TensorPlay and keep about 1/N of its state on each of N ranks.

    The same class as ``shardopt.ZeroRedundancyOptimizer``, on TensorPlay's tensors and process groups: see there for
    what is collective, for the arguments and for the errors. ``docs/tensorplay.md`` sets each sentence of TensorPlay's
    own documentation beside the test that proves it.

    Source: ZeRO stage 1 (P_os), arXiv:1910.02054; interface of ``tensorplay.distributed.optim``.

    Example::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), tensorplay.optim.AdamW, lr=3e-4)
        loss.backward()
        optimizer.step()
    """

    framework = TENSORPLAY
    _hooked_step = Optimizer.profile_hook_step(ShardedOptimizer._step_after_backward)


__all__ = ["ZeroRedundancyOptimizer"]
