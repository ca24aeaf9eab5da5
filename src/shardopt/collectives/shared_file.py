"""Memory of one process that other processes of its host can read: an anonymous file, mapped piece by piece.

    | page: 16 random bytes | pages: reads by rank, int64 | data of a piece | pages: reads by rank | data | ...

The owner writes data and tells a peer where it lies; the peer reads it there, and then adds 1 to its own cell of the
piece. So the owner sees, without asking, when it may write to a piece again. Nothing is left behind when processes end.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs between hosts, and is equal in all containers of one."""

PAGESIZE = mmap.PAGESIZE

NUM_RANDOM_BYTES = 16

KEPT_NBYTES = 32 * 2**20
"""A peer's piece up to this size stays mapped in, after it has been read; of larger ones, which single parameters need,
mapping the pages anew costs less than a tenth of reading them, and keeping them would be seen as memory of this process."""


class Address(NamedTuple):
    """Where the file of another process is found."""

    host: str
    pid: int
    file_descriptor: int
    random_bytes: bytes


class Place(NamedTuple):
    """Where some bytes lie in a file: ``start`` bytes into the data of the piece at ``offset``."""

    offset: int
    nbytes: int
    start: int


def _num_header_bytes(world_size: int) -> int:
    """Whole pages for one int64 per rank."""
    return _whole_pages(8 * world_size)


def _whole_pages(nbytes: int) -> int:
    return (nbytes + PAGESIZE - 1) & -PAGESIZE


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece as its owner knows it: how often it was announced to each rank, and how often each has read it."""

    offset: int
    nbytes: int
    header: mmap.mmap
    num_sent: list[int]
    address: int = 0

    @property
    def is_read(self) -> bool:
        cells = memoryview(self.header).cast("q")
        return all(cells[rank] >= num for rank, num in enumerate(self.num_sent))


class SharedFile:
    """The file of this process."""

    def __init__(self, world_size: int) -> None:
        """Make it, for peers of ``world_size`` ranks.

        Raises:
            OSError, AttributeError: This system cannot.
        """
        self._world_size = world_size
        self._descriptor = os.memfd_create("shardopt", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        random_bytes = os.urandom(NUM_RANDOM_BYTES)
        self._end = PAGESIZE
        os.ftruncate(self._descriptor, self._end)
        os.pwrite(self._descriptor, random_bytes, 0)
        self.address = Address(BOOT_ID.read_text(), os.getpid(), self._descriptor, random_bytes)
        self._pieces: list[_Piece] = []
        self._spare: list[_Piece] = []

    def new_piece(self, nbytes: int) -> mmap.mmap:
        """Return memory for ``nbytes``, 1 or more, in whole pages; it can be used again once nobody refers to it."""
        piece = self._find_spare(nbytes) or self._append(_whole_pages(nbytes))
        header = _num_header_bytes(self._world_size)
        memory = mmap.mmap(self._descriptor, piece.nbytes, offset=piece.offset + header)
        self._pieces.append(piece)
        weakref.finalize(memory, _free, weakref.ref(self), piece).atexit = False
        return memory

    def bind(self, memory: mmap.mmap, address: int) -> None:
        """Know where a new piece was mapped to."""
        self._pieces[-1].address = address

    def find(self, address: int) -> Place | None:
        """Where in the file the memory at ``address`` lies."""
        piece = self._piece_at(address)
        if piece is None:
            return None
        return Place(piece.offset, piece.nbytes, address - piece.address)

    def is_read(self, address: int) -> bool:
        """Whether every rank has read the piece at ``address`` as often as it was announced to it."""
        piece = self._piece_at(address)
        return piece is None or piece.is_read

    def note_sent(self, address: int, *, rank: int) -> None:
        """Expect ``rank`` to read the piece once more."""
        piece = self._piece_at(address)
        assert piece is not None
        piece.num_sent[rank] += 1

    def take_back(self, piece: _Piece) -> None:
        """Keep the place of a piece for another one, and let go of its pages unless they are still to be read."""
        self._pieces.remove(piece)
        self._spare.append(piece)
        if piece.is_read:
            offset = piece.offset + _num_header_bytes(self._world_size)
            with mmap.mmap(self._descriptor, piece.nbytes, offset=offset) as pages:
                with suppress(OSError):  # a system that cannot keeps them
                    pages.madvise(mmap.MADV_REMOVE)

    def _piece_at(self, address: int) -> _Piece | None:
        for piece in self._pieces:
            if piece.address <= address < piece.address + piece.nbytes:
                return piece
        return None

    def _find_spare(self, nbytes: int) -> _Piece | None:
        fitting = [piece for piece in self._spare if piece.nbytes >= nbytes and piece.is_read]
        if not fitting:
            return None
        smallest = min(fitting, key=lambda piece: piece.nbytes)
        self._spare.remove(smallest)
        return smallest

    def _append(self, nbytes: int) -> _Piece:
        offset, header = self._end, _num_header_bytes(self._world_size)
        self._end += header + nbytes
        os.ftruncate(self._descriptor, self._end)
        cells = mmap.mmap(self._descriptor, header, offset=offset)
        return _Piece(offset, nbytes, cells, [0] * self._world_size)


def _free(file: weakref.ref[SharedFile], piece: _Piece) -> None:
    """Called once nobody refers to the memory of a piece; the file may be gone, too."""
    owner = file()
    if owner is not None:
        owner.take_back(piece)


class PeerFile:
    """The file of another process of this host."""

    def __init__(self, address: Address, *, rank: int, world_size: int) -> None:
        """Open it, to be read by ``rank``, this one.

        Raises:
            OSError: It is on another host, or this process may not open it.
        """
        if address.host != BOOT_ID.read_text():
            raise OSError("the peer is on another host")
        path = f"/proc/{address.pid}/fd/{address.file_descriptor}"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        if os.pread(self._descriptor, NUM_RANDOM_BYTES, 0) != address.random_bytes:
            raise OSError(f"{path} is not the file of the peer, which has other process numbers")
        self._rank = rank
        self._num_header_bytes = _num_header_bytes(world_size)
        self._pieces: dict[int, mmap.mmap] = {}

    def memory(self, place: Place) -> memoryview:
        """The data of the piece that ``place`` lies in. Not to be written to."""
        return memoryview(self._mapped(place))[self._num_header_bytes :]

    def mark_read(self, place: Place) -> None:
        """Tell the owner that this rank has read what was announced."""
        memoryview(self._mapped(place)).cast("q")[self._rank] += 1
        if place.nbytes > KEPT_NBYTES:
            self._mapped(place).madvise(mmap.MADV_DONTNEED)

    def _mapped(self, place: Place) -> mmap.mmap:
        if place.offset not in self._pieces:
            length = self._num_header_bytes + place.nbytes
            self._pieces[place.offset] = mmap.mmap(self._descriptor, length, offset=place.offset)
        return self._pieces[place.offset]
