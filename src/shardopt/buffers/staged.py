"""Parameters keep their own memory; sections are copied through reused staging buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.buffers.pool import Pool
from shardopt.partition import Bucket, Section

if TYPE_CHECKING:
    from torch import Tensor

CopyAll = Callable[[Sequence[Any], Sequence[Any]], None]
"""Copies each tensor of the second sequence into its twin in the first, in as few kernels as the framework can."""


class StagedBucket:
    """A bucket whose parameters stay as they are."""

    def __init__(
        self, plan: Bucket, params: Sequence[Tensor], *, pool: Pool, copy_all: CopyAll
    ) -> None:
        """Bind ``plan`` to parameters; ``params`` is indexed by the plan's parameter indices."""
        self.plan = plan
        self._params = params
        self._pool = pool
        self._copy_all = copy_all
        staged = [section.numel for section in plan.sections if len(section.slots) > 1]
        pool.expect(sum(staged), like=params[plan.params[0]])
        self._kept_values: dict[int, tuple[list[Any], list[Tensor]]] = {}
        self._kept_pieces: dict[int, tuple[int, list[Tensor]]] = {}

    def open(self, ranks: Sequence[int]) -> OpenStagedBucket:
        """Take staging memory for those sections that need it."""
        sections = {rank: self.plan.sections[rank] for rank in ranks}
        direct = {rank: self._direct(section) for rank, section in sections.items()}
        staged = {rank: s for rank, s in sections.items() if direct[rank] is None}
        flats = {rank: flat for rank, flat in direct.items() if flat is not None}
        memory = None
        if staged:
            numels = [section.numel for section in staged.values()]
            memory = self._pool.take(sum(numels), like=self._params[self.plan.params[0]])
            pieces = memory.narrow(0, 0, sum(numels)).split(numels)  # type: ignore[no-untyped-call]
            flats.update(zip(staged, pieces, strict=True))
        return OpenStagedBucket(self, flats, staged, memory)

    def reattach(self) -> list[int]:
        """Nothing to do: parameters may move freely."""
        return []

    def restore(self) -> None:
        """Nothing to do: parameters have their own memory."""

    def pack(self, section: Section, flat: Tensor) -> None:
        """Copy the parameters of a section into its flat tensor."""
        self._copy_all(self._pieces(section, flat), self._values(section))

    def unpack(self, section: Section, flat: Tensor) -> None:
        """Copy a section's flat tensor into its parameters."""
        self._copy_all(self._values(section), self._pieces(section, flat))

    def release(self, memory: Tensor) -> None:
        """Give staging memory back to the pool."""
        self._pool.give_back(memory)

    def _direct(self, section: Section) -> Tensor | None:
        """A section that is one contiguous parameter travels from, or into, that parameter's own memory."""
        if len(section.slots) != 1:
            return None
        param = self._params[section.slots[0].param].detach()
        return param.view(-1) if param.is_contiguous() else None

    def _values(self, section: Section) -> list[Tensor]:
        """The parameters of a section, detached; made anew only where a parameter has moved."""
        params = [self._params[slot.param] for slot in section.slots]
        places = [(param.data_ptr(), param.stride()) for param in params]
        if section.rank not in self._kept_values or self._kept_values[section.rank][0] != places:
            self._kept_values[section.rank] = places, [param.detach() for param in params]
        return self._kept_values[section.rank][1]

    def _pieces(self, section: Section, flat: Tensor) -> list[Tensor]:
        """The flat tensor of a section as its parameters' shapes; made anew only for other staging memory.

        Views cost more than copying a small parameter, and the pool hands out the same memory step after step.
        """
        place = flat.data_ptr()
        if section.rank not in self._kept_pieces or self._kept_pieces[section.rank][0] != place:
            numels = [slot.stop - slot.start for slot in section.slots]
            shapes = [self._params[slot.param].shape for slot in section.slots]
            pieces = flat.split(numels)  # type: ignore[no-untyped-call]
            views = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
            self._kept_pieces[section.rank] = place, views
        return self._kept_pieces[section.rank][1]


class OpenStagedBucket:
    """Sections of a ``StagedBucket`` while they travel."""

    def __init__(
        self,
        bucket: StagedBucket,
        flats: dict[int, Tensor],
        staged: dict[int, Section],
        memory: Tensor | None,
    ) -> None:
        """Hold the flat tensor of each rank's section, which of them are staged, and the memory those lie in."""
        self._bucket = bucket
        self._flats = flats
        self._staged = staged
        self._memory = memory

    def outgoing(self, rank: int) -> Tensor:
        """Copy the parameters of ``rank`` in, where they are staged."""
        if rank in self._staged:
            self._bucket.pack(self._staged[rank], self._flats[rank])
        return self._flats[rank]

    def incoming(self, rank: int) -> Tensor:
        """Return the memory to receive into."""
        return self._flats[rank]

    def close(self, received: Sequence[int]) -> None:
        """Copy what was received out, where it is staged, and give the memory back."""
        for rank in received:
            if rank in self._staged:
                self._bucket.unpack(self._staged[rank], self._flats[rank])
        if self._memory is not None:
            self._bucket.release(self._memory)
            self._memory = None
