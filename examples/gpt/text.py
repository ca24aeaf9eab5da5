"""The text that every machine with Python has: the source of the standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAX_TEXT_BYTES = 4_000_000
"""No further module is read beyond this; Python 3.11 reaches it at the letter t."""

VALIDATION_EVERY = 20
"""Each 20th module is held out, whole, so that no validation text stands next to training text."""

NUM_VALIDATION_WINDOWS = 128
"""Evenly spread over the validation text, and the same ones each time."""


@dataclass(frozen=True)
class Text:
    """The two splits.

    Attributes:
        train: Bytes to learn from.
        validation: Bytes never trained on.
        source: Where they came from, for people to read.
    """

    train: bytes
    validation: bytes
    source: str

    @property
    def digest(self) -> str:
        """A short hash of both splits."""
        return hashlib.sha256(self.train + b"\0" + self.validation).hexdigest()[:16]


def read_text() -> Text:
    """Read the modules at the top of the standard library, in alphabetical order; no subfolder, so no tests either.

    Raises:
        FileNotFoundError: This Python keeps no sources, as some embedded ones do.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    splits = bytearray(), bytearray()
    for index, path in enumerate(sorted(folder.glob("*.py"))):
        if len(splits[0]) + len(splits[1]) >= MAX_TEXT_BYTES:
            break
        splits[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].extend(path.read_bytes())
    if not all(splits):
        raise FileNotFoundError(f"the sources of the standard library are not in {folder}")
    return Text(bytes(splits[0]), bytes(splits[1]), f"{folder}/*.py")


def _windows(text: bytes, context: int) -> Tensor:
    """Return the view (len(text) - context, context + 1) of every place that a sequence and its next byte can have."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, context + 1, 1)


@dataclass(frozen=True)
class Batch:
    """(B, T) int64 bytes, and the bytes that follow each of them."""

    inputs: Tensor
    targets: Tensor


def _batch(windows: Tensor, device: torch.device) -> Batch:
    windows = windows.to(device=device, dtype=torch.int64)
    return Batch(windows[:, :-1], windows[:, 1:])


class Sampler:
    """Draws training sequences at random; each rank draws the same ones and takes every N-th.

    So the sequences of a step do not depend on the number of ranks, and one generator is the whole position.
    """

    def __init__(self, text: Text, *, context: int, batch_size: int, seed: int) -> None:
        self.batch_size = batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self._windows = _windows(text.train, context)

    def next_batch(self, rank: int, world_size: int, device: torch.device) -> Batch:
        """Return this rank's part of the next ``batch_size`` sequences."""
        places = torch.randint(len(self._windows), (self.batch_size,), generator=self.generator)
        return _batch(self._windows[places[rank::world_size]], device)


class ValidationSet:
    """Evenly spaced sequences of the validation text."""

    def __init__(self, text: Text, *, context: int, batch_size: int) -> None:
        self.num_bytes = NUM_VALIDATION_WINDOWS * context
        self._batch_size = batch_size
        windows = _windows(text.validation, context)
        self._windows = windows[torch.linspace(0, len(windows) - 1, NUM_VALIDATION_WINDOWS).long()]

    def batches(self, rank: int, world_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield this rank's part, in batches."""
        for windows in torch.split(self._windows[rank::world_size], self._batch_size):
            yield _batch(windows, device)
