"""Save each rank's state to a file of its own, and load any such checkpoint at any world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardopt.checkpoint.access import LocalState, SavedParam, StateAccess
from shardopt.checkpoint.encoded import encode_state, packed_groups
from shardopt.checkpoint.fitting import require_fitting
from shardopt.checkpoint.load import local_groups
from shardopt.checkpoint.saved import SavedState, open_saved
from shardopt.collectives import raise_together, require_equal
from shardopt.errors import CheckpointError, StateMismatchError
from shardopt.files import (
    TensorFileWriter,
    commit,
    file_name,
    in_file_order,
    new_save,
    remove_others,
    sync_folder,
)


def save_sharded(
    access: StateAccess, param_groups: Sequence[Mapping[str, Any]], folder: Path
) -> None:
    """Write this rank's state beside that of the others, and make it current once all have done so. Collective.

    Args:
        access: To the state of this rank.
        param_groups: Of the whole optimizer.
        folder: One folder for all ranks; made if it is not there.

    Raises:
        TypeError: Something in the state cannot be written.
        OSError, CheckpointError: The folder cannot be written to, or is not the same on all ranks. As with every failure
            here, on all ranks, and what was current in the folder stays so.
    """
    group = access.group
    save = group.all_gather_object(new_save())[0]
    path = folder / file_name(save, group.rank)
    try:
        with raise_together(group, doing="save()"):
            folder.mkdir(parents=True, exist_ok=True)
            local = access.read()
            groups = packed_groups(param_groups) if group.rank == 0 else None
            if group.is_first_replica:
                write_rank_file(path, local, groups, access)
    except Exception:
        path.unlink(missing_ok=True)  # what comes next needs this rank, so no manifest will name it
        raise
    parts = [[p.param, p.offset, p.numel, p.is_whole] for p in local.entries]
    parts_by_rank = group.all_gather_object(parts)[: group.world_size]
    names = {rank: file_name(save, rank) for rank in range(group.world_size)}
    # from here on the files stay, whatever happens: rank 0 may have made them current, or be about to
    with raise_together(group, doing="save()"):
        if group.is_first:
            require_files(folder, list(names.values()))
            sync_folder(folder)
            index = access.index(save, parts_by_rank)
            commit(folder, {**index, "files": names})
    with raise_together(group, doing="save()"):
        if group.is_first:
            sync_folder(folder)
            remove_others(folder, set(names.values()))


def require_files(folder: Path, names: Sequence[str]) -> None:
    """Raise unless all files are there.

    Raises:
        CheckpointError: Names one that is not.
    """
    for rank, name in enumerate(names):
        if not (folder / name).exists():
            raise CheckpointError(
                f"{folder}: rank 0 does not see {name}, which rank {rank} has written; all ranks have to write to one "
                "folder, on storage that they share"
            )


def write_rank_file(
    path: Path,
    local: LocalState,
    groups: Sequence[Mapping[str, Any]] | None,
    access: StateAccess,
) -> None:
    """Write what one rank holds, and the param groups if it is to.

    Raises:
        TypeError: Something cannot be written; names the parameter and the entry.
    """
    encoded, tensors = encode_state(local, groups, access)
    entries = in_file_order(encoded.tensors)
    metadata = {"state": encoded.state, **encoded.header}
    writer = TensorFileWriter(path, entries, metadata)
    try:
        for entry in entries:
            writer.append(tensors[entry.name].detach().cpu().contiguous().view(-1))
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def load_saved(access: StateAccess, param_groups: list[dict[str, Any]], path: Path) -> None:
    """Read this rank's part of a checkpoint into the local optimizer, and the options of all. Collective.

    Every rank reads just what it needs.

    Args:
        access: To the state of this rank.
        param_groups: Of the whole optimizer; its groups are replaced.
        path: A folder that ``save_sharded`` has written, or a full file; every rank can see it.

    Raises:
        CheckpointError: It is none, or damaged. As with every failure here, on all ranks, with nothing loaded.
        StateMismatchError: It does not fit.
        RankMismatchError: Ranks see different ones.
    """
    group = access.group
    with raise_together(group, doing=f"load({str(path)!r})"), open_saved(path) as saved:
        require_same_params(saved, access)
        local, groups = read_local(saved, access, param_groups)
        identity = saved.identity
    require_equal(group, [("save", identity)], subject="every rank must load the same checkpoint")
    access.replace(lambda: local, param_groups=param_groups, saved_groups=groups)


def require_same_params(saved: SavedState, access: StateAccess) -> None:
    """Raise unless a checkpoint is of the same parameters.

    Raises:
        StateMismatchError: Names the first that differs, what was found and what was expected.
    """
    if len(saved.params) != len(access.specs):
        raise StateMismatchError(
            f"{saved.path}: holds the state of {len(saved.params)} parameters, but the optimizer has "
            f"{len(access.specs)}; give it the parameters of the same model, in the same groups"
        )
    for spec, theirs in zip(access.specs, saved.params, strict=True):
        ours = SavedParam.of(spec)
        if theirs.shape != ours.shape:
            raise StateMismatchError(
                f"{saved.path}: {spec.label}: was of shape {theirs.shape} when it was saved, expected {ours.shape}; it "
                "was saved for another model, or its parameters were in another order"
            )
        if theirs.name is not None and ours.name is not None and theirs.name != ours.name:
            raise StateMismatchError(
                f"{saved.path}: {spec.label}: was called {theirs.name!r} when it was saved, expected {ours.name!r}; its "
                "parameters were in another order"
            )


def read_local(
    saved: SavedState, access: StateAccess, param_groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state dict that the local optimizer is to load, and the param groups of the whole one."""
    groups = saved.read_common("param_groups", access.empty)
    owned = {part.param for part in access.parts}
    described = {p: saved.described(p) for p in sorted(owned) if p in saved.parts}
    require_fitting({"state": described, "param_groups": groups}, access, param_groups)
    state: dict[Any, Any] = dict(saved.read_common("others", access.empty))
    for number, part in enumerate(access.parts):
        if part.param in saved.parts:
            state[number] = saved.read_entry(access.specs[part.param], part, access.empty)
    extra = saved.read_common("extra", access.empty)
    local = {**extra, "state": state, "param_groups": local_groups(groups, access.parts)}
    return local, groups
