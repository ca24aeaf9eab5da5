import dataclasses
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardopt.partition import (
    Bucket,
    ParamSpec,
    Section,
    Slot,
    plan_element_layout,
    plan_layout,
    plan_owners,
)

ITEMSIZES = {"bool": 1, "bfloat16": 2, "float32": 4, "complex128": 16}


def spec(index, numel, dtype="float32", device="cpu#0", group=0):
    return ParamSpec(
        index=index,
        name=None,
        group=group,
        shape=(numel,),
        stride=(1,),
        dtype=dtype,
        itemsize=ITEMSIZES[dtype],
        device=device,
        requires_grad=True,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of ``plan_element_layout``."""

    specs: list[ParamSpec]
    world_size: int
    bucket_nbytes: int
    alignment_nbytes: int

    def plan(self):
        return plan_element_layout(
            self.specs,
            world_size=self.world_size,
            bucket_nbytes=self.bucket_nbytes,
            alignment_nbytes=self.alignment_nbytes,
        )

    @property
    def numels(self):
        return {s.index: s.numel for s in self.specs}


@st.composite
def cases(draw, alignments=(1, 4, 64)):
    first = draw(st.integers(0, 3))
    group = 0
    specs = []
    for i in range(draw(st.integers(0, 12))):
        group += draw(st.integers(0, 4)) // 4  # groups follow each other, as in an optimizer
        numel = draw(st.one_of(st.integers(0, 3), st.integers(0, 80)))
        dtype = draw(st.sampled_from(list(ITEMSIZES)))
        device = draw(st.sampled_from(["cpu#0", "cuda#1"]))
        specs.append(spec(first + i, numel, dtype, device, group))
    return Case(
        specs,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 600)),
        draw(st.sampled_from(alignments)),
    )


def slots_of(bucket):
    return [slot for section in bucket.sections for slot in section.slots]


# --- plan_element_layout --------------------------------------------------------------------------


@given(cases())
def test_every_element_of_every_parameter_lies_in_exactly_one_section(case):
    lying = [
        (slot.param, element)
        for bucket in case.plan().buckets
        for slot in slots_of(bucket)
        for element in range(slot.offset, slot.offset + slot.numel)
    ]
    assert sorted(lying) == [(i, e) for i, numel in case.numels.items() for e in range(numel)]


@given(cases())
def test_a_parameter_lies_in_one_piece_in_one_bucket(case):
    places = {}
    for number, bucket in enumerate(case.plan().buckets):
        for slot in slots_of(bucket):
            places.setdefault(slot.param, set()).add((number, slot.start - slot.offset))
    assert [len(found) for found in places.values()] == [1] * len(places)


@given(cases())
def test_slots_lie_within_their_section_and_are_not_empty(case):
    for bucket in case.plan().buckets:
        for section in bucket.sections:
            for slot in section.slots:
                assert section.start <= slot.start < slot.stop <= section.stop


@given(cases())
def test_slots_of_a_bucket_are_ordered_and_disjoint(case):
    for bucket in case.plan().buckets:
        assert all(one.stop <= other.start for one, other in pairwise(slots_of(bucket)))


@given(cases())
def test_the_sections_of_a_bucket_are_equally_long_and_lie_back_to_back(case):
    for bucket in case.plan().buckets:
        numel = bucket.sections[0].numel
        assert [(s.rank, s.start, s.stop) for s in bucket.sections] == [
            (rank, rank * numel, (rank + 1) * numel) for rank in range(case.world_size)
        ]


@given(cases())
def test_every_section_and_every_parameter_starts_at_a_multiple_of_the_alignment(case):
    for bucket in case.plan().buckets:
        alignment = max(case.alignment_nbytes, bucket.itemsize)
        starts = [section.start for section in bucket.sections]
        starts += [place.start for place in bucket.places.values()]
        assert [start * bucket.itemsize % alignment for start in starts] == [0] * len(starts)


@given(cases())
def test_padding_between_parameters_is_less_than_the_alignment(case):
    for bucket in case.plan().buckets:
        alignment = max(1, case.alignment_nbytes // bucket.itemsize)
        places = list(bucket.places.values())
        assert places[0].start == 0
        assert all(0 <= b.start - a.stop < alignment for a, b in pairwise(places))


@given(cases())
def test_padding_at_the_end_is_less_than_the_alignment_of_each_rank(case):
    for bucket in case.plan().buckets:
        alignment = max(1, case.alignment_nbytes // bucket.itemsize)
        stop = max(place.stop for place in bucket.places.values())
        assert 0 <= bucket.numel - stop < case.world_size * alignment


@given(cases())
def test_a_bucket_holds_one_group_dtype_and_device(case):
    kinds = {s.index: (s.group, s.dtype, s.device, s.itemsize) for s in case.specs}
    for bucket in case.plan().buckets:
        [(_, dtype, device, itemsize)] = {kinds[param] for param in bucket.params}
        assert (dtype, device, itemsize) == (bucket.dtype, bucket.device, bucket.itemsize)


@given(cases())
def test_parameters_of_a_kind_stand_in_reverse_order(case):
    kind_of = {s.index: (s.group, s.dtype, s.device) for s in case.specs}
    placed = [param for bucket in case.plan().buckets for param in bucket.params]
    for kind in set(kind_of.values()):
        of_kind = [param for param in placed if kind_of[param] == kind]
        assert of_kind == sorted(of_kind, reverse=True)


@given(cases())
def test_buckets_stand_in_the_order_in_which_their_kind_comes_last(case):
    kinds = [(s.group, s.dtype, s.device) for s in reversed(case.specs) if s.numel]
    kind_of = {s.index: (s.group, s.dtype, s.device) for s in case.specs}
    placed = [kind_of[bucket.params[0]] for bucket in case.plan().buckets]
    assert list(dict.fromkeys(placed)) == list(dict.fromkeys(kinds))


@given(cases())
def test_the_parameters_of_a_bucket_keep_to_the_bound_or_are_one_parameter(case):
    for bucket in case.plan().buckets:
        nbytes = sum(case.numels[param] for param in bucket.params) * bucket.itemsize
        assert nbytes <= case.bucket_nbytes or len(bucket.params) == 1


@given(cases())
def test_a_bucket_is_filled_before_the_next_one_is_begun(case):
    kind_of = {s.index: (s.group, s.dtype, s.device) for s in case.specs}
    nbytes_of = {s.index: s.nbytes for s in case.specs}
    for bucket, following in pairwise(case.plan().buckets):
        if kind_of[bucket.params[0]] == kind_of[following.params[0]]:
            nbytes = sum(nbytes_of[param] for param in bucket.params)
            assert nbytes + nbytes_of[following.params[0]] > case.bucket_nbytes


@given(cases())
def test_empty_parameters_lie_nowhere(case):
    placed = {param for bucket in case.plan().buckets for param in bucket.params}
    assert placed == {index for index, numel in case.numels.items() if numel}


@given(cases())
def test_equal_arguments_give_equal_layouts(case):
    assert case.plan() == dataclasses.replace(case, specs=tuple(case.specs)).plan()


@given(cases())
def test_every_bucket_says_that_it_is_cut(case):
    assert all(bucket.is_cut for bucket in case.plan().buckets)


@given(cases())
def test_there_is_one_section_per_rank(case):
    layout = case.plan()
    assert layout.world_size == case.world_size
    assert {len(bucket.sections) for bucket in layout.buckets} <= {case.world_size}


def test_the_worked_example_of_plan_element_layout_holds():
    layout = plan_element_layout(
        [spec(0, 10), spec(1, 6)], world_size=2, bucket_nbytes=64, alignment_nbytes=1
    )
    sections = (
        Section(0, 0, 8, (Slot(1, 0, 6), Slot(0, 6, 8, 0))),
        Section(1, 8, 16, (Slot(0, 8, 16, 2),)),
    )
    assert layout.buckets == (Bucket("float32", "cpu#0", 4, sections, is_cut=True),)


def test_a_parameter_can_reach_over_more_than_two_sections():
    layout = plan_element_layout([spec(0, 10)], world_size=3, bucket_nbytes=64, alignment_nbytes=1)
    [bucket] = layout.buckets
    assert [s.slots for s in bucket.sections] == [
        (Slot(0, 0, 4, 0),),
        (Slot(0, 4, 8, 4),),
        (Slot(0, 8, 10, 8),),
    ]


def test_a_rank_can_own_nothing_but_padding():
    layout = plan_element_layout([spec(0, 2)], world_size=3, bucket_nbytes=64, alignment_nbytes=4)
    [bucket] = layout.buckets
    assert [(s.numel, len(s.slots)) for s in bucket.sections] == [(1, 1), (1, 1), (1, 0)]


def test_an_alignment_below_an_element_is_one_element():
    layout = plan_element_layout(
        [spec(0, 3, "complex128")], world_size=1, bucket_nbytes=1, alignment_nbytes=4
    )
    assert layout.buckets[0].numel == 3


def test_a_parameter_above_the_bound_is_a_bucket_of_its_own():
    layout = plan_element_layout(
        [spec(0, 2), spec(1, 50), spec(2, 2)], world_size=2, bucket_nbytes=64, alignment_nbytes=1
    )
    assert [bucket.params for bucket in layout.buckets] == [(2,), (1,), (0,)]


# --- places ---------------------------------------------------------------------------------------


@given(cases())
def test_places_are_whole_parameters_in_the_order_of_the_bucket(case):
    for bucket in case.plan().buckets:
        places = bucket.places
        assert [(i, place.param, place.offset) for i, place in places.items()] == [
            (i, i, 0) for i in bucket.params
        ]
        assert [place.numel for place in places.values()] == [case.numels[i] for i in places]
        starts = [place.start for place in places.values()]
        assert starts == sorted(starts)


@given(cases())
def test_every_slot_is_its_part_of_the_place(case):
    for bucket in case.plan().buckets:
        for slot in slots_of(bucket):
            place = bucket.places[slot.param]
            assert place.start + slot.offset == slot.start
            assert slot.stop <= place.stop


@given(cases())
def test_places_of_whole_parameters_are_their_slots(case):
    owners = plan_owners(list(case.numels.values()), [0] * case.world_size)
    layout = plan_layout(
        case.specs,
        owners,
        world_size=case.world_size,
        bucket_nbytes=case.bucket_nbytes,
        alignment_nbytes=case.alignment_nbytes,
    )
    for bucket in layout.buckets:
        assert list(bucket.places.values()) == slots_of(bucket)


def test_a_bucket_without_sections_has_no_places():
    assert (Bucket("float32", "cpu#0", 4, ()).places, Bucket("x", "y", 1, ()).params) == ({}, ())
