"""Many flags in few integers, as ranks send them."""

from __future__ import annotations

from collections.abc import Sequence

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


def ranks_by_flag(flags_by_rank: Sequence[Sequence[bool]]) -> tuple[tuple[int, ...], ...]:
    """For each flag the ranks that set it. Example: ``ranks_by_flag([[True, False], [True, True]])``: ``((0, 1), (1,))``."""
    return tuple(
        tuple(rank for rank, is_set in enumerate(column) if is_set)
        for column in zip(*flags_by_rank, strict=True)
    )
