"""The checkpoint file: one ``torch.save`` of plain data, written by rank 0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path`` by ``content`` at once, so that an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    torch.save(content, unfinished)
    os.replace(unfinished, path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what was written, on the CPU.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is some other file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--resume: there is no checkpoint {path}")
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        content["recipe"]
    except Exception as error:
        raise ValueError(f"--resume: {path} is no checkpoint of train_gpt.py") from error
    return content
