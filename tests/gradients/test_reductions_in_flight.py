"""Reductions in flight: how many there are, that each is finished once, and what is left of those that are dropped."""

import pytest
import torch

from tests.gradients.reducing import FULL, SHAPES, CountingGroup, Rank, gradient_of

NBYTES = [4 * torch.Size(SHAPES[index]).numel() for index in FULL]


def lone_buckets(group, **options):
    """Each parameter in a bucket of its own, of whole multiples of 8 bytes, launched in descending order."""
    return Rank(group, granularity="element", bucket_nbytes=1, **options)


# --- bound ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["backward", "step"])
@pytest.mark.parametrize("in_flight_nbytes", [100, 130, 2**20])
def test_bytes_in_flight_are_bounded(where, in_flight_nbytes):
    group = CountingGroup()
    rank = lone_buckets(group, in_flight_nbytes=in_flight_nbytes)
    assert max(NBYTES) <= 100 < sum(NBYTES)
    if where == "backward":
        rank.backward()
    else:
        rank.finalize_all()
    assert 0 < group.most_nbytes <= in_flight_nbytes


def test_all_buckets_are_in_flight_where_the_bound_allows():
    group = CountingGroup()
    lone_buckets(group).backward()
    assert (group.deepest, group.awaited) == (len(FULL), [])


def test_a_bucket_above_the_bound_is_in_flight_alone():
    group = CountingGroup()
    rank = lone_buckets(group, in_flight_nbytes=1)
    rank.backward()
    assert (group.deepest, group.num_launched) == (1, len(FULL))


def test_the_oldest_is_finished_first():
    group = CountingGroup()
    rank = lone_buckets(group, in_flight_nbytes=1)
    rank.backward()
    rank.reducer.drain()
    assert group.awaited == [0, 1, 2, 3, 4]


# --- waiting --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(5))
def test_completing_a_bucket_waits_for_it_and_for_older_ones_only(number):
    group = CountingGroup()
    rank = lone_buckets(group)
    rank.backward()
    rank.reducer.complete(number)
    assert group.awaited == list(range(number + 1))


def test_completing_a_bucket_waits_for_all_its_reductions():
    group = CountingGroup()
    rank = lone_buckets(group)
    for round_number in range(2):
        rank.backward(number=round_number)
    rank.reducer.complete(0)
    assert group.awaited == [0, 1, 2, 3, 4, 5]


def test_completing_all_twice_waits_once():
    group = CountingGroup()
    rank = lone_buckets(group)
    rank.backward()
    rank.reducer.complete_all()
    rank.reducer.complete_all()
    assert group.awaited == [0, 1, 2, 3, 4]


def test_memory_is_held_until_a_reduction_is_finished():
    group = CountingGroup()
    rank = Rank(group, granularity="element")
    rank.backward()
    held = rank.pool.num_out
    rank.reducer.drain()
    assert (held, rank.pool.num_out) == (2, 0)  # what travels, and scratch


# --- exceptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", range(5))
def test_after_a_wait_that_raised_everything_in_flight_was_finished_once(bad):
    group = CountingGroup(bad_waits=[bad])
    rank = lone_buckets(group)
    rank.backward()
    with pytest.raises(RuntimeError, match=f"wait {bad}"):
        rank.reducer.drain()
    rank.reducer.drain()
    assert sorted(group.awaited) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("granularity", ["parameter", "element"])
def test_memory_is_given_back_after_a_wait_that_raised(granularity):
    group = CountingGroup(bad_waits=[0])
    rank = Rank(group, granularity=granularity)
    rank.backward()
    with pytest.raises(RuntimeError, match="wait 0"):
        rank.reducer.drain()
    assert rank.pool.num_out == 0
    assert rank.pool.nbytes > 0


def test_the_first_of_several_exceptions_is_raised():
    rank = lone_buckets(CountingGroup(bad_waits=[1, 2, 4]))
    rank.backward()
    with pytest.raises(RuntimeError, match="wait 1"):
        rank.reducer.drain()


def test_a_wait_that_raises_inside_a_backward_keeps_the_next_launch_from_being_made():
    group = CountingGroup(bad_waits=[0])
    rank = lone_buckets(group, in_flight_nbytes=1)
    with pytest.raises(RuntimeError, match="wait 0"):
        rank.backward()
    assert (group.num_launched, group.awaited) == (1, [0])


def test_memory_is_given_back_after_a_launch_that_raised():
    group = CountingGroup(bad_launches=[0])
    rank = Rank(group, granularity="element")
    with pytest.raises(RuntimeError, match="launch 0"):
        rank.backward()
    assert rank.pool.num_out == 0


# --- dropping -------------------------------------------------------------------------------------


def reduced(group):
    rank = lone_buckets(group)
    rank.backward()
    return rank


def test_forgetting_waits_for_what_is_in_flight():
    group = CountingGroup()
    reduced(group).reducer.forget()
    assert group.awaited == [0, 1, 2, 3, 4]


def test_forgetting_counts_as_one_drop_however_much_was_reduced():
    rank = reduced(CountingGroup())
    rank.backward(number=1)
    rank.reducer.forget()
    assert rank.reducer.num_dropped == 1


def test_forgetting_nothing_is_no_drop():
    rank = lone_buckets(CountingGroup())
    rank.reducer.forget()
    rank.reducer.forget()
    assert rank.reducer.num_dropped == 0


def test_what_was_forgotten_is_not_added_to(run_threads):
    def serve(group):
        rank = lone_buckets(group)
        rank.backward()
        rank.reducer.forget()
        rank.backward([0], number=1)
        rank.finalize()
        return {i: any(values) for i, (_, values) in rank.averages.items()}

    for found in run_threads(2, serve).results:
        assert [i for i, is_nonzero in found.items() if is_nonzero] == [0]


def test_dropping_one_parameter_zeroes_what_this_rank_holds_of_it(run_threads):
    def serve(group):
        rank = Rank(group, granularity="element")
        rank.backward()
        owned = [part.param for part in rank.parts]
        bucket = rank.buckets[rank.bucket_of[3]]
        rank.reducer.drop(3, bucket.reduced(3, is_whole=False) if 3 in owned else None)
        used = rank.finalize()
        return {i: any(values) for i, (_, values) in rank.averages.items()}, used

    run = run_threads(2, serve)
    assert run.texts == ["", ""]
    for found, used in run.results:
        assert [i for i, is_nonzero in sorted(found.items()) if not is_nonzero] in ([], [3])
        assert used == [True, True, True, False, True, False]


def test_a_parameter_is_dropped_once_its_reduction_is_done():
    group = CountingGroup()
    rank = reduced(group)
    rank.reducer.drop(3, None)
    assert (group.awaited, rank.reducer.num_dropped) == ([0, 1, 2, 3, 4], 1)


def test_a_parameter_dropped_on_one_rank_only_stops_every_rank(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward()
        rank.reducer.complete_all()
        if group.rank == 0:
            rank.reducer.drop(3, None)
        rank.finalize()

    run = run_threads(2, serve)
    assert run.texts[0] == run.texts[1]
    assert run.texts[0].startswith(
        "RankMismatchError: gradients that had been reduced were dropped 0 times on rank 1 and 1 times on rank 0"
    )


def test_what_was_dropped_can_be_reduced_anew(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward()
        owned = rank.averages
        bucket = rank.buckets[rank.bucket_of[0]]
        rank.reducer.drop(0, bucket.reduced(0, is_whole=True) if 0 in owned else None)
        rank.finalize({0: gradient_of(0, 0)})
        return [torch.tensor(values) for i, (_, values) in rank.averages.items() if i == 0]

    found = [values for result in run_threads(2, serve).results for values in result]
    assert [torch.equal(values, gradient_of(0, 0)) for values in found] == [True]
