"""Which rank owns which whole parameter: sorted-greedy packing."""

from __future__ import annotations

from collections.abc import Sequence

from shardopt.partition.spec import ParamSpec


def plan_owners(costs: Sequence[float], loads: Sequence[float]) -> list[int]:
    """Give each parameter, largest first, to the rank that carries least so far.

    Ties go to the earlier parameter and to the lower rank. No rank ends more than one parameter above another:
    the difference of two loads that start equal is at most the largest parameter.

    Example: ``plan_owners([4, 9, 5, 3], [0, 0])`` looks at 9, 5, 4, 3: rank 0 takes 9, rank 1 takes 5 and 4,
    and rank 0, at 9 against 9, takes 3: ``[1, 0, 1, 0]``.

    Args:
        costs: What each parameter costs its owner: its elements, or the work of updating it.
        loads: What each rank carries already, one entry per rank.

    Returns:
        The owner of each parameter.
    """
    totals = list(loads)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        rank = min(range(len(totals)), key=totals.__getitem__)
        owners[index] = rank
        totals[rank] += costs[index]
    return owners


def loads_of(costs: Sequence[float], owners: Sequence[int], world_size: int) -> list[float]:
    """Return what each rank carries."""
    loads: list[float] = [0] * world_size
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    return loads


def whole_loads(specs: Sequence[ParamSpec], owners: Sequence[int], world_size: int) -> list[float]:
    """Return what each rank carries of parameters that are not cut by element."""
    loads = [0.0 if spec.is_cut else spec.load for spec in specs]
    return loads_of(loads, owners, world_size)


def imbalance_of(loads: Sequence[float]) -> float:
    """Return the largest load over the mean, 1.0 or more. Example: ``imbalance_of([30, 10])`` is 1.5."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0
