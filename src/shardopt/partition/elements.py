"""Buckets cut into equal sections, wherever that falls: element granularity."""

from __future__ import annotations

from collections.abc import Sequence

from shardopt.partition.layout import Bucket, Layout, Section, Slot, cut_runs
from shardopt.partition.spec import ParamSpec


def plan_element_layout(
    specs: Sequence[ParamSpec], *, world_size: int, bucket_nbytes: int, alignment_nbytes: int
) -> Layout:
    """Lay parameters back to back into buckets that every rank owns an equal section of.

    Parameters stand in reverse order, about that in which backward produces their gradients; a bucket holds one param
    group, dtype and device. The last section of a bucket may end in padding, so that sections are equal.

    Example: 2 ranks, alignment 1, parameters p0 of 10 and p1 of 6 elements in one bucket of 16: p1 lies at [0, 6), p0
    at [6, 16). Rank 0 owns [0, 8): all of p1 and p0[0, 2); rank 1 owns [8, 16): p0[2, 10).

    Args:
        specs: The parameters to place.
        world_size: Number of ranks, 1 or more.
        bucket_nbytes: Bound on the bytes of the parameters in a bucket, unless it holds but one; padding comes on top.
        alignment_nbytes: Every parameter and every section starts at a multiple of this.

    Returns:
        The layout. Every element of every parameter lies in exactly one section.
    """
    kinds: dict[tuple[int, str, str], list[ParamSpec]] = {}
    for spec in reversed(specs):
        if spec.numel:
            kinds.setdefault((spec.group, spec.device, spec.dtype), []).append(spec)
    buckets: list[Bucket] = []
    for kind in kinds.values():
        alignment = max(1, alignment_nbytes // kind[0].itemsize)
        for run in cut_runs(kind, bucket_nbytes):
            buckets.append(_bucket(run, world_size, alignment))
    return Layout(world_size, tuple(buckets))


def _bucket(run: Sequence[ParamSpec], world_size: int, alignment: int) -> Bucket:
    """Lay one run of parameters into a bucket and cut it."""
    places: list[Slot] = []
    stop = 0
    for spec in run:
        start = _round_up(stop, alignment)
        stop = start + spec.numel
        places.append(Slot(spec.index, start, stop))
    section_numel = _round_up(stop, world_size * alignment) // world_size
    sections = tuple(
        _section(rank, rank * section_numel, (rank + 1) * section_numel, places)
        for rank in range(world_size)
    )
    return Bucket(run[0].dtype, run[0].device, run[0].itemsize, sections, is_cut=True)


def _section(rank: int, start: int, stop: int, places: Sequence[Slot]) -> Section:
    """What of the parameters at ``places`` lies in ``[start, stop)``."""
    slots = [
        Slot(p.param, max(p.start, start), min(p.stop, stop), max(0, start - p.start))
        for p in places
        if p.start < stop and start < p.stop
    ]
    return Section(rank, start, stop, tuple(slots))


def _round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple
