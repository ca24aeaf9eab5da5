"""Average gradients where no DDP does: each to the rank that owns its parameter, S * (N - 1) / N bytes per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from shardopt.buffers import GradientBucket
from shardopt.collectives import Finish, Group, run_windowed
from shardopt.partition import Part
from shardopt.step.exchange import DEPTH
from shardopt.step.flags import pack_flags, unpack_flags

if TYPE_CHECKING:
    from torch import Tensor


def agree_on_gradients(group: Group, present: Sequence[bool]) -> list[bool]:
    """Return for each parameter whether any rank has a gradient for it. Collective."""
    reports = [
        unpack_flags(ints, len(present)) for ints in group.all_gather_ints(pack_flags(present))
    ]
    return [any(flags) for flags in zip(*reports, strict=True)]


def reduce_gradients(
    group: Group,
    buckets: Sequence[GradientBucket],
    params: Sequence[Tensor],
    parts: Sequence[Part],
    tensors: Mapping[int, Tensor],
    *,
    has_inputs: bool,
) -> list[bool]:
    """Average gradients over ranks and leave each rank those of what it owns. Collective.

    A parameter without gradient on some ranks gets zeros from them; without gradient on any rank it keeps none, as under
    DDP. Gradients are consumed: afterwards ``tensors[i].grad`` is the average, and every other gradient is None.

    Args:
        group: The sharding group.
        buckets: All gradient buckets.
        params: All parameters, with the gradients of this rank.
        parts: What this rank owns.
        tensors: What its local optimizer updates, by parameter index.
        has_inputs: Whether this rank's gradients are of this step; a rank that ran out of inputs contributes zeros.

    Returns:
        For each parameter whether any rank had a gradient for it.
    """
    present = [has_inputs and param.grad is not None for param in params]
    used = agree_on_gradients(group, present)
    wanted = [bucket for bucket in buckets if any(used[p] for p in bucket.plan.params)]
    run_windowed((partial(_launch, group, bucket, present) for bucket in wanted), depth=DEPTH)
    for param in params:
        param.grad = None
    bucket_of = {p: bucket for bucket in wanted for p in bucket.plan.params}
    for part in parts:
        tensor = tensors[part.param]
        if not used[part.param]:
            tensor.grad = None
        elif part.param in bucket_of:
            tensor.grad = bucket_of[part.param].reduced(part.param, is_whole=part.is_whole)
        else:
            tensor.grad = (
                tensor.detach().clone()
            )  # empty, so in no bucket: any gradient is the average
    return used


def _launch(group: Group, bucket: GradientBucket, present: Sequence[bool]) -> Finish:
    """Launch the reduction of one bucket."""
    memory = bucket.pack(present, scale=1.0 / group.world_size)
    scratch = bucket.scratch(group.world_size)
    pending = group.reduce_scatter(bucket.parts(memory), out=bucket.shard, scratch=scratch)

    def finish() -> None:
        try:
            pending.wait()
        finally:
            bucket.release(memory, scratch)

    return finish
