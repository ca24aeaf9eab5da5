"""Averages of gradients, however they come to the reducer: their values, and what travels for them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives import LoneRank
from shardopt.gradients import GradientReport
from tests.gradients.reducing import EMPTY, FULL, SHAPES, Rank, average, collected

granularities = pytest.mark.parametrize("granularity", ["parameter", "element"])


def expected_averages(world_size, without_by_rank=None, *, number=0):
    without = without_by_rank or [()] * world_size
    found = {i: average(world_size, i, without, number) for i in FULL}
    return {i: values for i, values in found.items() if values is not None}


# --- values ---------------------------------------------------------------------------------------


@granularities
@pytest.mark.parametrize("bucket_nbytes", [1, 64, 2**20])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("where", ["backward", "step"])
def test_every_rank_has_the_bits_of_the_average_of_what_it_owns(
    run_threads, granularity, bucket_nbytes, world_size, where
):
    def serve(group):
        rank = Rank(group, granularity=granularity, bucket_nbytes=bucket_nbytes)
        if where == "backward":
            rank.backward()
            rank.finalize()
        else:
            rank.finalize_all()
        return rank.averages

    run = run_threads(world_size, serve)
    assert run.texts == [""] * world_size
    assert collected(run.results) == expected_averages(world_size)


@given(
    st.lists(st.sets(st.sampled_from(FULL)), min_size=2, max_size=3),
    st.sampled_from(["parameter", "element"]),
    st.sampled_from([1, 64, 2**20]),
    st.sampled_from(["backward", "step"]),
)
def test_missing_gradients_count_as_zeros(run_threads, without, granularity, bucket_nbytes, where):
    def serve(group):
        rank = Rank(group, granularity=granularity, bucket_nbytes=bucket_nbytes)
        mine = without[group.rank]
        if where == "backward":
            rank.backward([index for index in FULL if index not in mine])
            used = rank.finalize()
        else:
            used = rank.finalize_all(without=mine)
        return rank.averages, used

    run = run_threads(len(without), serve)
    assert run.texts == [""] * len(without)
    expected = expected_averages(len(without), without)
    found = collected([averages for averages, _ in run.results])
    assert {i: found[i] for i in expected} == expected
    for _, used in run.results:
        assert [i for i in range(len(SHAPES)) if used[i]] == sorted(expected)


@granularities
@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_lone_rank_keeps_its_own_gradients(granularity, where):
    rank = Rank(LoneRank(), granularity=granularity)
    if where == "backward":
        rank.backward()
        rank.finalize()
    else:
        rank.finalize_all()
    assert collected([rank.averages]) == expected_averages(1)


@granularities
def test_a_second_step_holds_the_averages_of_its_own_gradients(run_threads, granularity):
    def serve(group):
        rank = Rank(group, granularity=granularity)
        rank.backward()
        rank.finalize()
        rank.reducer.forget()
        rank.backward(number=1)
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert collected(run.results) == expected_averages(2, number=1)


def added(*averages):
    """Sums of averages, taken one after the other, element by element."""
    total = {index: torch.tensor(values) for index, values in averages[0].items()}
    for more in averages[1:]:
        total = {index: values + torch.tensor(more[index]) for index, values in total.items()}
    return {index: values.tolist() for index, values in total.items()}


@granularities
@pytest.mark.parametrize("bucket_nbytes", [1, 2**20])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_averages_of_several_backwards_add_up(run_threads, granularity, bucket_nbytes, world_size):
    def serve(group):
        rank = Rank(group, granularity=granularity, bucket_nbytes=bucket_nbytes)
        for number in range(3):
            rank.backward(number=number)
        rank.finalize()
        return rank.averages

    run = run_threads(world_size, serve) if world_size > 1 else None
    results = [serve(LoneRank())] if run is None else run.results
    expected = added(*(expected_averages(world_size, number=n) for n in range(3)))
    assert collected(results) == expected


@granularities
def test_what_no_round_has_taken_is_added_to_what_rounds_have_reduced(run_threads, granularity):
    def serve(group):
        rank = Rank(group, granularity=granularity)
        rank.backward()
        rank.finalize_all(number=1)
        return rank.averages

    run = run_threads(2, serve)
    assert collected(run.results) == added(
        expected_averages(2, number=0), expected_averages(2, number=1)
    )


def test_gradients_can_be_summed_in_another_dtype_than_they_travel_in(run_threads):
    """In bfloat16 a sum of 2**8 + 1 is 2**8, so without float32 it would be lost."""

    def serve(group):
        rank = Rank(group, wire_dtype=torch.bfloat16, sum_dtype=torch.float32)
        for _ in range(2):
            rank.reducer.open()
            value = 512.0 if group.rank == 0 else 2.0
            rank.reducer.arrive(0, rank.bucket_of[0], torch.full((5,), value))
            rank.reducer.close(lambda param: None)
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert collected(run.results)[0] == [2 * (256.0 + 1.0)] * 5


def test_averages_over_a_grid_are_over_every_member(run_hybrid):
    """As if all of them were ranks of one group, but for the order of the sum."""

    def serve(grid):
        rank = Rank(grid)
        member = grid._column.rank * grid.world_size + grid.rank
        rank.reducer.open()
        for index in reversed(FULL):
            gradient = torch.full(SHAPES[index], 2.0**member)
            rank.reducer.arrive(index, rank.bucket_of[index], gradient)
        rank.reducer.close(lambda param: None)
        rank.finalize()
        return {index: set(values) for index, (_, values) in rank.averages.items()}

    run = run_hybrid(2, 2, serve)
    assert run.texts == [""] * 4
    assert all(values == {15 / 4} for found in run.results for values in found.values())


def test_averages_over_a_grid_add_up_over_backwards_that_are_completed_in_between(run_hybrid):
    """What all replicas hold after the first counts once in the second."""

    def serve(grid):
        rank = Rank(grid)
        for _ in range(2):
            rank.reducer.open()
            rank.reducer.arrive(0, rank.bucket_of[0], torch.full((5,), 1.0 + grid._column.rank))
            rank.reducer.close(lambda param: None)
            rank.finalize()
        return {tuple(values) for i, (_, values) in rank.averages.items() if i == 0}

    run = run_hybrid(2, 2, serve)
    assert set().union(*run.results) == {(3.0,) * 5}


# --- traffic --------------------------------------------------------------------------------------


@granularities
@pytest.mark.parametrize("where", ["backward", "step"])
def test_each_byte_of_a_gradient_leaves_a_rank_once(run_threads, granularity, where):
    def serve(group):
        rank = Rank(group, granularity=granularity)
        if where == "backward":
            rank.backward()
            rank.finalize()
        else:
            rank.finalize_all()
        return [bucket.plan for bucket in rank.buckets]

    run = run_threads(3, serve)
    for rank, plans in enumerate(run.results):
        sent = sum(message.numel for message in run.world.messages if message.src == rank)
        assert sent == sum(p.numel - p.sections[rank].numel for p in plans)
    assert run.num_left_over == 0


@granularities
def test_without_any_gradient_nothing_but_flags_travels(run_threads, granularity):
    def serve(group):
        return Rank(group, granularity=granularity).finalize()

    run = run_threads(2, serve)
    assert (run.results, run.world.messages) == ([[False] * len(SHAPES)] * 2, [])
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


def test_of_what_is_left_only_buckets_with_a_gradient_on_some_rank_travel(run_threads):
    """Of buckets of one parameter each, those of 1 (6 elements) and 4 (7 elements)."""
    without = [{0, 2, 3, 4}, {0, 1, 2, 3}]

    def serve(group):
        rank = Rank(group, bucket_nbytes=1)
        rank.finalize_all(without=without[group.rank])
        return [bucket.plan for bucket in rank.buckets]

    run = run_threads(2, serve)
    plans = run.results[0]
    wanted = [plan for plan in plans if {1, 4} & set(plan.params)]
    numels = [section.numel for plan in wanted for section in plan.sections]
    assert sum(message.numel for message in run.world.messages) == sum(numels)
    assert len(wanted) < len(plans)


@granularities
def test_a_round_costs_no_gather(run_threads, granularity):
    def serve(group):
        Rank(group, granularity=granularity).backward()
        return dict(group.world.num_gathers_by_rank[group.rank])

    assert run_threads(2, serve).results == [{"ints": 0, "object": 0}] * 2


def test_an_empty_parameter_is_used_where_any_rank_has_a_gradient_for_it(run_threads):
    def serve(group):
        gradients = {EMPTY: torch.zeros(0)} if group.rank else {}
        return Rank(group).finalize(gradients)

    run = run_threads(2, serve)
    assert run.results == [[False] * EMPTY + [True]] * 2
    assert run.world.messages == []


@granularities
def test_staging_memory_does_not_grow_from_step_to_step(run_threads, granularity):
    def serve(group):
        rank = Rank(group, granularity=granularity, bucket_nbytes=64)
        held = []
        for number in range(4):
            rank.backward(number=number)
            rank.finalize_all(number=number)
            rank.reducer.forget()
            held.append((rank.pool.nbytes, rank.pool.num_out))
        return held

    for held in run_threads(2, serve).results:
        assert held[1:] == [held[1]] * 3
        assert held[1][0] > 0 == held[1][1]


def report_of(reducer, is_late):
    return GradientReport(reducer.num_rounds, reducer.num_dropped, reducer.present, is_late).pack()


def test_reports_are_as_many_ints_whatever_they_say(run_threads):
    def serve(group):
        rank = Rank(group)
        lengths = {len(report_of(rank.reducer, [False] * len(SHAPES)))}
        rank.backward()
        lengths.add(len(report_of(rank.reducer, [True] * len(SHAPES))))
        rank.finalize_all()
        return lengths

    run = run_threads(2, serve)
    assert [len(lengths) for lengths in run.results] == [1, 1]
