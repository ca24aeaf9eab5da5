"""Cut a sequence of flat tensors into chunks of bounded size, to be sent one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of the flat tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pieces that travel as one message, back to back."""

    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """Elements of the message."""
        return sum(piece.numel for piece in self.pieces)


def plan_chunks(
    numels: Sequence[int], *, chunk_nbytes: int, itemsize: int, in_flight: int = 1
) -> list[Chunk]:
    """Cut tensors of one dtype, laid end to end, into chunks of equal size but for the last.

    Example: ``plan_chunks([3, 5], chunk_nbytes=16, itemsize=4)`` gives two chunks: ``0[0, 3) + 1[0, 1)`` and ``1[1, 5)``.

    Args:
        numels: Elements of each tensor.
        chunk_nbytes: Bytes of all chunks in flight together; a chunk holds one element at least.
        itemsize: Bytes per element.
        in_flight: How many chunks are in flight at a time.
    """
    chunk_numel = max(1, chunk_nbytes // (itemsize * in_flight))
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    room = chunk_numel
    for tensor, numel in enumerate(numels):
        start = 0
        while start < numel:
            stop = min(numel, start + room)
            pieces.append(Piece(tensor, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                chunks.append(Chunk(tuple(pieces)))
                pieces, room = [], chunk_numel
    if pieces:
        chunks.append(Chunk(tuple(pieces)))
    return chunks


def num_blocks_of(nbytes: int, block_nbytes: int) -> int:
    """How many blocks hold ``nbytes``. Example: ``num_blocks_of(5, 4)`` is 2, ``num_blocks_of(0, 4)`` is 0."""
    return -(-nbytes // block_nbytes)
