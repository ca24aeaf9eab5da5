"""``shardopt checkpoint inspect``: what a checkpoint holds, and whether it is whole."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from shardopt.checkpoint import Contents, open_contents
from shardopt.cli.description import Description, describe, plain
from shardopt.cli.tensors import PlainFlat, torch_framework
from shardopt.errors import CheckpointError


def inspect(path: Path, *, as_json: bool, verify: bool, with_params: bool) -> int:
    """Print what a checkpoint holds.

    Args:
        path: A checkpoint of any kind.
        as_json: As one JSON object; else as tables.
        verify: Read everything and compare checksums first.
        with_params: With what is known of each parameter.

    Returns:
        0, or 1 if something is damaged and JSON tells so.

    Raises:
        CheckpointError: It is no checkpoint, or something in it is damaged.
    """
    with open_contents(path, PlainFlat, torch_framework) as contents:
        damages = list(_damages_of(contents)) if verify else None
        if damages and not as_json:
            raise CheckpointError("; ".join(damages))
        if damages:
            _print_json({"path": str(path), "damages": damages})
            return 1
        description = describe(contents)
    if as_json:
        told = plain(description)
        if not with_params:
            del told["params"]
        _print_json({**told, "damages": damages})
    else:
        _print_tables(description, with_params=with_params, is_verified=verify)
    return 0


def _damages_of(contents: Contents) -> Iterator[str]:
    """Read everything, and say what is damaged: of each file, the first tensor."""
    if contents.saved is None:
        yield from _damages_of_zip(contents.path)
        return
    for rank in contents.saved.ranks:
        try:
            contents.saved.file(rank).verify()
        except CheckpointError as error:
            yield str(error)


def _damages_of_zip(path: Path) -> Iterator[str]:
    """A file of ``torch.save`` is a zip archive, with a checksum of each tensor's storage."""
    try:
        with ZipFile(path) as archive:
            name = archive.testzip()
    except BadZipFile as error:
        yield f"{path}: is damaged: {error}"
        return
    if name is not None:
        yield f"{path}: {name!r} is damaged: its checksum is not what it was when it was written"


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def _print_tables(description: Description, *, with_params: bool, is_verified: bool) -> None:
    from shardopt.cli.tables import make_console, show

    console = make_console()
    show(console, description, with_params=with_params)
    if is_verified:
        console.print("OK: everything was read, and is as it was written.")
