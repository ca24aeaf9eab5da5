"""Where the memory of tensors comes from: a framework where one is needed, else plain memory."""

from __future__ import annotations

import ctypes
import struct

from shardopt.files import TensorEntry
from shardopt.frameworks import Framework

FORMATS = {
    "bool": "?",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "float16": "e",
    "int32": "i",
    "uint32": "I",
    "float32": "f",
    "int64": "q",
    "uint64": "Q",
    "float64": "d",
}
"""Dtypes whose elements ``struct`` can read."""


class PlainFlat:
    """(n,) elements in plain memory, for reading a few numbers from files without a framework."""

    def __init__(self, numel: int, dtype: str) -> None:
        """Allocate them."""
        self._entry = TensorEntry("", dtype, (numel,))
        self._memory = ctypes.create_string_buffer(max(1, self._entry.nbytes))

    def numel(self) -> int:
        """Number of elements."""
        return self._entry.numel

    def element_size(self) -> int:
        """Bytes per element."""
        return self._entry.itemsize

    def data_ptr(self) -> int:
        """Where they begin."""
        return ctypes.addressof(self._memory)

    def narrow(self, dim: int, start: int, length: int) -> PlainFlat:
        """All of it, which is the only part that anyone asks for of what is read as one range."""
        assert (dim, start, length) == (0, 0, self.numel()), "only whole tensors are read"
        return self

    def item(self) -> float:
        """The one element."""
        value: float = struct.unpack(FORMATS[self._entry.dtype], self._memory.raw)[0]
        return value


def torch_framework() -> Framework:
    """The torch adapter.

    Raises:
        ImportError: torch is not installed.
    """
    try:
        from shardopt.frameworks.torch import TORCH
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "files of torch.save() need torch; install it with: pip install 'shardopt[torch]'"
        ) from error
    return TORCH


def any_framework() -> Framework:
    """The adapter of a framework that is installed.

    Raises:
        ImportError: None is.
    """
    try:
        return torch_framework()
    except ImportError as missing:
        try:
            from shardopt.frameworks.tensorplay import TENSORPLAY
        except ModuleNotFoundError:
            raise ImportError(
                "this needs torch or TensorPlay; install one with: pip install 'shardopt[torch]'"
            ) from missing
        return TENSORPLAY
