"""Where each parameter lies in the buckets that the ranks exchange.

A bucket is one flat tensor of one dtype on one device. It has a section for each rank, in rank order; sending a
bucket takes one broadcast per non-empty section. By parameter, a section holds whole parameters of its rank:

    bucket 0  | rank 0: p3 p7   | rank 1: p0 . p5    |          . = padding to the alignment
    bucket 1  | rank 0: p1      | rank 1: (empty)    |

By element, parameters lie back to back and the bucket is cut into equal sections, wherever that falls:

    bucket 0  | rank 0: p7 p5 p3[0, 40) | rank 1: p3[40, 64) p1 p0 . |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardopt.partition.spec import ParamSpec


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements ``[start, stop)`` of a bucket, which hold a parameter, or its elements from ``offset`` on."""

    param: int
    start: int
    stop: int
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements of the slot."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Section:
    """Elements ``[start, stop)`` of a bucket, which one rank owns; empty where it owns nothing."""

    rank: int
    start: int
    stop: int
    slots: tuple[Slot, ...]

    @property
    def numel(self) -> int:
        """Elements that travel: padding between slots counts, padding after the last does not."""
        return self.stop - self.start


@dataclass(frozen=True)  # without slots, for what is computed once
class Bucket:
    """One flat tensor of one dtype on one device, in a section per rank; ``is_cut``: by element, in equal sections."""

    dtype: str
    device: str
    itemsize: int
    sections: tuple[Section, ...]
    is_cut: bool = False

    @cached_property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return max((section.stop for section in self.sections), default=0)

    @cached_property
    def params(self) -> tuple[int, ...]:
        """Indices of the parameters it holds, by section."""
        return tuple(self.places)

    @cached_property
    def first_param(self) -> int:
        """The lowest index of a parameter it holds."""
        return min(self.params)

    @cached_property
    def places(self) -> dict[int, Slot]:
        """Where each parameter lies as a whole, across sections."""
        places: dict[int, Slot] = {}
        for section in self.sections:
            for slot in section.slots:
                start = slot.start - slot.offset
                places[slot.param] = Slot(slot.param, start, slot.stop)
        return places


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets of a set of parameters; equal on every rank."""

    world_size: int
    buckets: tuple[Bucket, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that one exchange of all parameters sends, counted once at their owners."""
        return sum(s.numel * bucket.itemsize for bucket in self.buckets for s in bucket.sections)


def backward_order(buckets: Sequence[Bucket]) -> list[int]:
    """Return the numbers of buckets about as backward completes them.

    Gradients come in about the reverse order of parameters, so a bucket is complete with its lowest.
    """
    return sorted(range(len(buckets)), key=lambda number: -buckets[number].first_param)


def plan_layout(
    specs: Sequence[ParamSpec],
    owners: Sequence[int],
    *,
    world_size: int,
    bucket_nbytes: int,
    alignment_nbytes: int = 1,
) -> Layout:
    """Lay parameters into buckets so that each bucket asks about equally much of every rank.

    Each rank's parameters, in index order, are cut into runs of at most ``bucket_nbytes / world_size`` bytes; bucket
    ``i`` of a dtype and device is the ``i``-th run of each rank. A parameter above the bound is a run of its own, and
    every parameter lies in exactly one bucket. Empty parameters lie nowhere.

    Args:
        specs: The parameters to place.
        owners: The owner of each of them.
        world_size: Number of ranks, 1 or more.
        bucket_nbytes: Bound on the bytes of the parameters in a bucket, unless it holds but one per rank; padding to
            the alignment comes on top.
        alignment_nbytes: Every slot starts at a multiple of this, counted from the start of its bucket.

    Returns:
        The layout. Buckets stand in the order in which their dtype and device first appear.
    """
    kinds: dict[tuple[str, str], list[list[ParamSpec]]] = {}
    for spec, owner in zip(specs, owners, strict=True):
        if spec.numel:
            by_rank = kinds.setdefault((spec.device, spec.dtype), [[] for _ in range(world_size)])
            by_rank[owner].append(spec)
    buckets: list[Bucket] = []
    for by_rank in kinds.values():
        runs_by_rank = [cut_runs(owned, bucket_nbytes // world_size) for owned in by_rank]
        for i in range(max(map(len, runs_by_rank))):
            runs = [runs[i] if i < len(runs) else [] for runs in runs_by_rank]
            buckets.append(_bucket(runs, alignment_nbytes))
    return Layout(world_size, tuple(buckets))


def cut_runs(specs: Sequence[ParamSpec], limit_nbytes: int) -> list[list[ParamSpec]]:
    """Cut ``specs`` into runs of at most ``limit_nbytes`` bytes, or of one parameter."""
    runs: list[list[ParamSpec]] = []
    room = 0
    for spec in specs:
        if not runs or spec.nbytes > room:
            runs.append([])
            room = limit_nbytes
        runs[-1].append(spec)
        room -= spec.nbytes
    return runs


def _bucket(runs: Sequence[Sequence[ParamSpec]], alignment_nbytes: int) -> Bucket:
    """Lay one run per rank into a bucket."""
    first = next(spec for run in runs for spec in run)
    alignment = max(1, alignment_nbytes // first.itemsize)
    sections: list[Section] = []
    stop = 0
    for rank, run in enumerate(runs):
        slots: list[Slot] = []
        for spec in run:
            start = -(-stop // alignment) * alignment
            stop = start + spec.numel
            slots.append(Slot(spec.index, start, stop))
        start = slots[0].start if slots else stop
        sections.append(Section(rank, start, stop, tuple(slots)))
    return Bucket(first.dtype, first.device, first.itemsize, tuple(sections))
