"""Many flags in few integers, as ranks send them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

FLAGS_PER_INT = 62
"""Flags packed into one int64, with room to spare for the sign."""


def pack_flags(flags: Sequence[bool]) -> list[int]:
    """Pack flags into ints. Example: ``pack_flags([True, False, True])`` is ``[5]``."""
    return [
        sum(1 << bit for bit, flag in enumerate(flags[start : start + FLAGS_PER_INT]) if flag)
        for start in range(0, len(flags), FLAGS_PER_INT)
    ]


def unpack_flags(packed: Sequence[int], num_flags: int) -> list[bool]:
    """Undo ``pack_flags``."""
    return [bool(packed[i // FLAGS_PER_INT] >> (i % FLAGS_PER_INT) & 1) for i in range(num_flags)]


def ranks_by_flag(
    flags_by_member: Sequence[Sequence[bool]], rank_of: Callable[[int], int]
) -> tuple[tuple[int, ...], ...]:
    """For each flag the ranks that set it, in order.

    Example: with as many ranks as members ``ranks_by_flag([[True, False], [True, True]], rank_of)`` is ``((0, 1), (1,))``.
    """
    return tuple(
        tuple(sorted({rank_of(member) for member, is_set in enumerate(column) if is_set}))
        for column in zip(*flags_by_member, strict=True)
    )
