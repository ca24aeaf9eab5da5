"""A folder of files that is always whole: what is current is said by one file, replaced in one move.

    folder/checkpoint.json             the manifest: which files belong together, and what they hold
    folder/<save>-rank00000.safetensors

A save writes new files beside the old ones, then replaces the manifest, and only then removes files that it does not
name. Killed at any moment, it leaves the old manifest with its files, or the new one with its own.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from pathlib import Path
from typing import Any
from zlib import crc32

from shardopt.errors import CheckpointError

NAME = "checkpoint.json"
SUFFIX = ".safetensors"
RANK_FILE = re.compile(r"[0-9a-f]{8}-rank\d{5,}\.safetensors")
"""What ``file_name`` makes: other files in the folder are their owner's."""


def new_save() -> str:
    """A name that tells the files of one save from those of others."""
    return secrets.token_hex(4)


def file_name(save: str, rank: int) -> str:
    """The name of one rank's file of one save."""
    return f"{save}-rank{rank:05d}{SUFFIX}"


def commit(folder: Path, contents: dict[str, Any]) -> None:
    """Make ``contents`` the manifest of a folder, in one move, which either happens or leaves the old one.

    ``sync_folder`` before files are removed that the old one names.
    """
    text = json.dumps(contents, indent=1)
    temporary = folder / f".{NAME}.new"
    with open(temporary, "w") as file:
        json.dump({"crc32": crc32(text.encode()), "contents": text}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / NAME)


def sync_folder(folder: Path) -> None:
    """Have the system write the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the current manifest of a folder.

    Raises:
        CheckpointError: There is none, or it is damaged.
    """
    path = folder / NAME
    try:
        outer = json.loads(path.read_text())
        text = outer["contents"]
        is_whole = crc32(text.encode()) == outer["crc32"]
        contents: dict[str, Any] = dict(json.loads(text).items())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}; expected a folder that save() has written, which every rank "
            "can see"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged, or no manifest of shardopt: {error!r}") from error
    if not is_whole:
        raise CheckpointError(f"{path}: damaged: its checksum is not what it was")
    return contents


def remove_others(folder: Path, names: set[str]) -> None:
    """Remove rank files that do not belong to the current manifest: of earlier saves, or of some that were cut short."""
    for path in folder.glob(f"*-rank*{SUFFIX}"):
        if RANK_FILE.fullmatch(path.name) and path.name not in names:
            path.unlink(missing_ok=True)
