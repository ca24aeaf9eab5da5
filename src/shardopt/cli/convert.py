"""``shardopt checkpoint convert``: a checkpoint of another kind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shardopt.checkpoint import (
    Contents,
    Kind,
    open_contents,
    read_state_dict,
    require_replaceable,
    write_folder,
    write_full_file,
)
from shardopt.cli.tables import make_console, progress_bar
from shardopt.cli.tensors import any_framework, torch_framework
from shardopt.files import sync_folder

KIND_OF_SUFFIX: dict[str, Kind] = {".safetensors": "full", ".pt": "torch"}


def convert(source: Path, target: Path, *, to: Kind | None, num_ranks: int | None) -> int:
    """Write a checkpoint that holds what another one does, and say what was written.

    Args:
        source: A checkpoint of any kind.
        target: What to write; replaced if it is of the same kind.
        to: Which kind; by default that of the suffix of ``target``.
        num_ranks: How many files a folder gets; by default that of the ranks that have saved ``source``.

    Returns:
        0.

    Raises:
        ValueError: ``num_ranks`` is below 1, or given for another kind than a folder.
        CheckpointError: The source is damaged or not of parameters of known shapes, or the target is something else.
    """
    kind = to or KIND_OF_SUFFIX.get(target.suffix, "sharded")
    _require_ranks(num_ranks, kind)
    framework = torch_framework() if kind == "torch" else any_framework()
    with open_contents(source, framework.empty_on_cpu, torch_framework) as contents:
        require_replaceable(target, kind, framework.load_pickled)
        with progress_bar(target.name, contents.nbytes) as progress:
            what = _write(contents, target, kind, num_ranks or contents.world_size, progress)
        num_params, nbytes = len(contents.params), contents.nbytes
    params = _count(num_params, "parameter")
    told = f"{target}: {what}, {params}, {_count(nbytes, 'byte')} of state"
    make_console().print(told, soft_wrap=True)
    return 0


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _require_ranks(num_ranks: int | None, kind: Kind) -> None:
    if num_ranks is not None and kind != "sharded":
        raise ValueError(
            f"--ranks {num_ranks}: only --to sharded writes a file per rank, but this is --to {kind}; leave out --ranks, or "
            "add --to sharded"
        )
    if num_ranks is not None and num_ranks < 1:
        raise ValueError(f"--ranks {num_ranks}: expected 1 or more")


def _write(
    contents: Contents, target: Path, kind: Kind, num_ranks: int, progress: Callable[[int], None]
) -> str:
    """Write one kind, and return how it is called."""
    if kind == "full":
        write_full_file(contents, target, progress)
        return "full file"
    if kind == "torch":
        _write_pickled(contents, target, progress)
        return "state dict"
    write_folder(contents, target, num_ranks=num_ranks, progress=progress)
    return f"folder of {_count(num_ranks, 'file')}"


def _write_pickled(contents: Contents, path: Path, progress: Callable[[int], None]) -> None:
    import torch

    state_dict = read_state_dict(contents, progress)
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:
            torch.save(state_dict, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
