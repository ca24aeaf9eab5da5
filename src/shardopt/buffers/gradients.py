"""The gradients of one bucket: laid out like its parameters while they travel, and the reduced part a rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.buffers.pool import Pool
from shardopt.buffers.viewed import view_slot
from shardopt.partition import Bucket, ParamSpec, Slot

if TYPE_CHECKING:
    from torch import Tensor

ScaleInto = Callable[[Any, Any, float], None]
"""(destination, source, factor): writes the product into the destination, unseen by autograd."""


class GradientBucket:
    """Takes what this rank computed, and holds what it owns of the average, S / N bytes, from step to step.

    Note [Scaling]: averages are sums of gradients that were scaled by 1/N while they were copied, as DDP rounds. A bucket
    of one parameter is sent from the gradient's own memory, without a copy here, and its sum is scaled instead, where that
    is the same to the bit: N a power of two, a dtype that does not overflow first, and no subnormal numbers.
    """

    def __init__(
        self,
        plan: Bucket,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        *,
        rank: int,
        num_members: int,
        wire_dtype: Any,
        sum_dtype: Any,
        pool: Pool,
        scale_into: ScaleInto,
    ) -> None:
        """Bind ``plan`` to parameters; both sequences are indexed by parameter index.

        Args:
            plan: Where each gradient lies.
            params: All parameters.
            specs: Their facts.
            rank: This rank.
            num_members: N, over which gradients are averaged.
            wire_dtype: In which gradients travel; None for that of the parameters.
            sum_dtype: In which they are added up and kept; None for that in which they travel.
            pool: Lends staging memory.
            scale_into: Copies and scales.
        """
        self.plan = plan
        self._places = plan.places
        self._params = params
        self._specs = specs
        self._pool = pool
        self._scale_into = scale_into
        like = params[plan.params[0]].detach()
        self._like = like.new_empty((0,), dtype=wire_dtype or like.dtype)
        section = plan.sections[rank]
        self._start = section.start
        self._owned = {slot.param: slot for slot in section.slots}
        self.shard = like.new_zeros((section.numel,), dtype=sum_dtype or self._like.dtype)
        self._filled: dict[int, Tensor] = {}
        self._kept_views: tuple[int, dict[int, Tensor]] = (0, {})
        self._memory: Tensor | None = None
        self._is_borrowed = False
        self._is_alone = len(self._places) == 1 and like.device.type == "cpu"
        if not self._is_alone:  # which is lent no memory, as a rule
            pool.expect(plan.numel, like=self._like)
        self._factor = 1.0 / num_members
        is_exact = num_members & (num_members - 1) == 0 and "float16" not in str(
            self._like.dtype
        ).split(".")
        self.scales_sum = self._is_alone and is_exact

    @property
    def nbytes(self) -> int:
        """Bytes that are held while it travels."""
        return self.plan.numel * int(self._like.element_size())

    @property
    def casts(self) -> bool:
        """Whether sums have another dtype than what travels."""
        return bool(self.shard.dtype != self._like.dtype)

    @property
    def sum_scale(self) -> float:
        """What is left to be multiplied into a sum."""
        return self._factor if self.scales_sum else 1.0

    def add(self, param: int, gradient: Tensor) -> None:
        """Take this rank's gradient of a parameter in; what it held before is added to.

        The gradient's memory may be kept, and changed, until ``release``.
        """
        gradient = gradient.detach()
        factor = 1.0 if self.scales_sum else self._factor
        if param in self._filled:
            self._filled[param].add_(gradient, alpha=factor)
            return
        if self._can_borrow(param, gradient):
            self._memory = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
            self._is_borrowed = True
            self._filled[param] = gradient
            if factor != 1.0:
                gradient.mul_(factor)
            return
        view = self._view(param)
        self._scale_into(view, gradient, factor)
        self._filled[param] = view

    def seal(self) -> list[Tensor]:
        """Return what travels, the section of each rank; zeros where no gradient was taken in."""
        for param in self._places:
            if param not in self._filled:
                self._view(param).zero_()
        assert self._memory is not None
        stop = self.plan.numel
        if self._is_alone:  # padding at the end, which a borrowed gradient lacks, does not travel
            stop = self._places[self.plan.params[0]].stop
        bounds = [(min(s.start, stop), min(s.stop, stop)) for s in self.plan.sections]
        return [self._memory.narrow(0, start, end - start) for start, end in bounds]

    def take_memory(self) -> Callable[[], None]:
        """Start to collect anew; the result lets go of the memory that ``seal`` returned."""
        memory, is_borrowed = self._memory, self._is_borrowed
        self._memory, self._is_borrowed = None, False
        self._filled = {}

        def release() -> None:
            if memory is not None and not is_borrowed:
                self._pool.give_back(memory)

        return release

    def scratch(self, num: int, numel: int) -> tuple[list[Tensor], Callable[[], None]]:
        """``num`` tensors of ``numel`` elements for what is received, and what gives them back."""
        if not num or not numel:
            return [self._like] * num, lambda: None
        memory = self._pool.take(num * numel, like=self._like)
        tensors = [memory.narrow(0, i * numel, numel) for i in range(num)]
        return tensors, lambda: self._pool.give_back(memory)

    def reduced(self, param: int, *, is_whole: bool) -> Tensor:
        """The reduced gradient of what this rank owns of a parameter, as a view of ``shard``."""
        slot = self._owned[param]
        place = Slot(param, slot.start - self._start, slot.stop - self._start)
        if is_whole:
            return view_slot(self.shard, place, self._specs[param])
        return self.shard.narrow(0, place.start, place.numel)

    def _view(self, param: int) -> Tensor:
        """Where a parameter's gradient lies in staging memory, in its shape; made anew only for other memory."""
        if self._memory is None:
            self._memory = self._pool.take(self.plan.numel, like=self._like)
            if self._memory.data_ptr() != self._kept_views[0]:
                self._kept_views = self._memory.data_ptr(), {}
        views = self._kept_views[1]
        if param not in views:
            views[param] = view_slot(self._memory, self._places[param], self._specs[param])
        return views[param]

    def _can_borrow(self, param: int, gradient: Tensor) -> bool:
        """Whether a gradient lies in memory just as it would travel."""
        return (
            self._is_alone
            and self._memory is None
            and gradient.dtype == self._like.dtype
            and self._specs[param].is_dense
            and tuple(gradient.stride()) == self._specs[param].stride
        )
