"""What a checkpoint holds, as plain values that can be shown or written as JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from shardopt.checkpoint import Contents, Kind, ParamState
from shardopt.cli.tensors import FORMATS
from shardopt.files import TensorEntry, decode

STEP = "step"
"""Under which key optimizers count their steps."""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A param group.

    Attributes:
        number: Its position.
        num_params: How many parameters are in it.
        options: Its options.
    """

    number: int
    num_params: int
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParamDescription:
    """A parameter and its state.

    Attributes:
        number: Its position in the order of the param groups.
        name: Its name, if it had one.
        shape: Its shape; None where it is not known.
        dtype: Its dtype; None where it is not known.
        state: Its state by key; tensors as ``TensorEntry``.
        nbytes: Bytes of the tensors of its state.
        ranks: The ranks that hold some of it.
    """

    number: int
    name: str | None
    shape: tuple[int, ...] | None
    dtype: str | None
    state: dict[str, Any]
    nbytes: int
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class FileDescription:
    """The file of one rank.

    Attributes:
        rank: The rank.
        file: Its name.
        nbytes: Its bytes on the disk.
        state_nbytes: Bytes of the state of parameters in it.
        share: These, relative to the mean of all files.
    """

    rank: int
    file: str
    nbytes: int
    state_nbytes: int
    share: float


@dataclass(frozen=True, slots=True)
class Description:
    """A checkpoint.

    Attributes:
        path: Where it lies.
        kind: Which kind it is.
        optimizer: Name of the optimizer's class; ``"unknown"`` for a state dict.
        world_size: How many ranks have saved it; None for a state dict, which does not tell.
        step: The largest step count in it; None if it has none.
        num_params: How many parameters it is of.
        state_nbytes: Bytes of the state of all parameters.
        file_nbytes: Bytes on the disk.
        param_groups: The param groups.
        params: The parameters.
        files: The files.
    """

    path: str
    kind: Kind
    optimizer: str
    world_size: int | None
    step: float | None
    num_params: int
    state_nbytes: int
    file_nbytes: int
    param_groups: list[GroupDescription]
    params: list[ParamDescription]
    files: list[FileDescription]


def describe(contents: Contents) -> Description:
    """Say what a checkpoint holds; of tensors, only numbers such as step counts are read."""
    files = _files_of(contents)
    return Description(
        path=str(contents.path),
        kind=contents.kind,
        optimizer=contents.optimizer,
        world_size=contents.world_size if contents.saved else None,
        step=max(_steps_of(contents), default=None),
        num_params=len(contents.params),
        state_nbytes=contents.nbytes,
        file_nbytes=sum(file.nbytes for file in files),
        param_groups=_groups_of(contents),
        params=[_param_of(contents, number) for number in range(len(contents.params))],
        files=files,
    )


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: records as objects, tensors by dtype and shape, inf and nan as strings."""
    if isinstance(value, TensorEntry):
        return {"dtype": value.dtype, "shape": list(value.shape)}
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _entry_of(state: ParamState, tensor: Callable[[TensorEntry], Any]) -> dict[str, Any]:
    """The entry of a parameter, with what ``tensor`` makes of its tensors."""
    entries = {entry.name: entry for entry in state.tensors}
    entry = decode(state.encoded, lambda name: tensor(entries[name]))
    return entry if isinstance(entry, dict) else {"": entry}


def _number_in(contents: Contents, entry: TensorEntry) -> Any:
    """The number that a tensor of one element holds; any other tensor as it is."""
    if entry.numel != 1 or entry.dtype not in FORMATS:
        return entry
    return next(contents.flats(entry)).item()


def _steps_of(contents: Contents) -> Iterator[float]:
    for state in contents.state.values():
        value = _entry_of(state, lambda entry: entry).get(STEP)
        number = _number_in(contents, value) if isinstance(value, TensorEntry) else value
        if isinstance(number, (int, float)):
            yield int(number) if float(number).is_integer() else number


def _groups_of(contents: Contents) -> list[GroupDescription]:
    entries = {entry.name: entry for entry in contents.common}
    groups = decode(
        contents.header["param_groups"], lambda name: _number_in(contents, entries[name])
    )
    return [
        GroupDescription(
            number,
            len(group["params"]),
            {key: v for key, v in group.items() if key not in ("params", "param_names")},
        )
        for number, group in enumerate(groups)
    ]


def _param_of(contents: Contents, number: int) -> ParamDescription:
    param, state = contents.params[number], contents.state.get(number)
    ranks = [0] if state else []
    if contents.saved is not None:
        ranks = sorted({saved.rank for saved in contents.saved.parts.get(number, ())})
    return ParamDescription(
        number=number,
        name=None if param is None else param.name,
        shape=None if param is None else param.shape,
        dtype=None if param is None or param.dtype == "unknown" else param.dtype,
        state={} if state is None else _entry_of(state, lambda entry: entry),
        nbytes=0 if state is None else state.nbytes,
        ranks=ranks,
    )


def _files_of(contents: Contents) -> list[FileDescription]:
    if contents.saved is None:
        return [_file_of(0, contents.path, contents.nbytes, [contents.nbytes])]
    files = [contents.saved.file(rank) for rank in contents.saved.ranks]
    held = [
        sum(entry.nbytes for name, entry in file.entries.items() if name.startswith("state."))
        for file in files
    ]
    return [
        _file_of(rank, file.path, nbytes, held)
        for rank, file, nbytes in zip(contents.saved.ranks, files, held, strict=True)
    ]


def _file_of(rank: int, path: Any, state_nbytes: int, held: Sequence[int]) -> FileDescription:
    mean = fmean(held)
    share = state_nbytes / mean if mean else 1.0
    return FileDescription(rank, path.name, path.stat().st_size, state_nbytes, share)
