"""Parameters become views of flat buckets, from and into which they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.partition import Bucket, ParamSpec, Slot

if TYPE_CHECKING:
    from torch import Tensor


OwnStorage = Callable[[Any], Any]
"""Returns a tensor in the same memory, whose storage holds nothing else."""


class ViewedBucket:
    """A bucket that owns the memory of its parameters.

    A dense parameter keeps its strides (channels-last weights stay channels-last); any other becomes contiguous.
    """

    def __init__(
        self,
        plan: Bucket,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        *,
        own_storage: OwnStorage = lambda view: view,
    ) -> None:
        """Allocate the bucket and move the parameters in.

        Args:
            plan: What lies where.
            params: Indexed by parameter index, as ``specs``.
            specs: Their facts.
            own_storage: Makes a view a tensor whose storage ends where it does, so that whatever saves a parameter saves
                that much, and not the whole bucket.
        """
        self.plan = plan
        self._params = params
        self._flat = params[plan.params[0]].detach().new_zeros((plan.numel,))
        self._views: dict[int, Tensor] = {}
        for index, place in plan.places.items():
            self._views[index] = own_storage(view_slot(self._flat, place, specs[index]))
        for index, view in self._views.items():
            view.copy_(params[index].detach())
            params[index].data = view

    def open(self, ranks: Sequence[int]) -> OpenViewedBucket:
        """Narrow to the sections of ``ranks``."""
        sections = [self.plan.sections[rank] for rank in ranks]
        return OpenViewedBucket({s.rank: self._flat.narrow(0, s.start, s.numel) for s in sections})

    def flat_range(self, start: int, numel: int) -> Tensor:
        """(numel,) memory of the bucket from element ``start`` on."""
        return self._flat.narrow(0, start, numel)

    def reattach(self) -> list[int]:
        """Take back parameters whose ``data`` was replaced by a tensor of equal shape and dtype, with its values."""
        moved = {
            index: self._params[index]
            .detach()
            .clone()  # it may lie in the memory of another one that moved
            for index, view in self._views.items()
            if self._params[index].data_ptr() != view.data_ptr()
            or self._params[index].stride() != view.stride()
        }
        for index, values in moved.items():
            self._views[index].copy_(values)
            self._params[index].data = self._views[index]
        return list(moved)

    def restore(self) -> None:
        """Copy every parameter out again."""
        for index in self._views:
            self._params[index].data = self._params[index].detach().clone()
        self._views.clear()


class OpenViewedBucket:
    """Sections of a ``ViewedBucket`` while they travel: the memory of the parameters themselves."""

    def __init__(self, flats: dict[int, Tensor]) -> None:
        """Hold one narrow view per rank."""
        self._flats = flats

    def outgoing(self, rank: int) -> Tensor:
        """Return the section as it lies."""
        return self._flats[rank]

    def incoming(self, rank: int) -> Tensor:
        """Return the section as it lies."""
        return self._flats[rank]

    def close(self, received: Sequence[int]) -> None:
        """Nothing to put away: what arrived is in the parameters."""


def view_slot(flat: Tensor, slot: Slot, spec: ParamSpec) -> Tensor:
    """The slot of ``flat`` in the shape, and where dense the memory format, of its parameter."""
    piece = flat.narrow(0, slot.start, slot.numel)
    if spec.is_dense:
        return piece.as_strided(spec.shape, spec.stride, piece.storage_offset())
    return piece.view(spec.shape)
