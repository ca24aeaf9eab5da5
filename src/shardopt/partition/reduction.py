"""How the gradients of a bucket travel on a backend that sends point to point."""

from __future__ import annotations

from collections.abc import Sequence

from shardopt.partition.layout import Bucket, Section, Slot


def plan_reduction(bucket: Bucket, *, direct_nbytes: int) -> list[Bucket]:
    """Split a bucket into one for each large parameter, which can travel from where it lies, and one for all others.

    Owners, and the order of parameters, stay as they are; padding does not travel.

    Example: 2 ranks, a bucket of a small p2 at [0, 2), a large p1 at [2, 10) and a small p0 at [10, 12), cut at 6: p1
    gets a bucket of 8, the sections [0, 4) and [4, 8); p2 and p0 one of 4, the sections [0, 2) with p2 and [2, 4) with p0.

    Args:
        bucket: Parameters in its sections.
        direct_nbytes: From how many bytes on a parameter counts as large.
    """
    places = bucket.places
    large = [p for p in places if places[p].numel * bucket.itemsize >= direct_nbytes]
    small = [p for p in places if p not in large]
    split = [_only(bucket, [param]) for param in large]
    return split + ([_only(bucket, small)] if small else [])


def _only(bucket: Bucket, params: Sequence[int]) -> Bucket:
    """The bucket with some of its parameters, without gaps."""
    sections: list[Section] = []
    stop = 0
    for section in bucket.sections:
        start, slots = stop, []
        for slot in section.slots:
            if slot.param in params:
                slots.append(Slot(slot.param, stop, stop + slot.numel, slot.offset))
                stop += slot.numel
        sections.append(Section(section.rank, start, stop, tuple(slots)))
    return Bucket(bucket.dtype, bucket.device, bucket.itemsize, tuple(sections), bucket.is_cut)
