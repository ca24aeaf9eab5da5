"""Files of tensors in the safetensors format, with checksums: written piece by piece, read range by range.

    8 bytes, the length of the header | the header, JSON | the data of all tensors, back to back

The last tensor, ``CHECKSUMS``, holds the CRC-32 of each ``BLOCK_NBYTES`` of the data before it, and of the header, in 4
bytes each, little-endian. So a reader verifies just the blocks that it reads, and any other library that reads safetensors finds one tensor more.

Source: the format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

from shardopt.errors import CheckpointError
from shardopt.partition import num_blocks_of

CHECKSUMS = "__checksums__"
METADATA = "shardopt"
BLOCK_NBYTES = 2**20
"""Bytes under one checksum: what is read at least."""

MAX_HEADER_NBYTES = 100_000_000
"""What readers of the format accept."""

DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""Name of a dtype: that of the format, and bytes of an element."""

NAME_OF_CODE = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file.

    Attributes:
        name: Its name in the file.
        dtype: Name of its dtype without that of the framework, e.g. ``"float32"``.
        shape: Its shape; elements lie in row-major order.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][1]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.numel * self.itemsize


def dtype_name(tensor: Any) -> str:
    """The name of a tensor's dtype without that of its framework.

    Raises:
        TypeError: The format has no such dtype.
    """
    name = str(tensor.dtype).rpartition(".")[2]
    if name not in DTYPES:
        raise TypeError(f"dtype {tensor.dtype} cannot be written to a checkpoint")
    return name


def is_pickled(path: Path) -> bool:
    """Whether a file is one that ``torch.save`` writes, in either of its formats.

    Raises:
        CheckpointError: It cannot be read.
    """
    if path.is_dir():
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    return start.startswith((b"PK\x03\x04", b"\x80\x02"))


def bytes_of(flat: Any) -> memoryview:
    """The memory of a contiguous CPU tensor of one dimension; valid as long as the tensor is."""
    nbytes = flat.numel() * flat.element_size()
    if not nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * nbytes).from_address(flat.data_ptr())
    return memoryview(memory).cast("B")


def in_file_order(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Sort so that every tensor starts at a multiple of its element's bytes, as readers of the format expect."""
    return sorted(entries, key=lambda entry: -entry.itemsize)


class TensorFileWriter:
    """Writes one file, whose tensors are known beforehand, in pieces that come in the order of the entries."""

    def __init__(
        self, path: Path, entries: Sequence[TensorEntry], metadata: Mapping[str, Any]
    ) -> None:
        """Create the file, which must not exist, and write its header.

        Args:
            path: Where.
            entries: Its tensors, ``in_file_order``.
            metadata: Written as JSON into the header.

        Raises:
            ValueError: Two tensors have the same name.
        """
        names = [entry.name for entry in entries]
        if len(set(names)) < len(names) or {CHECKSUMS, "__metadata__"} & set(names):
            raise ValueError(f"names of tensors: expected different ones, not our own, got {names}")
        self._path = path
        data_nbytes = sum(entry.nbytes for entry in entries)
        num_checksums = num_blocks_of(data_nbytes, BLOCK_NBYTES) + 1
        checksums = TensorEntry(CHECKSUMS, "uint8", (4 * num_checksums,))
        header: dict[str, Any] = {"__metadata__": {METADATA: json.dumps(metadata)}}
        at = 0
        for entry in (*entries, checksums):
            header[entry.name] = {
                "dtype": DTYPES[entry.dtype][0],
                "shape": list(entry.shape),
                "data_offsets": [at, at + entry.nbytes],
            }
            at += entry.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) & 7)
        self._header_crc = crc32(text)
        self._left = data_nbytes
        self._crcs: list[int] = []
        self._crc, self._block_left = 0, BLOCK_NBYTES
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        self._write(struct.pack("<Q", len(text)) + text)

    def append(self, flat: Any) -> None:
        """Write the next elements: (n,) contiguous on the CPU, of the entry that is due or of several."""
        view = bytes_of(flat)
        self._left -= len(view)
        assert self._left >= 0, "more than the header says"
        for start in range(0, len(view), BLOCK_NBYTES):
            self._sum(view[start : start + BLOCK_NBYTES])
        self._write(view)

    def close(self) -> None:
        """Write the checksums, and have the system write everything to the disk."""
        assert self._left == 0, "less than the header says"
        if self._block_left < BLOCK_NBYTES:
            self._crcs.append(self._crc)
        sums = [*self._crcs, self._header_crc]
        self._write(struct.pack(f"<{len(sums)}I", *sums))
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Remove the file."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _sum(self, view: memoryview) -> None:
        while len(view):
            head = view[: self._block_left]
            self._crc = crc32(head, self._crc)
            self._block_left -= len(head)
            view = view[len(head) :]
            if not self._block_left:
                self._crcs.append(self._crc)
                self._crc, self._block_left = 0, BLOCK_NBYTES

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]


def _offsets_of(item: Any) -> tuple[int, int]:
    start, stop = item["data_offsets"]
    if type(start) is not int or type(stop) is not int:
        raise TypeError(f"offsets {start!r}, {stop!r}")
    return start, stop


class TensorFile:
    """One file for reading; nothing of it is held in memory but its header."""

    def __init__(self, path: Path) -> None:
        """Open it and check its header.

        Raises:
            CheckpointError: It is none of our files, or was cut short, or its header is damaged.
        """
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        nbytes = os.fstat(self._file.fileno()).st_size
        length = struct.unpack("<Q", self._pread(8, 0))[0] if nbytes >= 8 else 0
        if not 2 <= length <= min(nbytes - 8, MAX_HEADER_NBYTES):
            raise CheckpointError(f"{self.path}: no file of tensors, or cut short")
        text = self._pread(length, 8)
        self._start = 8 + length
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__", {})
            self.metadata = json.loads(metadata.get(METADATA, "null"))
            self._offsets = {name: _offsets_of(item) for name, item in header.items()}
            self.entries = {
                name: TensorEntry(name, NAME_OF_CODE[item["dtype"]], tuple(item["shape"]))
                for name, item in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self.path}: its header is damaged: {error!r}") from error
        end = max((stop for _, stop in self._offsets.values()), default=0)
        if self._start + end < nbytes:
            raise CheckpointError(f"{self.path}: more bytes than its header says; it is damaged")
        for name, entry in self.entries.items():
            start, stop = self._offsets[name]
            is_shape = all(length >= 0 for length in entry.shape) and stop - start == entry.nbytes
            if not is_shape or not 0 <= start <= stop <= nbytes - self._start:
                raise CheckpointError(
                    f"{self.path}: {name!r} should end at byte {self._start + stop}, but the file has {nbytes}; it was "
                    "cut short"
                )
        sums = self.entries.pop(CHECKSUMS, None)
        self._crcs: tuple[int, ...] | None = None
        if sums is None and METADATA in metadata:
            raise CheckpointError(f"{self.path}: has no checksums; it is damaged")
        if sums is not None:
            start, stop = self._offsets[CHECKSUMS]
            if stop - start < 4:
                raise CheckpointError(f"{self.path}: its checksums are damaged")
            *crcs, header_crc = struct.unpack(
                f"<{(stop - start) >> 2}I", self._pread((stop - start) & ~3, self._start + start)
            )
            if crc32(text) != header_crc or len(crcs) != num_blocks_of(start, BLOCK_NBYTES):
                raise CheckpointError(f"{self.path}: its header is damaged")
            self._crcs = tuple(crcs)
            self._data_nbytes = start

    def read(self, name: str, start: int, flat: Any) -> None:
        """Fill ``flat``, (n,) contiguous on the CPU, with elements ``[start, start + n)`` of a tensor.

        Raises:
            CheckpointError: They are damaged; names file and tensor.
        """
        entry = self.entries[name]
        if not 0 <= start <= entry.numel - flat.numel():
            raise CheckpointError(f"{self.path}: {name!r} has {entry.numel} elements only")
        first = self._offsets[name][0] + start * entry.itemsize
        self._read_into(bytes_of(flat), first)
        self._verify(first, first + flat.numel() * entry.itemsize, bytes_of(flat), name)

    def verify(self) -> None:
        """Read everything and compare checksums, where the file has any.

        Raises:
            CheckpointError: Something is damaged; names file and tensor.
        """
        if self._crcs is not None:
            for block in range(len(self._crcs)):
                self._verify_block(block, self._name_at(block * BLOCK_NBYTES))

    def close(self) -> None:
        """Close it."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _verify(self, first: int, stop: int, view: memoryview, name: str) -> None:
        """Compare the checksums of the blocks that hold bytes ``[first, stop)`` of the data, which ``view`` is."""
        if self._crcs is None or first == stop:
            return
        for block in range(num_blocks_of(first + 1, BLOCK_NBYTES) - 1, len(self._crcs)):
            start = block * BLOCK_NBYTES
            end = min(start + BLOCK_NBYTES, self._data_nbytes)
            if start >= stop:
                return
            if start >= first and end <= stop:
                if crc32(view[start - first : end - first]) != self._crcs[block]:
                    self._raise_damaged(name)
            else:
                self._verify_block(block, name)

    def _verify_block(self, block: int, name: str) -> None:
        assert self._crcs is not None
        start = block * BLOCK_NBYTES
        end = min(start + BLOCK_NBYTES, self._data_nbytes)
        if crc32(self._pread(end - start, self._start + start)) != self._crcs[block]:
            self._raise_damaged(name)

    def _raise_damaged(self, name: str) -> None:
        raise CheckpointError(
            f"{self.path}: {name!r} is damaged: its checksum is not what it was when it was written"
        )

    def _name_at(self, offset: int) -> str:
        ends = sorted((stop, name) for name, (_, stop) in self._offsets.items())
        return next((name for stop, name in ends if stop > offset), CHECKSUMS)

    def _read_into(self, view: memoryview, first: int) -> None:
        self._fill(view, self._start + first)

    def _pread(self, nbytes: int, at: int) -> bytes:
        buffer = bytearray(nbytes)
        self._fill(memoryview(buffer), at)
        return bytes(buffer)

    def _fill(self, view: memoryview, at: int) -> None:
        self._file.seek(at)
        while len(view):
            count = self._file.readinto(view)
            if not count:
                raise CheckpointError(f"{self.path}: cut short")
            view = view[count:]
