"""Load a full state dict that one rank has: it sends every other rank just its part, a few parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from shardopt.checkpoint.access import StateAccess
from shardopt.checkpoint.consolidate import receive_tensors, send_tensors
from shardopt.checkpoint.fitting import require_fitting
from shardopt.checkpoint.load import (
    has_param_shape,
    local_groups,
    part_of,
    require_state_dict,
    saved_ids,
)
from shardopt.checkpoint.saved import SavedState
from shardopt.checkpoint.sharded_files import require_same_params
from shardopt.checkpoint.structure import (
    TensorSlot,
    flatten,
    map_tensors,
    put_tensors,
    slots_of,
    take_tensors,
)
from shardopt.collectives import raise_together
from shardopt.files import TensorEntry
from shardopt.partition import ParamSpec, Part

if TYPE_CHECKING:
    from torch import Tensor


class FullSource(Protocol):
    """A full state dict on the rank that has it."""

    structure: dict[str, Any]
    """The state dict, with a ``TensorSlot`` for each tensor; state is keyed by the number of its parameter."""

    def entry(self, part: Part) -> Any:
        """The state of a part, as ``structure_of_part`` describes it."""

    def common(self) -> Any:
        """What every rank needs: the structure but for the state of parameters, with its tensors."""


class DictSource:
    """A state dict in memory, or mapped into it."""

    def __init__(self, state_dict: Mapping[str, Any], access: StateAccess) -> None:
        """Number its state as parameters are."""
        require_state_dict(state_dict)
        self._specs = access.specs
        index_of = {saved: index for index, saved in enumerate(saved_ids(state_dict))}
        numbered = {index_of.get(key, key): entry for key, entry in state_dict["state"].items()}
        self._state = {key: entry for key, entry in numbered.items() if _is_number(key, access)}
        others = {key: entry for key, entry in numbered.items() if key not in self._state}
        self._common = {**state_dict, "state": others}
        whole = {**state_dict, "state": {**self._state, **others}}
        self.structure, _ = take_tensors(whole, access.is_tensor)

    def entry(self, part: Part) -> Any:
        """A cut of it, without a copy where memory is in order."""
        return part_of(self._state[part.param], part, self._specs)

    def common(self) -> Any:
        """All but the state of parameters."""
        return self._common


class FileSource:
    """A checkpoint in files."""

    def __init__(self, saved: SavedState, access: StateAccess) -> None:
        """Read the headers."""
        require_same_params(saved, access)
        self._saved = saved
        self._access = access
        others = saved.read_common("others", access.empty)
        self._common = {
            **saved.read_common("extra", access.empty),
            "state": others,
            "param_groups": saved.read_common("param_groups", access.empty),
        }
        common, _ = take_tensors(self._common, access.is_tensor)
        described = {
            param: map_tensors(saved.described(param), partial(self._slot, param), _is_entry)
            for param in sorted(saved.parts)
        }
        self.structure = {**common, "state": {**described, **common["state"]}}

    def entry(self, part: Part) -> Any:
        """Read from the file."""
        return self._saved.read_entry(self._access.specs[part.param], part, self._access.empty)

    def common(self) -> Any:
        """Read already."""
        return self._common

    def _slot(self, param: int, entry: TensorEntry) -> TensorSlot:
        empty = self._access.empty(0, entry.dtype)
        stride = None
        spec = self._access.specs[param]
        if entry.shape == spec.shape and spec.is_dense:
            stride = spec.stride
        return TensorSlot(0, entry.shape, stride, str(empty.dtype))


def _is_entry(value: Any) -> bool:
    return isinstance(value, TensorEntry)


def _is_number(key: Any, access: StateAccess) -> bool:
    return isinstance(key, int) and 0 <= key < len(access.specs)


def structure_of_part(entry: Any, part: Part, spec: ParamSpec) -> Any:
    """What a part of a parameter's state looks like: tensors of the parameter's shape are flat ones of the part."""
    if part.is_whole or not isinstance(entry, Mapping):
        return entry
    return {
        key: TensorSlot(0, (part.numel,), (1,), value.dtype)
        if isinstance(value, TensorSlot) and has_param_shape(key, value.shape, spec)
        else value
        for key, value in entry.items()
    }


def load_from_one(
    access: StateAccess,
    param_groups: list[dict[str, Any]],
    open_source: Callable[[], FullSource],
    *,
    src: int,
) -> None:
    """Load what rank ``src`` has into the local optimizers of all ranks. Collective.

    Args:
        access: To the state of this rank.
        param_groups: Of the whole optimizer; its groups are replaced.
        open_source: Called on rank ``src`` only.
        src: The rank that has the state.

    Raises:
        CheckpointError, StateMismatchError: On all ranks, with nothing loaded.
    """
    group = access.group
    is_source = group.rank == src and group.is_first_replica
    with raise_together(group, doing="load_full()"):
        source = open_source() if is_source else None
    structures = group.all_gather_object(None if source is None else source.structure)
    structure: dict[str, Any] = next(s for s in structures if s is not None)
    with raise_together(group, doing="load_full()"):
        require_fitting(structure, access, param_groups)
    mover = _Mover(access, source, structure, src=src)
    state: dict[Any, Any] = {}
    common: dict[str, Any] = {}
    for rank in range(group.world_size):
        if entries := mover.move(None, rank=rank):
            [common] = entries
        for batch in _batches(access, rank, structure):
            if entries := mover.move(batch, rank=rank):
                state.update(zip([part.param for part in batch], entries, strict=True))
    with raise_together(group, doing="load_full()"):
        if mover.error is not None:
            raise mover.error
    numbered = {
        number: state[part.param] for number, part in enumerate(access.parts) if part.param in state
    }
    groups = common["param_groups"]
    local = {
        **common,
        "state": {**common["state"], **numbered},
        "param_groups": local_groups(groups, access.parts),
    }
    access.replace(lambda: local, param_groups=param_groups, saved_groups=groups)


def _batches(access: StateAccess, rank: int, structure: Mapping[str, Any]) -> Iterator[list[Part]]:
    """What a rank needs, a few parts at a time."""
    batch: list[Part] = []
    nbytes = 0
    for part in access.parts_of(rank):
        if part.param not in structure["state"]:
            continue
        batch.append(part)
        nbytes += part.numel * access.specs[part.param].itemsize
        if nbytes >= access.chunk_nbytes:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


class _Mover:
    """Brings entries from the rank that has them to one that needs them; what fails to be read is raised at the end."""

    def __init__(
        self,
        access: StateAccess,
        source: FullSource | None,
        structure: Mapping[str, Any],
        *,
        src: int,
    ) -> None:
        self._access = access
        self._source = source
        self._structure = structure
        self._src = src
        self.error: Exception | None = None

    def move(self, batch: Sequence[Part] | None, *, rank: int) -> list[Any] | None:
        """Bring the entries of some parts, or with None what is common, to ``rank``; None on other ranks. Collective."""
        access, group = self._access, self._access.group
        if group.rank not in (rank, self._src):
            return None
        described = self._described(batch)
        slots = slots_of(described)
        options: dict[str, Any] = {"chunk_nbytes": access.chunk_nbytes, "empty": access.empty}
        if self._source is not None:
            flats = self._read(self._source, batch, slots)
            if rank != self._src:
                send_tensors(group, slots, flats, dst=rank, **options)
                return None
        else:
            flats = [access.empty(prod(slot.shape), slot.dtype) for slot in slots]
            if group.is_first_replica and rank != self._src:
                receive_tensors(group, slots, flats, src=self._src, **options)
            elif rank != group.rank:
                return None
        for flat in flats:
            if flat.numel():
                group.broadcast_to_replicas(flat)
        shaped = [slot.shape_flat(flat) for slot, flat in zip(slots, flats, strict=True)]
        return list(put_tensors(_numbered(described), shaped))

    def _described(self, batch: Sequence[Part] | None) -> list[Any]:
        """What is moved, with slots for tensors."""
        state = self._structure["state"]
        if batch is None:
            others = {k: v for k, v in state.items() if not _is_number(k, self._access)}
            return [{**self._structure, "state": others}]
        specs = self._access.specs
        return [structure_of_part(state[part.param], part, specs[part.param]) for part in batch]

    def _read(
        self, source: FullSource, batch: Sequence[Part] | None, slots: Sequence[TensorSlot]
    ) -> list[Tensor]:
        """Copies of the tensors, flat; once something has failed, tensors of any content."""
        flats = [self._access.empty(prod(slot.shape), slot.dtype) for slot in slots]
        if self.error is not None:
            return flats
        try:
            entries = [source.common()] if batch is None else [source.entry(p) for p in batch]
            tensors = take_tensors(entries, self._access.is_tensor)[1]
            for flat, tensor in zip(flats, tensors, strict=True):
                flat.copy_(flatten(tensor))
        except Exception as raised:
            self.error = raised
        return flats


def _numbered(structure: Any) -> Any:
    """The structure with its slots numbered in order."""
    numbers = iter(range(len(slots_of(structure))))
    return map_tensors(
        structure,
        lambda slot: TensorSlot(next(numbers), slot.shape, slot.stride, slot.dtype),
        lambda value: isinstance(value, TensorSlot),
    )
