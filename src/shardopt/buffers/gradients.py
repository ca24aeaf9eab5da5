"""The gradients of one bucket: laid out like its parameters while they travel, and the reduced part a rank keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardopt.buffers.staged import CopyAll, StagingPool
from shardopt.buffers.viewed import view_slot
from shardopt.partition import Bucket, ParamSpec, Slot

if TYPE_CHECKING:
    from torch import Tensor


class GradientBucket:
    """Packs what this rank computed, and holds what it owns of the sum, S / N bytes, from step to step."""

    def __init__(
        self,
        plan: Bucket,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        *,
        rank: int,
        pool: StagingPool,
        copy_all: CopyAll,
    ) -> None:
        """Bind ``plan`` to parameters; both sequences are indexed by parameter index."""
        self.plan = plan
        self._params = params
        self._specs = specs
        self._pool = pool
        self._copy_all = copy_all
        pool.expect(plan.numel, like=params[plan.params[0]])
        section = plan.sections[rank]
        self._start = section.start
        self._owned = {slot.param: slot for slot in section.slots}
        self.shard = params[plan.params[0]].detach().new_zeros((section.numel,))

    def pack(self, present: Sequence[bool], *, scale: float) -> Tensor:
        """Return (plan.numel,) staging memory with this rank's gradients times ``scale``, zeros where it has none.

        Args:
            present: For each parameter whether its gradient counts.
            scale: 1 / N, so that a sum over ranks is the average, in the order in which DDP rounds.
        """
        memory = self._pool.take(self.plan.numel, like=self.shard)
        flat = memory.narrow(0, 0, self.plan.numel)
        views = {p: view_slot(flat, place, self._specs[p]) for p, place in self.plan.places.items()}
        gradients = {p: self._params[p].grad for p in views if present[p]}
        if (
            len(gradients) < len(views)
            or sum(view.numel() for view in views.values()) < flat.numel()
        ):
            flat.zero_()
        counted = [(views[p], g.detach()) for p, g in gradients.items() if g is not None]
        if counted:
            self._copy_all([view for view, _ in counted], [gradient for _, gradient in counted])
        flat.mul_(scale)
        return memory

    def parts(self, memory: Tensor) -> list[Tensor]:
        """The section of each rank in packed memory."""
        return [memory.narrow(0, s.start, s.numel) for s in self.plan.sections]

    def scratch(self, world_size: int) -> Tensor | None:
        """Staging memory for what is received from the other ranks."""
        if world_size == 1:
            return None
        return self._pool.take(max(1, (world_size - 1) * self.shard.numel()), like=self.shard)

    def release(self, *memories: Tensor | None) -> None:
        """Give staging memory back."""
        for memory in memories:
            if memory is not None:
                self._pool.give_back(memory)

    def reduced(self, param: int, *, is_whole: bool) -> Tensor:
        """The reduced gradient of what this rank owns of a parameter, as a view of ``shard``."""
        slot = self._owned[param]
        place = Slot(param, slot.start - self._start, slot.stop - self._start)
        if is_whole:
            return view_slot(self.shard, place, self._specs[param])
        return self.shard.narrow(0, place.start, place.numel)
