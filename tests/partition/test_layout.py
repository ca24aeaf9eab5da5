import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.partition import (
    Bucket,
    ParamSpec,
    Section,
    Slot,
    backward_order,
    plan_layout,
    plan_owners,
)

ITEMSIZES = {"bool": 1, "bfloat16": 2, "float32": 4, "complex64": 8, "complex128": 16}


def spec(index, numel, dtype="float32", device="cpu#0"):
    return ParamSpec(
        index=index,
        name=None,
        group=0,
        shape=(numel,),
        stride=(1,),
        dtype=dtype,
        itemsize=ITEMSIZES[dtype],
        device=device,
        requires_grad=True,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of ``plan_layout``."""

    specs: list[ParamSpec]
    owners: list[int]
    world_size: int
    bucket_nbytes: int
    alignment_nbytes: int

    def plan(self):
        return plan_layout(
            self.specs,
            self.owners,
            world_size=self.world_size,
            bucket_nbytes=self.bucket_nbytes,
            alignment_nbytes=self.alignment_nbytes,
        )


@st.composite
def cases(draw, alignments=(1, 4, 64)):
    world_size = draw(st.integers(1, 5))
    count = draw(st.integers(0, 14))
    first = draw(st.integers(0, 3))
    specs = [
        spec(
            first + i,
            draw(st.one_of(st.integers(0, 3), st.integers(0, 60))),
            draw(st.sampled_from(list(ITEMSIZES))),
            draw(st.sampled_from(["cpu#0", "cuda#1"])),
        )
        for i in range(count)
    ]
    if draw(st.booleans()):
        owners = plan_owners([s.numel for s in specs], [0] * world_size)
    else:
        owners = [draw(st.integers(0, world_size - 1)) for _ in specs]
    return Case(
        specs,
        owners,
        world_size,
        draw(st.integers(1, 400)),
        draw(st.sampled_from(alignments)),
    )


def slots_of(bucket):
    return [slot for section in bucket.sections for slot in section.slots]


def limit_nbytes(case):
    return case.bucket_nbytes // case.world_size


@given(cases())
def test_every_parameter_with_elements_lies_in_exactly_one_slot(case):
    placed = [slot.param for bucket in case.plan().buckets for slot in slots_of(bucket)]
    assert sorted(placed) == [s.index for s in case.specs if s.numel]


@given(cases())
def test_a_slot_holds_exactly_the_elements_of_its_parameter(case):
    numels = {s.index: s.numel for s in case.specs}
    slots = [slot for bucket in case.plan().buckets for slot in slots_of(bucket)]
    assert [slot.stop - slot.start for slot in slots] == [numels[slot.param] for slot in slots]


@given(cases())
def test_slots_of_a_bucket_are_ordered_and_disjoint(case):
    for bucket in case.plan().buckets:
        slots = slots_of(bucket)
        assert all(earlier.stop <= later.start for earlier, later in pairwise(slots))


@given(cases())
def test_every_slot_starts_at_a_multiple_of_the_alignment(case):
    for bucket in case.plan().buckets:
        alignment = max(case.alignment_nbytes, bucket.itemsize)
        assert all(slot.start * bucket.itemsize % alignment == 0 for slot in slots_of(bucket))


@given(cases(alignments=(1,)))
def test_without_alignment_nothing_is_padding(case):
    layout = case.plan()
    assert layout.nbytes == sum(s.nbytes for s in case.specs)


@given(cases())
def test_padding_before_a_slot_is_less_than_the_alignment(case):
    for bucket in case.plan().buckets:
        edges = [0, *(edge for slot in slots_of(bucket) for edge in (slot.start, slot.stop))]
        gaps = [start - stop for stop, start in zip(edges[::2], edges[1::2], strict=False)]
        assert all(0 <= gap * bucket.itemsize < case.alignment_nbytes for gap in gaps if gap)


@given(cases())
def test_a_bucket_has_a_section_for_each_rank_in_rank_order(case):
    for bucket in case.plan().buckets:
        assert [section.rank for section in bucket.sections] == list(range(case.world_size))


@given(cases())
def test_sections_are_ordered_and_disjoint(case):
    for bucket in case.plan().buckets:
        edges = [edge for s in bucket.sections for edge in (s.start, s.stop)]
        assert edges == sorted(edges)


@given(cases())
def test_a_section_spans_from_its_first_slot_to_its_last(case):
    for bucket in case.plan().buckets:
        for section in bucket.sections:
            if section.slots:
                ends = (section.slots[0].start, section.slots[-1].stop)
                assert (section.start, section.stop) == ends


@given(cases())
def test_a_section_without_slots_is_empty(case):
    sections = [s for bucket in case.plan().buckets for s in bucket.sections if not s.slots]
    assert [section.numel for section in sections] == [0] * len(sections)


@given(cases())
def test_a_section_holds_parameters_of_its_rank_only(case):
    owner_of = {s.index: owner for s, owner in zip(case.specs, case.owners, strict=True)}
    for bucket in case.plan().buckets:
        for section in bucket.sections:
            assert {owner_of[slot.param] for slot in section.slots} <= {section.rank}


@given(cases())
def test_a_bucket_holds_one_dtype_on_one_device(case):
    kind_of = {s.index: (s.dtype, s.device, s.itemsize) for s in case.specs}
    for bucket in case.plan().buckets:
        kinds = {kind_of[param] for param in bucket.params}
        assert kinds == {(bucket.dtype, bucket.device, bucket.itemsize)}


@given(cases())
def test_no_section_is_above_its_part_of_the_bound_unless_it_is_one_parameter(case):
    nbytes_of = {s.index: s.nbytes for s in case.specs}
    for bucket in case.plan().buckets:
        for section in bucket.sections:
            nbytes = sum(nbytes_of[slot.param] for slot in section.slots)
            assert nbytes <= limit_nbytes(case) or len(section.slots) == 1


@given(cases(alignments=(1,)))
def test_no_bucket_is_above_the_bound_unless_a_section_is_one_large_parameter(case):
    for bucket in case.plan().buckets:
        nbytes_by_rank = [section.numel * bucket.itemsize for section in bucket.sections]
        is_bounded = sum(nbytes_by_rank) <= case.bucket_nbytes
        assert is_bounded or max(nbytes_by_rank) > limit_nbytes(case)


@given(cases())
def test_the_parameters_of_a_rank_keep_their_order(case):
    for rank in range(case.world_size):
        for kind in {(s.device, s.dtype) for s in case.specs}:
            placed = [
                slot.param
                for bucket in case.plan().buckets
                if (bucket.device, bucket.dtype) == kind
                for slot in bucket.sections[rank].slots
            ]
            assert placed == sorted(placed)


@given(cases())
def test_a_rank_fills_a_section_before_it_starts_the_next(case):
    specs = {s.index: s for s in case.specs}
    for kind in {(s.device, s.dtype) for s in case.specs}:
        buckets = [b for b in case.plan().buckets if (b.device, b.dtype) == kind]
        for rank in range(case.world_size):
            runs = [[specs[slot.param] for slot in b.sections[rank].slots] for b in buckets]
            for run, following in pairwise(runs):
                if following:
                    assert sum(s.nbytes for s in run) + following[0].nbytes > limit_nbytes(case)


@given(cases())
def test_buckets_stand_in_the_order_in_which_their_kind_first_appears(case):
    first = list(dict.fromkeys((s.device, s.dtype) for s in case.specs if s.numel))
    kinds = list(dict.fromkeys((b.device, b.dtype) for b in case.plan().buckets))
    assert kinds == first


@given(cases())
def test_buckets_of_a_kind_stand_together(case):
    kinds = [(b.device, b.dtype) for b in case.plan().buckets]
    changes = sum(one != other for one, other in pairwise(kinds))
    assert changes == max(0, len(set(kinds)) - 1)


@given(cases())
def test_no_bucket_is_empty(case):
    assert all(bucket.numel for bucket in case.plan().buckets)


@given(cases())
def test_equal_arguments_give_equal_layouts(case):
    assert case.plan() == case.plan()


@given(cases())
def test_a_bucket_ends_with_its_last_slot(case):
    for bucket in case.plan().buckets:
        assert bucket.numel == max(slot.stop for slot in slots_of(bucket))


@given(cases())
def test_no_bucket_of_whole_parameters_says_that_it_is_cut(case):
    assert not any(bucket.is_cut for bucket in case.plan().buckets)


def test_a_layout_in_words():
    specs = [spec(0, 3), spec(1, 5), spec(2, 2), spec(3, 0)]
    layout = plan_layout(specs, [1, 0, 1, 0], world_size=2, bucket_nbytes=40, alignment_nbytes=16)
    sections = (
        Section(0, 0, 5, (Slot(1, 0, 5),)),
        Section(1, 8, 14, (Slot(0, 8, 11), Slot(2, 12, 14))),
    )
    assert layout.buckets == (Bucket("float32", "cpu#0", 4, sections),)


def test_the_bound_is_inclusive():
    layout = plan_layout([spec(0, 2), spec(1, 3)], [0, 0], world_size=1, bucket_nbytes=20)
    assert [bucket.params for bucket in layout.buckets] == [(0, 1)]


def test_one_byte_less_than_two_parameters_parts_them():
    layout = plan_layout([spec(0, 2), spec(1, 3)], [0, 0], world_size=1, bucket_nbytes=19)
    assert [bucket.params for bucket in layout.buckets] == [(0,), (1,)]


def test_a_parameter_above_the_bound_is_a_run_of_its_own():
    specs = [spec(0, 1), spec(1, 100), spec(2, 1)]
    layout = plan_layout(specs, [0, 0, 0], world_size=1, bucket_nbytes=8)
    assert [bucket.params for bucket in layout.buckets] == [(0,), (1,), (2,)]


def test_ranks_with_fewer_runs_have_empty_sections_in_the_later_buckets():
    specs = [spec(0, 2), spec(1, 2), spec(2, 2)]
    layout = plan_layout(specs, [0, 0, 1], world_size=2, bucket_nbytes=16)
    assert [[s.numel for s in b.sections] for b in layout.buckets] == [[2, 2], [2, 0]]


def test_no_parameters_need_no_buckets():
    assert plan_layout([], [], world_size=3, bucket_nbytes=8).buckets == ()


def test_layout_nbytes_counts_padding_between_slots_but_not_after_the_last():
    specs = [spec(0, 1), spec(1, 1)]
    layout = plan_layout(specs, [0, 0], world_size=1, bucket_nbytes=64, alignment_nbytes=16)
    assert layout.nbytes == 20


def test_a_bucket_without_sections_has_no_elements():
    assert Bucket("float32", "cpu#0", 4, ()).numel == 0


def test_layout_rejects_owners_for_other_parameters():
    with pytest.raises(ValueError, match="zip"):
        plan_layout([spec(0, 1)], [], world_size=1, bucket_nbytes=8)


# --- backward_order -------------------------------------------------------------------------------


@given(cases())
def test_backward_completes_every_bucket_once(case):
    buckets = case.plan().buckets
    assert sorted(backward_order(buckets)) == list(range(len(buckets)))


@given(cases())
def test_backward_completes_a_bucket_with_the_lowest_of_its_parameters(case):
    """Gradients come in descending order of parameters."""
    missing = [set(bucket.params) for bucket in case.plan().buckets]
    completed = []
    for param in sorted((s.index for s in case.specs if s.numel), reverse=True):
        for number, params in enumerate(missing):
            if param in params:
                params.remove(param)
                completed += [] if params else [number]
    assert backward_order(case.plan().buckets) == completed


@given(cases())
def test_the_first_parameter_of_a_bucket_is_its_lowest(case):
    buckets = case.plan().buckets
    assert [bucket.first_param for bucket in buckets] == [min(b.params) for b in buckets]
