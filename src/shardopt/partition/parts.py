"""What one rank owns of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardopt.partition.layout import Layout
from shardopt.partition.spec import ParamSpec


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a parameter that one rank owns.

    Attributes:
        param: Index of the parameter.
        offset: Its first element that belongs to the part, counted in memory order.
        numel: Elements of the part.
        is_whole: Whether the local optimizer sees the parameter itself, in its shape, and not a flat part of it.
    """

    param: int
    offset: int
    numel: int
    is_whole: bool


def whole_parts(specs: Sequence[ParamSpec], owners: Sequence[int], rank: int) -> list[Part]:
    """What ``rank`` owns where every parameter has one owner."""
    return [
        Part(spec.index, 0, spec.numel, True)
        for spec, owner in zip(specs, owners, strict=True)
        if owner == rank
    ]


def element_parts(specs: Sequence[ParamSpec], layout: Layout, rank: int) -> list[Part]:
    """What ``rank`` owns where buckets are cut by element, in the order of parameters.

    A bucket has one section per rank, so a rank owns at most one part of a parameter. Empty parameters lie in no bucket
    and belong to rank 0 as they are.
    """
    parts = [
        Part(slot.param, slot.offset, slot.numel, False)
        for bucket in layout.buckets
        for slot in bucket.sections[rank].slots
    ]
    if rank == 0:
        parts += [Part(spec.index, 0, 0, True) for spec in specs if not spec.numel]
    return sorted(parts, key=lambda part: part.param)
