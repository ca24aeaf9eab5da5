"""Memory of one process that other processes of its host can read: an anonymous file, mapped piece by piece.

    | page: 16 random bytes | pages: for each piece and rank, how often it was read, int64 | piece | piece | ...

The owner writes data and tells a peer where it lies; the peer reads it there, and then adds 1 to its own count of the
piece. So the owner sees, without asking, when it may write to a piece again. Nothing is left behind when processes end.
"""

from __future__ import annotations

import ctypes
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

MAX_PIECES = 1 << 14
"""For whose counts there is room; untouched pages of a file cost nothing."""

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
    """Where some bytes lie in a file: ``start`` bytes into a piece, which lies at ``offset``."""

    number: int
    offset: int
    nbytes: int
    start: int


def _whole_pages(nbytes: int) -> int:
    return (nbytes + PAGESIZE - 1) & -PAGESIZE


def _num_count_bytes(world_size: int) -> int:
    return _whole_pages(8 * MAX_PIECES * world_size)


@dataclass(slots=True, eq=False)
class _Piece:
    """A piece as its owner knows it: how often it was announced to each rank, and where it is mapped, if it is."""

    number: int
    offset: int
    nbytes: int
    num_sent: list[int]
    address: int = 0


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
        self._end = PAGESIZE + _num_count_bytes(world_size)
        os.ftruncate(self._descriptor, self._end)
        os.pwrite(self._descriptor, random_bytes, 0)
        self.address = Address(BOOT_ID.read_text(), os.getpid(), self._descriptor, random_bytes)
        counts = mmap.mmap(self._descriptor, _num_count_bytes(world_size), offset=PAGESIZE)
        self._num_read = memoryview(counts).cast("q")
        self._num_pieces = 0
        self._pieces: list[_Piece] = []
        self._spare: list[_Piece] = []

    def new_piece(self, nbytes: int) -> mmap.mmap:
        """Return memory for ``nbytes``, 1 or more, in whole pages; it can be used again once nobody refers to it."""
        piece = self._find_spare(nbytes) or self._append(_whole_pages(nbytes))
        memory = mmap.mmap(self._descriptor, piece.nbytes, offset=piece.offset)
        piece.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._pieces.append(piece)
        weakref.finalize(memory, _free, weakref.ref(self), piece).atexit = False
        return memory

    def find(self, address: int) -> Place | None:
        """Where in the file the memory at ``address`` lies."""
        piece = self._piece_at(address)
        if piece is None:
            return None
        return Place(piece.number, piece.offset, piece.nbytes, address - piece.address)

    def is_read(self, address: int) -> bool:
        """Whether every rank has read the piece at ``address`` as often as it was announced to it."""
        piece = self._piece_at(address)
        return piece is None or self._is_read(piece)

    def note_sent(self, address: int, *, rank: int) -> None:
        """Expect ``rank`` to read the piece once more."""
        piece = self._piece_at(address)
        assert piece is not None
        piece.num_sent[rank] += 1

    def take_back(self, piece: _Piece) -> None:
        """Keep the place of a piece for another one, and let go of its pages unless they are still to be read."""
        self._pieces.remove(piece)
        self._spare.append(piece)
        if self._is_read(piece):
            with mmap.mmap(self._descriptor, piece.nbytes, offset=piece.offset) as pages:
                with suppress(OSError):  # a system that cannot keeps them
                    pages.madvise(mmap.MADV_REMOVE)

    def _is_read(self, piece: _Piece) -> bool:
        start = piece.number * self._world_size
        return all(self._num_read[start + r] >= num for r, num in enumerate(piece.num_sent))

    def _piece_at(self, address: int) -> _Piece | None:
        for piece in tuple(self._pieces):  # a finalizer may take one out meanwhile
            if piece.address <= address < piece.address + piece.nbytes:
                return piece
        return None

    def _find_spare(self, nbytes: int) -> _Piece | None:
        fitting = [
            piece for piece in self._spare if piece.nbytes >= nbytes and self._is_read(piece)
        ]
        if not fitting:
            return None
        smallest = min(fitting, key=lambda piece: piece.nbytes)
        self._spare.remove(smallest)
        return smallest

    def _append(self, nbytes: int) -> _Piece:
        if self._num_pieces == MAX_PIECES:
            raise OSError(
                f"{MAX_PIECES} pieces of shared memory are in use, and none has been read"
            )
        piece = _Piece(self._num_pieces, self._end, nbytes, [0] * self._world_size)
        self._num_pieces += 1
        self._end += nbytes
        os.ftruncate(self._descriptor, self._end)
        return piece


def _free(file: weakref.ref[SharedFile], piece: _Piece) -> None:
    """Called once nobody refers to the memory of a piece; the file may be gone, too, or be that of a parent process."""
    owner = file()
    if owner is not None and owner.address.pid == os.getpid():
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
        counts = mmap.mmap(self._descriptor, _num_count_bytes(world_size), offset=PAGESIZE)
        self._num_read = memoryview(counts).cast("q")
        self._rank = rank
        self._world_size = world_size
        self._pieces: dict[int, mmap.mmap] = {}

    def memory(self, place: Place) -> mmap.mmap:
        """The piece that ``place`` lies in. Not to be written to."""
        if place.number not in self._pieces:
            self._pieces[place.number] = mmap.mmap(
                self._descriptor, place.nbytes, offset=place.offset
            )
        return self._pieces[place.number]

    def mark_read(self, place: Place) -> None:
        """Tell the owner that this rank has read what was announced."""
        if place.nbytes > KEPT_NBYTES:
            self.memory(place).madvise(mmap.MADV_DONTNEED)
        self._num_read[place.number * self._world_size + self._rank] += 1
