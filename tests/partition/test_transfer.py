import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardopt.partition import Range, Transfer, plan_transfers

MAX_NUMEL = 40


@st.composite
def cuts(draw, numel):
    """``[0, numel)`` cut into any number of ranges, some of them empty, whose sources are in any order."""
    inner = draw(st.lists(st.integers(0, numel), max_size=6))
    ends = [0, *sorted(inner), numel]
    sources = draw(st.permutations(range(len(ends) - 1)))
    pieces = [Range(s, *ends) for s, ends in zip(sources, pairwise(ends), strict=True)]
    return draw(st.permutations(pieces))


@st.composite
def ranges(draw, numel, first_source=0):
    """Any ranges within ``[0, numel)``; they overlap, and leave elements out."""
    ends = draw(st.lists(st.tuples(*[st.integers(0, numel)] * 2).map(sorted), max_size=6))
    return [Range(first_source + n, start, stop) for n, (start, stop) in enumerate(ends)]


@st.composite
def needs(draw, numel):
    """A range within ``[0, numel)``."""
    return tuple(sorted(draw(st.tuples(*[st.integers(0, numel)] * 2))))


numels = st.integers(0, MAX_NUMEL)
cut_cases = numels.flatmap(lambda numel: st.tuples(cuts(numel), needs(numel)))
"""Ranges that hold each element once, and the range that is needed."""
overlapping_cases = numels.flatmap(
    lambda numel: st.tuples(
        st.tuples(cuts(numel), ranges(numel, 100)).map(lambda both: [*both[0], *both[1]]),
        needs(numel),
    )
)
"""Ranges that hold each element, some more than once, and the range that is needed."""
holey_cases = numels.flatmap(lambda numel: st.tuples(ranges(numel), needs(numel)))
"""Ranges that hold some elements, and the range that is needed."""


def applied(transfers, held, numel):
    """What is needed after some transfers; every source holds the numbers of its elements."""
    contents = {piece.source: list(range(piece.start, piece.stop)) for piece in held}
    target = [None] * numel
    for move in transfers:
        source = contents[move.source][move.source_start :][: move.numel]
        assert len(source) == move.numel
        for position, element in enumerate(source, move.target_start):
            assert target[position] is None, "moved twice"
            target[position] = element
    return target


def missing_of(held, start, stop):
    return [
        element
        for element in range(start, stop)
        if not any(piece.start <= element < piece.stop for piece in held)
    ]


def test_the_worked_example_of_plan_transfers_holds():
    held = [Range(0, 0, 4), Range(1, 4, 10)]
    assert plan_transfers(held, 2, 7) == [Transfer(0, 2, 0, 2), Transfer(1, 0, 2, 3)]


@given(cut_cases)
def test_transfers_bring_the_needed_elements_together_each_once(case):
    held, (start, stop) = case
    transfers = plan_transfers(held, start, stop)
    assert applied(transfers, held, stop - start) == list(range(start, stop))


@given(overlapping_cases)
def test_an_element_that_several_hold_is_moved_once(case):
    held, (start, stop) = case
    transfers = plan_transfers(held, start, stop)
    assert applied(transfers, held, stop - start) == list(range(start, stop))


@given(overlapping_cases)
def test_transfers_stand_in_order_and_are_not_empty(case):
    held, (start, stop) = case
    at = 0
    for move in plan_transfers(held, start, stop):
        assert move.numel > 0
        assert move.target_start == at
        at += move.numel
    assert at == stop - start


@given(overlapping_cases)
def test_an_element_comes_from_the_holder_that_begins_first(case):
    held, (start, stop) = case
    for move in plan_transfers(held, start, stop):
        for position in range(move.target_start, move.target_start + move.numel):
            element = start + position
            holders = [p for p in held if p.start <= element < p.stop]
            first = min(holders, key=lambda piece: (piece.start, piece.source))
            assert move.source == first.source


@given(overlapping_cases)
def test_no_source_is_asked_twice(case):
    held, (start, stop) = case
    sources = [move.source for move in plan_transfers(held, start, stop)]
    assert len(sources) == len(set(sources))


@given(overlapping_cases, st.randoms(use_true_random=False))
def test_the_order_of_the_held_ranges_does_not_matter(case, random):
    held, (start, stop) = case
    shuffled = random.sample(held, len(held))
    assert plan_transfers(shuffled, start, stop) == plan_transfers(held, start, stop)


@given(holey_cases)
def test_an_empty_range_needs_no_transfers_whoever_holds_what(case):
    held, (start, _) = case
    assert plan_transfers(held, start, start) == []


@given(holey_cases)
def test_elements_that_nobody_holds_are_named(case):
    """The range that the message names begins with the first missing element, and holds missing ones only."""
    held, (start, stop) = case
    missing = missing_of(held, start, stop)
    assume(missing)
    with pytest.raises(ValueError, match="held by nobody") as raised:
        plan_transfers(held, start, stop)
    [ends] = re.findall(r"\[(\d+), (\d+)\)", str(raised.value))
    named = list(range(*map(int, ends)))
    assert named
    assert named == missing[: len(named)]


def test_nobody_holds_anything_of_what_is_needed():
    with pytest.raises(ValueError, match=re.escape("elements [3, 5) are held by nobody")):
        plan_transfers([], 3, 5)


@given(
    st.integers(0, MAX_NUMEL).flatmap(lambda numel: st.tuples(st.just(numel), *[cuts(numel)] * 2))
)
def test_resharding_between_any_two_cuts_moves_every_element_once(case):
    numel, held, needed = case
    moved = []
    for part in needed:
        transfers = plan_transfers(held, part.start, part.stop)
        brought = applied(transfers, held, part.stop - part.start)
        assert brought == list(range(part.start, part.stop))
        moved += brought
    assert sorted(moved) == list(range(numel))


@given(st.integers(0, MAX_NUMEL), st.integers(1, 6), st.integers(1, 6))
def test_resharding_between_equal_parts_takes_fewer_transfers_than_there_are_parts(numel, w, v):
    """Each transfer ends where a part of either cut does."""

    def cut(num_parts):
        ends = [numel * n // num_parts for n in range(num_parts + 1)]
        return [Range(n, *pair) for n, pair in enumerate(pairwise(ends))]

    plans = [plan_transfers(cut(w), part.start, part.stop) for part in cut(v)]
    assert sum(map(len, plans)) <= w + v - 1
