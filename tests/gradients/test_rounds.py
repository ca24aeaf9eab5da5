"""Rounds of reductions: when buckets are launched, in which order, and how ranks catch up with each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.gradients.reducing import (
    DESCENDING,
    FULL,
    SHAPES,
    CountingGroup,
    Rank,
    average,
    collected,
    gradient_of,
)


def lone_buckets(group, **options):
    """Each parameter in a bucket of its own, launched in descending order."""
    rank = Rank(group, granularity="element", bucket_nbytes=1, **options)
    assert [bucket.plan.params for bucket in rank.buckets] == [(p,) for p in DESCENDING]
    return rank


def launched(group):
    """What a rank launched in rounds: the numels of the parts of each bucket."""
    return [what for kind, what in group.launches if kind == "reduce_scatter"]


# --- order ----------------------------------------------------------------------------------------


@given(
    st.lists(st.permutations(FULL), min_size=2, max_size=3),
    st.sampled_from(["parameter", "element"]),
    st.sampled_from([1, 64, 2**20]),
)
def test_every_rank_launches_the_same_in_the_same_order_whatever_arrives_first(
    run_threads, orders, granularity, bucket_nbytes
):
    def serve(group):
        rank = Rank(group, granularity=granularity, bucket_nbytes=bucket_nbytes)
        rank.backward(orders[group.rank])
        rank.finalize()

    run = run_threads(len(orders), serve)
    assert run.texts == [""] * len(orders)
    first = run.world.launches_by_rank[0]
    assert run.world.launches_by_rank == [first] * len(orders)


@given(
    st.lists(st.lists(st.sampled_from(FULL), unique=True), min_size=2, max_size=3),
    st.lists(st.sets(st.sampled_from(FULL)), min_size=3, max_size=3),
)
def test_every_rank_launches_the_same_whatever_does_not_arrive(run_threads, orders, left):
    def serve(group):
        rank = Rank(group, bucket_nbytes=1)
        rank.backward(orders[group.rank])
        rank.finalize({i: gradient_of(group.rank, i) for i in left[group.rank]})

    run = run_threads(len(orders), serve)
    assert (run.texts, run.num_left_over) == ([""] * len(orders), 0)
    assert run.world.launches_by_rank == [run.world.launches_by_rank[0]] * len(orders)


def test_a_bucket_is_launched_once_it_is_complete_and_all_before_it_are():
    group = CountingGroup()
    rank = lone_buckets(group)
    rank.reducer.open()
    counts = []
    for index in (3, 4, 0, 1, 2):
        rank.arrive(index)
        counts.append(group.num_launched)
    assert counts == [0, 2, 2, 2, 5]


def test_the_end_of_a_round_launches_what_is_left():
    group = CountingGroup()
    rank = lone_buckets(group)
    rank.backward([3])
    assert group.num_launched == 5


def test_a_round_returns_the_parameters_it_has_reduced():
    rank = lone_buckets(CountingGroup())
    rank.reducer.open()
    rank.arrive(3)
    assert rank.reducer.close(lambda param: None) == list(DESCENDING)


def test_gradients_from_before_are_asked_for_where_none_has_arrived():
    rank = lone_buckets(CountingGroup())
    asked = []
    rank.reducer.open()
    rank.arrive(3)
    rank.reducer.close(lambda param: asked.append(param))
    assert asked == [4, 2, 1, 0]


def test_gradients_from_before_are_reduced_with_the_round(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.reducer.open()
        rank.reducer.close(lambda param: gradient_of(group.rank, param))
        return rank.finalize(), rank.averages

    run = run_threads(2, serve)
    found = collected([averages for _, averages in run.results])
    assert found == {i: average(2, i, [(), ()]) for i in FULL}
    assert run.results[0][0] == [True] * 5 + [False]


def test_a_gradient_that_arrives_after_its_bucket_was_launched_is_not_taken():
    rank = lone_buckets(CountingGroup())
    rank.reducer.open()
    assert [rank.arrive(4), rank.arrive(4)] == [True, False]


def test_a_gradient_that_arrives_twice_before_its_bucket_is_launched_is_added_up(run_threads):
    def serve(group):
        rank = lone_buckets(group)
        rank.backward([0, 0, 4, 3, 2, 1])
        rank.finalize()
        return rank.averages

    found = collected(run_threads(2, serve).results)[0]
    doubled = [gradient_of(rank, 0) + gradient_of(rank, 0) for rank in range(2)]
    assert found == ((doubled[0] + doubled[1]) * 0.5).tolist()


def test_whoever_listens_is_told_of_every_launch_of_a_round_and_of_no_other():
    rank = lone_buckets(CountingGroup())
    told = []
    rank.backward([3, 4], launched=told.append)
    rank.finalize_all()
    assert told == [0, 1, 2, 3, 4]


def test_a_parameter_counts_as_present_from_its_arrival_to_the_next_step():
    rank = lone_buckets(CountingGroup())
    rank.reducer.open()
    rank.arrive(3)
    seen = [rank.reducer.is_present(index) for index in FULL]
    rank.reducer.close(lambda param: None)
    rank.reducer.forget()
    assert (seen, rank.reducer.is_present(3)) == ([False, False, False, True, False], False)


# --- frozen parameters ----------------------------------------------------------------------------


def test_frozen_parameters_are_not_waited_for():
    group = CountingGroup()
    rank = Rank(group, granularity="element", frozen=[1, 2])
    rank.reducer.open()
    counts = []
    for index in (4, 3, 0):
        rank.arrive(index)
        counts.append(group.num_launched)
    assert counts == [0, 0, 1]


def test_buckets_of_frozen_parameters_only_are_not_reduced():
    group = CountingGroup()
    rank = lone_buckets(group, frozen=[1, 4])
    rank.backward([0, 2, 3])
    assert group.num_launched == 3


def test_a_parameter_that_is_trained_later_is_reduced_at_the_step(run_threads):
    def serve(group):
        rank = lone_buckets(group, frozen=[1])
        rank.params[1].requires_grad_()
        left = rank.backward()
        rank.finalize({i: gradient_of(group.rank, i) for i in left})
        return left, rank.averages

    run = run_threads(2, serve)
    assert [left for left, _ in run.results] == [[1], [1]]
    found = collected([averages for _, averages in run.results])
    assert found == {i: average(2, i, [(), ()]) for i in FULL}


# --- sleep ----------------------------------------------------------------------------------------


def test_buckets_that_nobody_had_a_gradient_for_are_not_reduced_in_the_next_round(run_threads):
    def serve(group):
        rank = lone_buckets(group)
        rank.backward([0, 3])
        rank.finalize()
        rank.reducer.fall_asleep()
        rank.reducer.forget()
        before = len(launched(group))
        rank.backward([0, 3], number=1)
        return len(launched(group)) - before

    assert run_threads(2, serve).results == [2, 2]


def test_a_bucket_with_one_used_parameter_stays_awake(run_threads):
    def serve(group):
        rank = Rank(group, granularity="element")
        rank.backward([2] if group.rank else [])
        rank.finalize()
        rank.reducer.fall_asleep()
        rank.reducer.forget()
        return rank.backward(number=1)

    assert run_threads(2, serve).results == [[], []]


def asleep(group, *indices):
    """A rank whose buckets sleep but for those of some parameters."""
    rank = lone_buckets(group)
    rank.reducer.finalize([index in indices for index in range(len(SHAPES))])
    rank.reducer.fall_asleep()
    return rank


def test_what_arrives_for_a_bucket_that_sleeps_is_not_taken():
    rank = asleep(CountingGroup(), 0, 3)
    assert rank.backward() == [4, 2, 1]


def test_what_arrived_for_a_bucket_that_sleeps_is_reduced_at_the_step(run_threads):
    def serve(group):
        rank = asleep(group, 0, 3)
        left = rank.backward() if group.rank == 0 else rank.backward([0, 3])
        rank.finalize({i: gradient_of(group.rank, i) for i in left})
        return rank.averages

    run = run_threads(2, serve)
    without = [(), (1, 2, 4)]
    assert run.texts == ["", ""]
    assert collected(run.results) == {i: average(2, i, without) for i in FULL}


def test_a_bucket_wakes_once_somebody_has_had_a_gradient_for_it(run_threads):
    def serve(group):
        rank = asleep(group, 0)
        left = rank.backward([0, 3] if group.rank else [0])
        rank.finalize({i: gradient_of(group.rank, i) for i in left})
        rank.reducer.fall_asleep()
        rank.reducer.forget()
        return rank.backward([3, 0], number=1)

    assert run_threads(2, serve).results == [[], []]


# --- ranks that took part in different numbers of rounds ------------------------------------------


@pytest.mark.parametrize("granularity", ["parameter", "element"])
@pytest.mark.parametrize("num_rounds", [(2, 1), (0, 1), (0, 3, 1), (1, 0, 0)], ids=str)
def test_ranks_catch_up_with_the_one_that_took_part_in_most_rounds(
    run_threads, granularity, num_rounds
):
    world_size = len(num_rounds)

    def serve(group):
        rank = Rank(group, granularity=granularity, bucket_nbytes=64)
        for number in range(num_rounds[group.rank]):
            rank.backward(number=number)
        used = rank.finalize()
        return rank.averages, used, rank.reducer.num_rounds

    run = run_threads(world_size, serve)
    assert (run.texts, run.num_left_over) == ([""] * world_size, 0)
    total = None
    for number in range(max(num_rounds)):
        without = [() if number < count else FULL for count in num_rounds]
        averages = {i: torch.tensor(average(world_size, i, without, number)) for i in FULL}
        total = averages if total is None else {i: total[i] + averages[i] for i in FULL}
    assert collected([averages for averages, _, _ in run.results]) == {
        i: values.tolist() for i, values in total.items()
    }
    assert [(used, rounds) for _, used, rounds in run.results] == [
        ([True] * 5 + [False], 0)
    ] * world_size


def test_ranks_that_caught_up_launch_the_same_in_the_same_order(run_threads):
    def serve(group):
        rank = Rank(group, bucket_nbytes=64)
        for number in range(group.rank):
            rank.backward(number=number)
        rank.finalize_all(without=() if group.rank else FULL)
        return launched(group)

    run = run_threads(3, serve)
    assert run.results == [run.results[0]] * 3


# --- drops ----------------------------------------------------------------------------------------


def dropping(*ranks):
    """A function that reduces, forgets on some ranks, and finalizes; returns what is used."""

    def serve(group):
        rank = Rank(group)
        rank.backward()
        rank.reducer.complete_all()
        if group.rank in ranks:
            rank.reducer.forget()
        return rank.finalize()

    return serve


def test_gradients_dropped_on_one_rank_only_stop_every_rank(run_threads):
    run = run_threads(3, dropping(1))
    assert (
        run.texts
        == [
            "RankMismatchError: gradients that had been reduced were dropped 1 times on rank 1 and 0 times on rank 0 since "
            "the last step, so those of this step are not complete; call zero_grad() on every rank, and run backward again"
        ]
        * 3
    )


def test_gradients_dropped_on_every_rank_are_fine(run_threads):
    run = run_threads(2, dropping(0, 1))
    assert (run.texts, run.results) == (["", ""], [[False] * 6] * 2)


def test_after_ranks_dropped_differently_the_next_step_starts_anew(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward()
        rank.reducer.complete_all()
        if group.rank:
            rank.reducer.forget()
        with pytest.raises(ValueError, match="were dropped"):
            rank.finalize()
        rank.reducer.forget()
        rank.reducer.num_dropped = 0
        rank.backward(number=1)
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert run.texts == ["", ""]
    assert collected(run.results) == {i: average(2, i, [(), ()], 1) for i in FULL}
