"""TensorPlay's DDP communication hooks that step the optimizer while backward runs.

As ``shardopt.ddp_zero_hook`` for torch. TensorPlay's DDP calls the hook of a bucket in order of buckets, waits for what it
returns and copies that into the gradients, so a bucket can be updated as soon as its reduction is awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorplay
import tensorplay.distributed as dist

from shardopt.collectives import any_over_ranks
from shardopt.step import backward_step_of
from shardopt.tensorplay import ZeroRedundancyOptimizer

Hook = Callable[[Any, Any], Any]


def hook_with_zero_step(
    hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Wrap ``hook`` so that parameters are updated once the last bucket of a backward is reduced.

    Args:
        hook: Reduces a bucket, e.g. ``allreduce_hook``.
        ddp: The module whose hook this becomes: ``ddp.register_comm_hook(None, hook_with_zero_step(...))``.
        zero: Made with ``overlap_with_ddp=True`` over parameters of ``ddp`` and the same process group.
        shard_buckets: Accepted for compatibility. Ownership follows parameters, not DDP's buckets, so every bucket is
            divided among ranks either way.

    Raises:
        ValueError: ``zero`` was made without ``overlap_with_ddp``, for another process group, or with parameters that
            ``ddp`` does not reduce.
    """
    return _StepInBackward(hook, ddp, zero, is_interleaved=False)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """Wrap ``hook`` so that a bucket is updated as soon as it is reduced.

    Arguments and errors are those of ``hook_with_zero_step``.
    """
    return _StepInBackward(hook, ddp, zero, is_interleaved=True)


class _StepInBackward:
    """The communication hook: reduces buckets in DDP's order and updates them in that order."""

    def __init__(
        self, hook: Hook, ddp: Any, zero: ZeroRedundancyOptimizer, *, is_interleaved: bool
    ) -> None:
        self._step = backward_step_of(
            zero,
            ddp_params=ddp.parameters(),
            ddp_ranks=dist.get_process_group_ranks(ddp.process_group),
            zero_ranks=dist.get_process_group_ranks(zero.join_process_group),
        )
        self._group = zero.shards.group
        self._hook = hook
        self._index_of = {id(param): index for index, param in enumerate(zero.shards.params)}
        self._is_interleaved = is_interleaved
        self._reduced: list[tuple[list[int], list[Any]]] = []

    def __call__(self, state: Any, bucket: Any) -> Any:
        result = self._hook(state, bucket)
        value = result.wait() if hasattr(result, "wait") else result
        buffer = value[0] if isinstance(value, (list, tuple)) else value
        with tensorplay.no_grad():
            if buffer.data_ptr() != bucket.buffer().data_ptr():
                bucket.buffer().copy_(buffer.view(bucket.buffer().shape))
            self._reduced.append(self._used_gradients(bucket))
            if self._is_interleaved or bucket.is_last():
                self._update()
            if bucket.is_last():
                self._step.finish(tracks_gradients=False)  # DDP goes on to copy into them
        return bucket.buffer()

    def _used_gradients(self, bucket: Any) -> tuple[list[int], list[Any]]:
        """Indices and reduced gradients of the bucket's parameters that any rank has a gradient for. Collective."""
        params = bucket.parameters()
        used = any_over_ranks(self._group, [param.grad is not None for param in params])
        found = [
            (self._index_of[id(param)], gradient)
            for param, gradient, is_used in zip(params, bucket.gradients(), used, strict=True)
            if is_used and id(param) in self._index_of
        ]
        return [index for index, _ in found], [gradient for _, gradient in found]

    def _update(self) -> None:
        while self._reduced:
            self._step.update(*self._reduced.pop(0))
