"""What this rank's local optimizer updates of one bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.buffers.bucket import ParamBucket
from shardopt.buffers.pool import Pool
from shardopt.buffers.staged import CopyAll
from shardopt.buffers.viewed import ViewedBucket, view_slot
from shardopt.partition import ParamSpec, Section, Slot

if TYPE_CHECKING:
    from torch import Tensor

MakeParam = Callable[[Any], Any]
"""Makes a leaf parameter in the memory of a tensor."""


class OwnedSection:
    """The parameters, or parts of them, that this rank owns in a bucket, as its local optimizer sees them.

    They are the parameters themselves; flat parameters in the same memory where the bucket is cut by element; or, with
    master weights, copies in another dtype, from which the section is rounded after an update.
    """

    def __init__(
        self,
        bucket: ParamBucket,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        *,
        rank: int,
        master_dtype: Any,
        pool: Pool,
        copy_all: CopyAll,
        make_param: MakeParam,
    ) -> None:
        """Bind the section of ``rank``; masters are made where ``master_dtype`` is not the dtype of the bucket."""
        self._bucket = bucket
        self._params = params
        self._specs = specs
        self._section: Section = bucket.plan.sections[rank]
        self._pool = pool
        self._copy_all = copy_all
        self._scratch: Tensor | None = None
        like = params[bucket.plan.params[0]].detach()
        self.masters: Tensor | None = None
        if master_dtype is not None and master_dtype != like.dtype and not like.is_complex():
            self.masters = like.new_zeros((self._section.numel,), dtype=master_dtype)
        self.tensors: dict[int, Tensor] = {
            slot.param: self._tensor(slot, make_param) for slot in self._section.slots
        }
        self._seen: dict[int, tuple[int, int]] = {}
        if self.masters is not None and self.tensors:
            self._copy_all(self._pieces(), self._values())
        self.note()

    def bind(self, gradients: Mapping[int, Tensor]) -> None:
        """Let the local optimizer see gradients; those of another dtype than its tensors are cast."""
        if not gradients:
            return
        sample = next(iter(gradients.values()))
        target = next(iter(self.tensors.values()))
        if sample.dtype == target.dtype:
            for param, gradient in gradients.items():
                self.tensors[param].grad = gradient
            return
        self._scratch = self._pool.take(self._section.numel, like=target)
        for slot in self._section.slots:
            if slot.param in gradients:
                cast = self._shaped(self._scratch, slot)
                cast.copy_(gradients[slot.param])
                self.tensors[slot.param].grad = cast

    def unbind(self, *, keep: bool) -> None:
        """Take gradients back that ``bind`` gave; ``keep`` those of tensors that are parameters themselves."""
        for param, tensor in self.tensors.items():
            if not keep or tensor is not self._params[param]:
                tensor.grad = None
        if self._scratch is not None:
            self._pool.give_back(self._scratch)
            self._scratch = None

    def write_back(self) -> None:
        """Round master weights into the parameters."""
        if self.masters is not None and self.tensors:
            self._copy_all(self._values(), self._pieces())

    def note(self) -> None:
        """Remember the parameters as they are, as what master weights were rounded to."""
        if self.masters is not None:
            self._seen = {slot.param: self._place(slot.param) for slot in self._section.slots}

    def follow(self, moved: Sequence[int]) -> None:
        """Let master weights follow parameters that somebody else has changed since; the others keep their precision.

        An element that is what its master weight rounds to was not changed: a state dict loaded into the model, say.
        """
        if self.masters is None:
            return
        for slot in self._section.slots:
            if slot.param in moved or self._place(slot.param) != self._seen[slot.param]:
                master, value = self._shaped(self.masters, slot), self._value(slot)
                is_same = master.to(value.dtype) == value
                master.copy_(master.where(is_same, value.to(master.dtype)))
        self.note()

    def _place(self, param: int) -> tuple[int, int]:
        return self._params[param].data_ptr(), self._params[param]._version

    def _value(self, slot: Slot) -> Tensor:
        """This rank's part of one parameter, laid out as its master weights are."""
        if isinstance(self._bucket, ViewedBucket) and self._bucket.plan.is_cut:
            return self._bucket.flat_range(slot.start, slot.numel)
        return self._params[slot.param].detach()

    def _values(self) -> list[Tensor]:
        """This rank's parts in the parameters' own dtype."""
        if isinstance(self._bucket, ViewedBucket):
            return [self._bucket.flat_range(self._section.start, self._section.numel)]
        return [self._params[slot.param].detach() for slot in self._section.slots]

    def _pieces(self) -> list[Tensor]:
        """The same of the master weights."""
        assert self.masters is not None
        if isinstance(self._bucket, ViewedBucket):
            return [self.masters]
        return [self._shaped(self.masters, slot) for slot in self._section.slots]

    def _tensor(self, slot: Slot, make_param: MakeParam) -> Tensor:
        made: Tensor
        if self.masters is not None:
            made = make_param(self._shaped(self.masters, slot))
        elif not self._bucket.plan.is_cut:
            return self._params[slot.param]
        else:
            assert isinstance(self._bucket, ViewedBucket)
            made = make_param(self._bucket.flat_range(slot.start, slot.numel))
        return made

    def _shaped(self, flat: Tensor, slot: Slot) -> Tensor:
        """A slot of memory laid out as the section: flat where the bucket is cut, else in the parameter's shape."""
        start = slot.start - self._section.start
        if self._bucket.plan.is_cut:
            return flat.narrow(0, start, slot.numel)
        return view_slot(flat, Slot(slot.param, start, start + slot.numel), self._specs[slot.param])
