"""DDP communication hooks that step the optimizer while backward runs.

Needs ``ZeroRedundancyOptimizer(..., overlap_with_ddp=True)`` over parameters of the DDP module. The parameters after
each backward are bitwise those of the unsharded optimizer stepped after it, from the first iteration on. Updates can
run inside backward whenever every parameter of a bucket has its gradient by then. With ``find_unused_parameters``, and
in the first iteration of a static graph, DDP itself learns only at the end of backward which parameters were used;
then updates and exchanges follow at that point, still inside ``backward()``.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shardopt.step import backward_step_of
from shardopt.torch import ZeroRedundancyOptimizer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket
else:
    GradBucket = dist.GradBucket

Hook = Callable[[Any, GradBucket], Future[torch.Tensor]]


def hook_with_zero_step(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Wrap ``hook`` so that parameters are updated once all reductions of a backward are launched.

    Backward's own computation runs undisturbed; updates overlap with outstanding reductions and with each other's
    exchange. To be preferred where communication is slow compared with computation.

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
    return _as_function(_StepInBackward(hook, ddp, zero, is_interleaved=False))


def hook_with_zero_step_interleaved(
    hook: Hook,
    ddp: DistributedDataParallel,
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,
) -> Hook:
    """Wrap ``hook`` so that a bucket is updated as soon as the next one's reduction is launched.

    Updates and exchanges are interleaved with backward's computation. To be preferred where communication is fast
    compared with computation. Arguments and errors are those of ``hook_with_zero_step``.
    """
    return _as_function(_StepInBackward(hook, ddp, zero, is_interleaved=True))


def _as_function(step: "_StepInBackward") -> Hook:
    """DDP reads name and annotations of its hook as objects, so this file does not postpone their evaluation."""

    def reduce_and_step(state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        return step.reduce(state, bucket)

    return reduce_and_step


class _ReducedBucket:
    """A bucket whose reduction was launched."""

    def __init__(
        self, bucket: GradBucket, future: Future[torch.Tensor], index_of: dict[int, int]
    ) -> None:
        places = [
            (place, index_of[id(p)])
            for place, p in enumerate(bucket.parameters())
            if id(p) in index_of
        ]
        self.indices = [index for _, index in places]
        self._places = [place for place, _ in places]
        self._views = bucket.gradients()
        self.is_sparse = bucket.buffer().is_sparse
        self._buffer = bucket.buffer()
        self._future = future

    def wait(self) -> list[torch.Tensor]:
        """Return the reduced gradients of ``indices``."""
        value = self._future.wait()
        reduced = value[0] if isinstance(value, (list, tuple)) else value
        if reduced.data_ptr() != self._buffer.data_ptr():
            self._buffer.copy_(reduced.view_as(self._buffer))
        return [self._views[place] for place in self._places]


class _StepInBackward:
    """The communication hook: launches reductions in DDP's order and updates what has been reduced, in that order.

    Everything collective is launched from the thread that runs backward, never from a future's callback, whose order
    may differ between ranks.
    """

    def __init__(
        self,
        hook: Hook,
        ddp: DistributedDataParallel,
        zero: ZeroRedundancyOptimizer,
        *,
        is_interleaved: bool,
    ) -> None:
        self._step = backward_step_of(
            zero,
            ddp_params=ddp.parameters(),
            ddp_ranks=dist.get_process_group_ranks(ddp.process_group),
            zero_ranks=dist.get_process_group_ranks(zero.join_process_group),
        )
        self._hook = hook
        self._ddp = ddp
        self._params = zero.shards.params
        self._index_of = {id(param): index for index, param in enumerate(self._params)}
        self._is_interleaved = is_interleaved
        self._reducing: list[_ReducedBucket] = []
        self._has_static_graph_run = False
        self._all_used_in_static_graph = False

    def reduce(self, state: Any, bucket: GradBucket) -> Future[torch.Tensor]:
        future = self._hook(state, bucket)
        self._reducing.append(_ReducedBucket(bucket, future, self._index_of))
        if self._may_update_now() and (self._is_interleaved or bucket.is_last()):
            self._update_all_but(1)
        if bucket.is_last():
            # DDP queues the callback that fills param.grad after this one; so ours queues once more, to run after it
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: engine.queue_callback(self._finish))
        return future

    def _may_update_now(self) -> bool:
        """Whether every parameter of a reduced bucket is known to have been used."""
        if self._ddp.static_graph:
            return self._has_static_graph_run and self._all_used_in_static_graph
        return not self._ddp.find_unused_parameters

    def _update_all_but(self, num_newest: int) -> None:
        while len(self._reducing) > num_newest and not self._reducing[0].is_sparse:
            reduced = self._reducing.pop(0)
            self._step.update(reduced.indices, reduced.wait())

    @torch.no_grad()
    def _finish(self) -> None:
        """Update what is left, with DDP's verdict on unused parameters, and wait for every exchange."""
        while self._reducing:
            gradients = {i: self._params[i].grad for i in self._reducing.pop(0).indices}
            used = {i: gradient for i, gradient in gradients.items() if gradient is not None}
            self._step.update(list(used), list(used.values()))
        if self._ddp.static_graph and not self._has_static_graph_run:
            self._has_static_graph_run = True
            self._all_used_in_static_graph = all(
                p.grad is not None for p in self._params if p.requires_grad
            )
        self._step.finish()
