"""Turn a checkpoint of one kind into one of another, out of core: words and bytes are copied, and no state is built.

What is written is written beside its target, and made current in one move.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from shardopt.checkpoint.access import VERSION, SavedParam
from shardopt.checkpoint.contents import Contents, Kind, is_optimizer_state, param_of, spec_of
from shardopt.checkpoint.saved import open_saved
from shardopt.checkpoint.state_dict import shaped_like
from shardopt.errors import CheckpointError
from shardopt.files import (
    TensorEntry,
    TensorFileWriter,
    commit,
    decode,
    file_name,
    in_file_order,
    is_pickled,
    new_save,
    read_manifest,
    remove_others,
    sync_folder,
)
from shardopt.partition import loads_of, plan_owners

Progress = Callable[[int], None]
"""Told of bytes of tensors as they are written."""

KINDS: dict[Kind, str] = {
    "full": "a full file, as save_full() writes it",
    "sharded": "a folder, as save() writes it",
    "torch": "a state dict of an optimizer, as torch.save() writes it",
}


def require_replaceable(path: Path, kind: Kind, load_pickled: Callable[[Path], Any]) -> None:
    """Raise unless ``path`` can be written: there is nothing, or what a checkpoint of the same kind replaces.

    Args:
        path: The target.
        kind: What is to be written there.
        load_pickled: Reads a file of ``torch.save``.

    Raises:
        CheckpointError: Says what is there.
        FileNotFoundError: The folder that is to hold it is not there.
    """
    if not path.exists():
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{path.parent}: no such folder; make it first")
        return
    is_empty_folder = path.is_dir() and not any(path.iterdir())
    found = kind_of(path, load_pickled)
    if found != kind and not (is_empty_folder and kind == "sharded"):
        what = KINDS[found] if found else "no checkpoint"
        raise CheckpointError(
            f"{path}: is there already and is {what}; to write {KINDS[kind]}, name another target or remove this one"
        )


def kind_of(path: Path, load_pickled: Callable[[Path], Any]) -> Kind | None:
    """Which kind of checkpoint lies there; None if it is none, or damaged."""
    try:
        if is_pickled(path):
            return "torch" if is_optimizer_state(load_pickled(path)) else None
        if path.is_dir():
            read_manifest(path)
            return "sharded"
        with open_saved(path):
            return "full"
    except CheckpointError:
        return None


def require_shapes(contents: Contents) -> list[SavedParam]:
    """The facts of all parameters.

    Raises:
        CheckpointError: Those of one are not known; names it.
    """
    for number, param in enumerate(contents.params):
        if param is None:
            keys = [e.name.removeprefix(f"state.{number}.") for e in _tensors_of(contents, number)]
            raise CheckpointError(
                f"{contents.path}: param {number}: its shape is not known, since none of its state ({keys}) is known to "
                "have it; load the file with load_full() of an optimizer, and save that"
            )
    return [param for param in contents.params if param is not None]


def _tensors_of(contents: Contents, param: int) -> tuple[TensorEntry, ...]:
    return contents.state[param].tensors if param in contents.state else ()


# --- Files ----------------------------------------------------------------------------------------


def write_full_file(contents: Contents, path: Path, progress: Progress) -> None:
    """Write one file, as ``save_full()`` does.

    Raises:
        CheckpointError: The source is damaged, or does not tell the shape of a parameter; what was at ``path`` stays.
    """
    params = require_shapes(contents)
    owned = list(contents.state)
    index = _index(contents, params, save="", world_size=contents.world_size, owned=[owned])
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    write_file(temporary, contents, owned, {"index": index}, progress)
    os.replace(temporary, path)
    sync_folder(path.parent)


def write_folder(
    contents: Contents, folder: Path, *, num_ranks: int, progress: Progress
) -> list[float]:
    """Write a folder of one file per rank, as ``save()`` does, with whole parameters packed evenly by bytes of state.

    Args:
        contents: The source; may lie in the same folder.
        folder: Made if it is not there.
        num_ranks: How many files, 1 or more.
        progress: Told of bytes that were written.

    Returns:
        Bytes of state in each file.

    Raises:
        CheckpointError: The source is damaged, or does not tell the shape of a parameter; what was current in the folder
            stays so.
    """
    params = require_shapes(contents)
    costs = [state.nbytes for state in contents.state.values()]
    owners = plan_owners(costs, [0] * num_ranks)
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    for param, owner in zip(contents.state, owners, strict=True):
        owned[owner].append(param)
    save = new_save()
    names = {rank: file_name(save, rank) for rank in range(num_ranks)}
    folder.mkdir(exist_ok=True)
    try:
        for rank, name in names.items():
            groups = {} if rank == 0 else {"param_groups": None}
            write_file(folder / name, contents, owned[rank], groups, progress)
    except BaseException:
        for name in names.values():
            (folder / name).unlink(missing_ok=True)
        raise
    sync_folder(folder)
    index = _index(contents, params, save=save, world_size=num_ranks, owned=owned)
    commit(folder, {**index, "files": names})
    sync_folder(folder)
    remove_others(folder, set(names.values()))
    return loads_of(costs, owners, num_ranks)


def write_file(
    path: Path,
    contents: Contents,
    params: Sequence[int],
    metadata: Mapping[str, Any],
    progress: Progress,
) -> None:
    """Write the state of some parameters, and all that belongs to none, to a file that must not exist.

    Args:
        path: The file; removed again if it cannot be written whole.
        contents: The source.
        params: The parameters, in order.
        metadata: What the header is to say besides, or in place of what it says in the source.
        progress: Told of bytes that were written.
    """
    header = {**contents.header, **metadata}
    state = {str(param): contents.state[param].encoded for param in params}
    common = [
        entry
        for entry in contents.common
        if header["param_groups"] is not None or not entry.name.startswith("param_groups")
    ]
    entries = [entry for param in params for entry in contents.state[param].tensors] + common
    ordered = in_file_order(entries)
    writer = TensorFileWriter(path, ordered, {"state": state, **header})
    try:
        for entry in ordered:
            for flat in contents.flats(entry):
                writer.append(flat)
                progress(flat.numel() * entry.itemsize)
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def _index(
    contents: Contents,
    params: Sequence[SavedParam],
    *,
    save: str,
    world_size: int,
    owned: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """What stands where, as ``SavedState`` reads it; each parameter is whole."""
    numels = [spec_of(number, param).numel for number, param in enumerate(params)]
    return {
        "version": VERSION,
        "save": save,
        "optimizer": contents.optimizer,
        "world_size": world_size,
        "params": [asdict(param) for param in params],
        "parts": [
            [rank, param, 0, numels[param], True]
            for rank, numbers in enumerate(owned)
            for param in numbers
        ],
    }


# --- In memory ------------------------------------------------------------------------------------


def read_state_dict(contents: Contents, progress: Progress) -> dict[str, Any]:
    """Read everything into memory, as the state dict of the unsharded optimizer."""
    entries = [*contents.common, *(e for s in contents.state.values() for e in s.tensors)]
    tensor = partial(_read_tensor, contents, {entry.name: entry for entry in entries}, progress)
    state = {param: decode(state.encoded, tensor) for param, state in contents.state.items()}
    others, extra, groups = (
        decode(contents.header[key], tensor) for key in ("others", "extra", "param_groups")
    )
    return {**extra, "state": {**state, **others}, "param_groups": groups}


def _read_tensor(
    contents: Contents, entries: Mapping[str, TensorEntry], progress: Progress, name: str
) -> Any:
    """Read one tensor; one that has its parameter's shape lies in memory as the parameter does."""
    entry = entries[name]
    whole = contents.empty(entry.numel, entry.dtype)
    start = 0
    for flat in contents.flats(entry):
        whole.narrow(0, start, flat.numel()).copy_(flat)
        start += flat.numel()
        progress(flat.numel() * entry.itemsize)
    number = param_of(name)
    param = None if number is None else contents.params[number]
    if number is None or param is None or param.shape != entry.shape:
        return whole.view(entry.shape)
    spec = spec_of(number, param)
    if spec.is_contiguous:
        return whole.view(entry.shape)
    ordered = shaped_like(contents.empty(entry.numel, entry.dtype), spec)
    ordered.copy_(whole.view(entry.shape))
    return ordered
