"""What one rank owns of each parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardopt.partition.layout import Bucket
from shardopt.partition.spec import ParamSpec


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a parameter that one rank owns.

    Attributes:
        param: Index of the parameter.
        offset: Its first element that belongs to the part, counted in memory order.
        numel: Elements of the part.
        is_whole: Whether the local optimizer sees the parameter in its shape, and not a flat part of it.
    """

    param: int
    offset: int
    numel: int
    is_whole: bool


def parts_of(
    specs: Sequence[ParamSpec], owners: Sequence[int], buckets: Sequence[Bucket], rank: int
) -> list[Part]:
    """What ``rank`` owns, in the order of parameters.

    A bucket has one section per rank and a parameter lies in one bucket, so a rank owns at most one part of it. Empty
    parameters lie in no bucket and belong to their owner as they are.
    """
    parts = [
        Part(slot.param, slot.offset, slot.numel, not bucket.is_cut)
        for bucket in buckets
        for slot in bucket.sections[rank].slots
    ]
    parts += [
        Part(spec.index, 0, 0, True)
        for spec, owner in zip(specs, owners, strict=True)
        if owner == rank and not spec.numel
    ]
    return sorted(parts, key=lambda part: part.param)
