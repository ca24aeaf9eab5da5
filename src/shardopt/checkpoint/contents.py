"""What a checkpoint of any kind holds, in words, and its tensors range by range.

Kinds are folders of rank files, full files, and state dicts that ``torch.save`` has written. Words stay encoded, as they
stand in the headers of files. Tensors are those of whole parameters and come in row-major order, in ranges of at most
``CHUNK_NBYTES``; what lies in memory in another order than that is put in order as one whole tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from shardopt.checkpoint.access import SavedParam
from shardopt.checkpoint.encoded import packed_groups
from shardopt.checkpoint.load import MASTER_KEY, PARAM_SHAPED_KEYS, saved_ids
from shardopt.checkpoint.saved import Empty, SavedPart, SavedState, is_cut, open_saved
from shardopt.checkpoint.state_dict import shaped_like
from shardopt.errors import CheckpointError
from shardopt.files import (
    TensorEntry,
    dtype_name,
    encode,
    is_pickled,
)
from shardopt.frameworks import Framework
from shardopt.partition import (
    ParamSpec,
    Range,
    is_dense,
    plan_chunks,
    plan_transfers,
)

Kind = Literal["full", "sharded", "torch"]
"""A full file, a folder of rank files, or a state dict that ``torch.save`` has written."""

CHUNK_NBYTES = 16 * 2**20
"""Bytes of a tensor that are in memory at a time."""

UNKNOWN = "unknown"
"""What state dicts do not tell: the class of the optimizer, and the dtype of a parameter with master weights."""

STATE_NAME = re.compile(r"state\.(\d+)(?![^.\[])")
"""How the name of a tensor of a parameter's state begins; ``.`` or ``[`` and a key follow."""

HEADER_KEYS = ("others", "extra", "param_groups")


@dataclass(frozen=True, slots=True)
class ParamState:
    """The state of one parameter.

    Attributes:
        encoded: Its entry, encoded.
        tensors: The tensors that the entry names, as those of the whole parameter.
    """

    encoded: Any
    tensors: tuple[TensorEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(entry.nbytes for entry in self.tensors)


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint of any kind, open for reading.

    Attributes:
        path: Where it lies.
        kind: Which kind it is.
        saved: Its files; None for a state dict.
        optimizer: Name of the optimizer's class.
        world_size: How many ranks it was saved by.
        params: All parameters; None where a state dict has nothing of a parameter's shape.
        state: The state of each parameter that has any, in the order of parameters.
        header: State that belongs to no parameter, and the param groups, encoded.
        common: The tensors that the header names.
        flats: Reads a tensor, in order: (n,) contiguous on the CPU, one range after another; each is valid until the next.
        empty: Makes a flat CPU tensor.
    """

    path: Path
    kind: Kind
    saved: SavedState | None
    optimizer: str
    world_size: int
    params: tuple[SavedParam | None, ...]
    state: Mapping[int, ParamState]
    header: Mapping[str, Any]
    common: tuple[TensorEntry, ...]
    flats: Callable[[TensorEntry], Iterator[Any]]
    empty: Empty

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of parameters' state."""
        return sum(state.nbytes for state in self.state.values())


@contextmanager
def open_contents(
    path: Path, empty: Empty, pickled_by: Callable[[], Framework]
) -> Iterator[Contents]:
    """Open a checkpoint of any kind; of files only headers are read.

    Args:
        path: A folder that ``save()`` has written, a file of ``save_full()``, or one of ``torch.save``.
        empty: Makes tensors.
        pickled_by: Returns the framework that reads a file of ``torch.save``; called only for one.

    Raises:
        CheckpointError: It is none of these, or damaged.
    """
    if is_pickled(path):
        framework = pickled_by()
        yield contents_of_state_dict(path, framework.load_pickled(path), framework)
        return
    with open_saved(path) as saved:
        yield contents_of_saved(saved, empty)


# --- Sources --------------------------------------------------------------------------------------


def contents_of_saved(saved: SavedState, empty: Empty) -> Contents:
    """Read the headers of a checkpoint in files.

    Raises:
        CheckpointError: A file is missing, or none of a checkpoint.
    """
    first = saved.file(min(saved.ranks))
    if not isinstance(first.metadata, dict) or not {*HEADER_KEYS} <= {*first.metadata}:
        raise CheckpointError(f"{first.path}: its header is not that of a checkpoint's first file")
    holders = {param: _ordered(parts)[0] for param, parts in saved.parts.items()}
    tensors: dict[int | None, list[TensorEntry]] = {}
    for rank in saved.ranks:
        for entry in saved.file(rank).entries.values():
            param = param_of(entry.name)
            if param is None and rank == min(saved.ranks):
                tensors.setdefault(None, []).append(entry)
            elif param in holders and holders[param].rank == rank:
                shape = saved.params[param].shape
                whole = TensorEntry(entry.name, entry.dtype, shape)
                is_part = _is_part(entry, holders[param])
                tensors.setdefault(param, []).append(whole if is_part else entry)
    state = {
        param: ParamState(saved.entry_of(holders[param]), tuple(tensors.get(param, ())))
        for param in sorted(holders)
    }
    return Contents(
        path=saved.path,
        kind="sharded" if saved.path.is_dir() else "full",
        saved=saved,
        optimizer=saved.optimizer,
        world_size=saved.world_size,
        params=tuple(saved.params),
        state=state,
        header={key: first.metadata[key] for key in HEADER_KEYS},
        common=tuple(tensors.get(None, ())),
        flats=partial(_flats_of_saved, saved, empty),
        empty=empty,
    )


def param_of(name: str) -> int | None:
    """The parameter to whose state a tensor belongs by its name; None for one of the header."""
    found = STATE_NAME.match(name)
    return int(found[1]) if found else None


def _ordered(parts: Sequence[SavedPart]) -> list[SavedPart]:
    return sorted(parts, key=lambda saved: saved.part.offset)


def _is_part(entry: TensorEntry, saved: SavedPart) -> bool:
    """Whether a stored tensor is a part of one that has the parameter's shape."""
    return not saved.part.is_whole and is_cut(entry, saved.part)


def _flats_of_saved(saved: SavedState, empty: Empty, entry: TensorEntry) -> Iterator[Any]:
    """Read a tensor from the files that hold it."""
    param = param_of(entry.name)
    if param is None:
        yield from _ranges_of_saved(saved, empty, entry, [min(saved.ranks)], [entry.numel])
        return
    parts = _ordered(saved.parts[param])
    if not _is_part(saved.file(parts[0].rank).entries[entry.name], parts[0]):
        yield from _ranges_of_saved(saved, empty, entry, [parts[0].rank], [entry.numel])
        return
    _require_parts(saved, entry, parts)
    ranks, numels = [p.rank for p in parts], [p.part.numel for p in parts]
    spec = spec_of(param, saved.params[param])
    if spec.is_contiguous:
        yield from _ranges_of_saved(saved, empty, entry, ranks, numels)
        return
    whole = empty(entry.numel, entry.dtype)
    start = 0
    for flat in _ranges_of_saved(saved, empty, entry, ranks, numels):
        whole.narrow(0, start, flat.numel()).copy_(flat)
        start += flat.numel()
    yield shaped_like(whole, spec).contiguous().view(-1)


def _require_parts(saved: SavedState, entry: TensorEntry, parts: Sequence[SavedPart]) -> None:
    """Raise unless parts of a parameter hold a tensor's elements, each once."""
    stop = 0
    for one in parts:
        file = saved.file(one.rank)
        stored = file.entries.get(entry.name)
        expected = TensorEntry(entry.name, entry.dtype, (one.part.numel,))
        if stored != expected or one.part.offset != stop:
            raise CheckpointError(
                f"{file.path}: param {one.part.param}: {entry.name!r} is not the part of it that belongs behind element "
                f"{stop}"
            )
        stop += one.part.numel
    if stop != entry.numel:
        raise CheckpointError(
            f"{saved.path}: {entry.name!r}: elements [{stop}, {entry.numel}) are in no file"
        )


def _ranges_of_saved(
    saved: SavedState,
    empty: Empty,
    entry: TensorEntry,
    ranks: Sequence[int],
    numels: Sequence[int],
) -> Iterator[Any]:
    """Read the tensor of one name from the files of several ranks, which hold ``numels`` of it, back to back."""
    held: list[Range] = []
    for source, numel in enumerate(numels):
        start = held[-1].stop if held else 0
        held.append(Range(source, start, start + numel))
    chunks = _chunks(entry)
    buffer = empty(max((stop - start for start, stop in chunks), default=0), entry.dtype)
    for start, stop in chunks:
        flat = buffer.narrow(0, 0, stop - start)
        for move in plan_transfers(held, start, stop):
            target = flat.narrow(0, move.target_start, move.numel)
            saved.file(ranks[move.source]).read(entry.name, move.source_start, target)
        yield flat


def _chunks(entry: TensorEntry) -> list[tuple[int, int]]:
    """The ranges in which a tensor is read."""
    chunks = plan_chunks([entry.numel], chunk_nbytes=CHUNK_NBYTES, itemsize=entry.itemsize)
    return [(piece.start, piece.stop) for chunk in chunks for piece in chunk.pieces]


def spec_of(number: int, param: SavedParam) -> ParamSpec:
    """What is known of a parameter, as rooms that handle shapes expect it."""
    return ParamSpec(
        index=number,
        name=param.name,
        group=0,
        shape=param.shape,
        stride=param.stride,
        dtype=param.dtype,
        itemsize=0,  # nobody asks, and the dtype may be unknown
        device="cpu",
        requires_grad=True,
    )


def contents_of_state_dict(path: Path, state_dict: Any, framework: Framework) -> Contents:
    """Number and encode the state dict of an unsharded optimizer, whose tensors are mapped into memory.

    Raises:
        CheckpointError: It is something else.
        TypeError: Something in it cannot be written to files; names it.
    """
    if not is_optimizer_state(state_dict):
        found = f" with the keys {list(state_dict)[:5]}" if isinstance(state_dict, dict) else ""
        raise CheckpointError(
            f"{path}: holds a {type(state_dict).__name__}{found}, expected the state dict of an optimizer, with 'state' "
            "and 'param_groups'; save optimizer.state_dict() in a file of its own"
        )
    words, tensors = _encoded(state_dict, framework)
    entries: dict[int | None, list[TensorEntry]] = {}
    for name, tensor in tensors.items():
        entries.setdefault(param_of(name), []).append(_entry_of_tensor(path, name, tensor))
    state = words.pop("state")
    names = [name for group in state_dict["param_groups"] for name in _names_of(group)]
    live = [state_dict["state"].get(key) for key in saved_ids(state_dict)]
    return Contents(
        path=path,
        kind="torch",
        saved=None,
        optimizer=UNKNOWN,
        world_size=1,
        params=tuple(map(_param_of_state, names, live)),
        state={n: ParamState(state[n], tuple(entries.get(n, ()))) for n in sorted(state)},
        header=words,
        common=tuple(entries.get(None, ())),
        flats=lambda entry: _flats_of_tensor(tensors[entry.name], entry),
        empty=framework.empty_on_cpu,
    )


def _encoded(state_dict: Any, framework: Framework) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state dict in words, as they stand in the header of a file, and its tensors by name."""
    tensors: dict[str, Any] = {}

    def take(value: Any, where: str) -> str | None:
        if not framework.is_tensor(value):
            return None
        tensors[where] = value.detach()
        return where

    number_of: dict[Any, int] = {key: n for n, key in enumerate(saved_ids(state_dict))}
    state = state_dict["state"]
    values = {
        "others": {key: value for key, value in state.items() if key not in number_of},
        "extra": {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")},
        "param_groups": packed_groups(state_dict["param_groups"]),
    }
    words: dict[str, Any] = {key: encode(value, key, take) for key, value in values.items()}
    numbered = {number_of[key]: value for key, value in state.items() if key in number_of}
    words["state"] = {n: encode(value, f"state.{n}", take) for n, value in numbered.items()}
    return words, tensors


def _entry_of_tensor(path: Path, name: str, tensor: Any) -> TensorEntry:
    try:
        return TensorEntry(name, dtype_name(tensor), tuple(tensor.shape))
    except TypeError as error:
        raise TypeError(f"{path}: {name}: {error}") from error


def is_optimizer_state(value: Any) -> bool:
    """Whether it looks like the state dict of an optimizer."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def _names_of(group: Mapping[str, Any]) -> list[str | None]:
    return list(group.get("param_names", [None] * len(group["params"])))


def _param_of_state(name: str | None, entry: Any) -> SavedParam | None:
    """The facts of a parameter, read off the state that has its shape; None if there is no such state."""
    values = entry if isinstance(entry, Mapping) else {}
    shaped = [v for k, v in values.items() if k in PARAM_SHAPED_KEYS and hasattr(v, "shape")]
    if len({tuple(value.shape) for value in shaped}) != 1:
        return None
    shape, stride = tuple(shaped[0].shape), tuple(shaped[0].stride())
    if not is_dense(shape, stride):
        stride = tuple(shaped[0].new_empty(shape).stride())
    return SavedParam(
        name, shape, stride, UNKNOWN if MASTER_KEY in values else dtype_name(shaped[0])
    )


def _flats_of_tensor(tensor: Any, entry: TensorEntry) -> Iterator[Any]:
    flat = tensor.contiguous().view(-1)
    for start, stop in _chunks(entry):
        yield flat.narrow(0, start, stop - start)
