"""Which rank owns which whole parameter: sorted-greedy packing."""

from __future__ import annotations

from collections.abc import Sequence


def plan_owners(numels: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Give each parameter, largest first, to the rank that carries least so far.

    Ties go to the earlier parameter and to the lower rank. No rank ends more than one parameter above another:
    the difference of two loads that start equal is at most the largest parameter.

    Example: ``plan_owners([4, 9, 5, 3], [0, 0])`` looks at 9, 5, 4, 3: rank 0 takes 9, rank 1 takes 5 and 4,
    and rank 0, at 9 against 9, takes 3: ``[1, 0, 1, 0]``.

    Args:
        numels: Elements of each parameter.
        loads: Elements that each rank owns already, one entry per rank.

    Returns:
        The owner of each parameter.
    """
    totals = list(loads)
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda i: -numels[i]):
        rank = min(range(len(totals)), key=totals.__getitem__)
        owners[index] = rank
        totals[rank] += numels[index]
    return owners


def loads_of(numels: Sequence[int], owners: Sequence[int], world_size: int) -> list[int]:
    """Return how many elements each rank owns."""
    loads = [0] * world_size
    for numel, owner in zip(numels, owners, strict=True):
        loads[owner] += numel
    return loads
