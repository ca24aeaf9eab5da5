"""A flat range of a tensor as boxes: what formats of n-dimensional chunks can hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor whose index in each dimension is in ``[offset, offset + size)``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def permuted(self, order: Sequence[int]) -> Box:
        """The same box of the tensor whose dimension ``order[i]`` is dimension ``i`` of this one."""
        place = sorted(range(len(order)), key=order.__getitem__)
        return Box(
            tuple(self.offsets[i] for i in place),
            tuple(self.sizes[i] for i in place),
        )


def boxes_of(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut elements ``[start, stop)`` of a row-major tensor into boxes, in order; at most 2 d - 1 for d dimensions, or one.

    Each box is a run of the range, so a flat tensor of the range splits into them by their numels.

    Example: ``boxes_of((5, 7), 4, 30)`` is the end of row 0, rows 1 to 3, and the start of row 4: offsets and sizes
    (0, 4) (1, 3); (1, 0) (3, 7); (4, 0) (1, 2).

    Args:
        shape: Of the tensor; no dimensions, for one element, too.
        start: First element.
        stop: Behind the last element.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _in_row(shape, first, start - first * row, stop - first * row)
    begins_inside, ends_inside = start % row > 0, stop % row > 0
    head = _in_row(shape, first, start % row, row) if begins_inside else []
    tail = _in_row(shape, last, 0, stop % row) if ends_inside else []
    low, high = first + begins_inside, last + (not ends_inside)
    body = [Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))] if high > low else []
    return head + body + tail


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    """The boxes of a range within one index of the first dimension."""
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes_of(shape[1:], start, stop)]


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor. Example: ``row_major((2, 3, 4))`` is ``(12, 4, 1)``."""
    return tuple(prod(max(length, 1) for length in shape[dim + 1 :]) for dim in range(len(shape)))


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor from the one that moves slowest in memory to the fastest.

    Example: a channels-last tensor, shape (2, 3, 4, 5) and strides (60, 1, 15, 3), has order [0, 2, 3, 1].
    """
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim], dim))
