import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from shardopt.partition import (
    ParamSpec,
    Part,
    loads_of,
    parts_of,
    plan_element_layout,
    plan_layout,
    plan_owners,
)

ITEMSIZES = {"bool": 1, "bfloat16": 2, "float32": 4, "complex128": 16}


def spec(index, numel, *, dtype="float32", is_cut=False):
    return ParamSpec(
        index=index,
        name=None,
        group=int(is_cut),
        shape=(numel,),
        stride=(1,),
        dtype=dtype,
        itemsize=ITEMSIZES[dtype],
        device="cpu#0",
        requires_grad=True,
        is_cut=is_cut,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """Parameters of which some are cut and some are whole, in any order."""

    specs: list[ParamSpec]
    world_size: int
    bucket_nbytes: int
    alignment_nbytes: int

    @property
    def owners(self):
        """Those of whole parameters as they are packed; rank 0 for the others, as an optimizer has it."""
        whole = [s for s in self.specs if not s.is_cut]
        planned = iter(plan_owners([s.numel for s in whole], [0] * self.world_size))
        return [0 if s.is_cut else next(planned) for s in self.specs]

    @property
    def buckets(self):
        options = {
            "world_size": self.world_size,
            "bucket_nbytes": self.bucket_nbytes,
            "alignment_nbytes": self.alignment_nbytes,
        }
        whole = [
            (s, owner) for s, owner in zip(self.specs, self.owners, strict=True) if not s.is_cut
        ]
        layouts = [
            plan_layout([s for s, _ in whole], [owner for _, owner in whole], **options),
            plan_element_layout([s for s in self.specs if s.is_cut], **options),
        ]
        return [bucket for layout in layouts for bucket in layout.buckets]

    def parts(self):
        """What each rank owns."""
        owners, buckets = self.owners, self.buckets
        return [parts_of(self.specs, owners, buckets, rank) for rank in range(self.world_size)]


@st.composite
def cases(draw, alignments=(1, 4, 64)):
    specs = [
        spec(
            index,
            draw(st.one_of(st.integers(0, 3), st.integers(0, 80))),
            dtype=draw(st.sampled_from(list(ITEMSIZES))),
            is_cut=draw(st.booleans()),
        )
        for index in range(draw(st.integers(0, 12)))
    ]
    return Case(
        specs,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 600)),
        draw(st.sampled_from(alignments)),
    )


@given(cases())
def test_the_parts_of_all_ranks_cover_every_element_once_and_in_rank_order(case):
    covered = {s.index: [] for s in case.specs}
    for parts in case.parts():
        for part in parts:
            covered[part.param] += range(part.offset, part.offset + part.numel)
    assert covered == {s.index: list(range(s.numel)) for s in case.specs}


@given(cases())
def test_a_rank_owns_at_most_one_part_of_a_parameter_in_the_order_of_parameters(case):
    for parts in case.parts():
        indices = [part.param for part in parts]
        assert indices == sorted(set(indices))


@given(cases())
def test_a_parameter_that_is_not_cut_belongs_to_its_owner_as_a_whole(case):
    found = [
        [part for part in parts if not case.specs[part.param].is_cut] for parts in case.parts()
    ]
    owners = case.owners
    assert found == [
        [
            Part(s.index, 0, s.numel, True)
            for s in case.specs
            if not s.is_cut and owners[s.index] == rank
        ]
        for rank in range(case.world_size)
    ]


@given(cases())
def test_empty_parameters_belong_to_their_owner_as_they_are(case):
    owners = case.owners
    found = [[part for part in parts if not part.numel] for parts in case.parts()]
    assert found == [
        [Part(s.index, 0, 0, True) for s in case.specs if not s.numel and owners[s.index] == rank]
        for rank in range(case.world_size)
    ]


@given(cases())
def test_a_part_of_what_is_cut_is_flat_even_if_it_is_all_of_its_parameter(case):
    parts = [part for parts in case.parts() for part in parts if part.numel]
    assert [part.is_whole for part in parts] == [not case.specs[p.param].is_cut for p in parts]


@given(cases(alignments=(1,)))
def test_without_alignment_no_rank_owns_more_than_its_share_of_what_is_cut(case):
    numels = {s.index: s.numel for s in case.specs}
    bound = sum(
        -(-sum(numels[param] for param in bucket.params) // case.world_size)
        for bucket in case.buckets
        if bucket.is_cut
    )
    for parts in case.parts():
        assert sum(part.numel for part in parts if case.specs[part.param].is_cut) <= bound


@given(cases())
def test_a_rank_owns_as_many_elements_as_it_was_packed_with(case):
    numels = [0 if s.is_cut else s.numel for s in case.specs]
    whole = [
        sum(part.numel for part in parts if not case.specs[part.param].is_cut)
        for parts in case.parts()
    ]
    assert whole == loads_of(numels, case.owners, case.world_size)


@given(cases())
def test_equal_arguments_give_equal_parts(case):
    assert case.parts() == dataclasses.replace(case, specs=tuple(case.specs)).parts()


def test_a_whole_and_a_cut_parameter_side_by_side_in_words():
    specs = [spec(0, 4, is_cut=True), spec(1, 3), spec(2, 2, is_cut=True)]
    case = Case(specs, world_size=2, bucket_nbytes=64, alignment_nbytes=1)
    assert case.parts() == [
        [Part(0, 0, 1, False), Part(1, 0, 3, True), Part(2, 0, 2, False)],
        [Part(0, 1, 3, False)],
    ]
