"""Which ranges go where when state that was cut in one way is needed cut in another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Elements ``[start, stop)`` of a parameter that ``source`` holds, whatever sources are to the caller."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """``numel`` elements, from ``source_start`` on in what ``source`` holds, to ``target_start`` on in what is needed."""

    source: int
    source_start: int
    target_start: int
    numel: int


def plan_transfers(held: Sequence[Range], start: int, stop: int) -> list[Transfer]:
    """Bring elements ``[start, stop)`` together from ranges that hold them, each element once, in order.

    Where several hold an element, it comes from the one that begins first.

    Example: of ``[0, 4)`` in source 0 and ``[4, 10)`` in source 1, elements [2, 7) are 2 from position 2 of source 0
    to position 0, and 3 from position 0 of source 1 to position 2.

    Raises:
        ValueError: Nobody holds an element; names it.
    """
    transfers: list[Transfer] = []
    at = start
    for piece in sorted(held, key=lambda piece: (piece.start, piece.source)):
        if piece.start <= at < min(piece.stop, stop):
            end = min(piece.stop, stop)
            transfers.append(Transfer(piece.source, at - piece.start, at - start, end - at))
            at = end
    if at < stop:
        held_next = min((piece.start for piece in held if piece.start > at), default=stop)
        raise ValueError(f"elements [{at}, {min(held_next, stop)}) are held by nobody")
    return transfers
