"""Gradients between autograd and the reducer, with an autograd that does as it is told."""

import gc

import pytest
import torch

from shardopt.collectives import LoneRank
from tests.gradients.feeding import Rank, gradient, values_of

# --- inside backward ------------------------------------------------------------------------------


def test_a_gradient_is_taken_as_soon_as_it_is_accumulated():
    rank = Rank(LoneRank())
    seen = []
    rank.backward({1: 3.0, 0: 1.0}, between=lambda: seen.append([p.grad for p in rank.params[:2]]))
    assert seen == [[None, None], [None, None]]


def test_after_backward_every_gradient_is_a_placeholder():
    rank = Rank(LoneRank())
    rank.backward({0: 1.0})
    assert rank.shown == [True, True, True]


def test_stand_ins_are_made_once():
    rank = Rank(LoneRank())
    kept = []
    for _ in range(2):
        rank.backward({0: 1.0})
        kept.append(rank.params[0].grad)
    assert kept[0] is kept[1]


def test_a_frozen_parameter_is_not_watched_and_shows_nothing():
    rank = Rank(LoneRank(), frozen=[1])
    rank.backward({0: 1.0})
    assert (sorted(rank.autograd.watched), rank.params[1].grad) == ([0, 2], None)


def test_every_rank_has_the_average_of_what_it_owns(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({2: 1.0 + group.rank, 1: 5.0, 0: -1.0 * group.rank})
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert run.texts == ["", ""]
    assert values_of(run) == {0: {-0.5}, 1: {5.0}, 2: {1.5}}


def test_the_next_backward_adds_up(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({0: 1.0, 1: 2.0})
        rank.backward({0: 4.0, 2: 8.0})
        rank.finalize()
        return rank.averages

    assert values_of(run_threads(2, serve)) == {0: {5.0}, 1: {2.0}, 2: {8.0}}


def test_before_autograd_accumulates_the_stand_in_makes_room():
    rank = Rank(LoneRank())
    rank.backward({0: 1.0})
    rank.autograd.watched[0].before()
    assert rank.params[0].grad is None


def test_a_sparse_gradient_is_left_where_it_is():
    rank = Rank(LoneRank())
    sparse = torch.ones(4).to_sparse()
    rank.params[0].grad = sparse
    rank.autograd.watched[0].after()
    assert (rank.params[0].grad is sparse, rank.reducer.is_open) == (True, False)


def test_gradients_of_a_bucket_that_sleeps_wait_behind_the_placeholder(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.step({0: 1.0})
        before = len(group.launches)
        rank.backward({1: 3.0 + group.rank})
        kinds = {kind for kind, _ in group.launches[before:]}
        is_shown = rank.shown[1]
        rank.finalize()
        return is_shown, len(kinds), rank.averages.get(1, set())

    run = run_threads(2, serve)
    assert [result[:2] for result in run.results] == [(True, 1)] * 2
    assert set().union(*(average for _, _, average in run.results)) == {3.5}


# --- a backward that fails ------------------------------------------------------------------------


def test_the_round_of_a_backward_that_failed_stays_open_until_it_is_needed():
    rank = Rank(LoneRank())
    rank.backward({1: 3.0}, fails=True)
    assert rank.reducer.is_open


def test_the_round_of_a_backward_that_failed_is_closed_by_the_next_one(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({2: 1.0}, fails=True)
        rank.backward({2: 2.0, 1: 2.0, 0: 2.0})
        is_open, num_rounds = rank.reducer.is_open, rank.reducer.num_rounds
        rank.finalize()
        return rank.averages, (is_open, num_rounds)

    run = run_threads(2, serve)
    assert (run.texts, run.num_left_over) == (["", ""], 0)
    assert [rounds for _, rounds in run.results] == [(False, 2)] * 2
    assert values_of(run, lambda result: result[0]) == {0: {2.0}, 1: {2.0}, 2: {3.0}}


def test_the_round_of_a_backward_that_failed_is_closed_by_the_step(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({2: 1.0}, fails=True)
        rank.finalize()
        return rank.averages, rank.reducer.used

    run = run_threads(2, serve)
    assert [used for _, used in run.results] == [[False, False, True, False]] * 2


def test_a_backward_that_failed_on_one_rank_leaves_the_ranks_in_step(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({2: 1.0, 1: 1.0}, fails=group.rank == 1)
        rank.backward({2: 2.0, 1: 2.0, 0: 2.0})
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert (run.texts, run.num_left_over) == (["", ""], 0)
    assert values_of(run) == {0: {2.0}, 1: {3.0}, 2: {3.0}}


def test_zeroing_gradients_closes_the_round_of_a_backward_that_failed(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({2: 1.0}, fails=True)
        rank.forget(after_step=False)
        rank.backward({2: 2.0, 1: 2.0, 0: 2.0})
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert run.texts == ["", ""]
    assert values_of(run) == {0: {2.0}, 1: {2.0}, 2: {2.0}}


# --- no_sync --------------------------------------------------------------------------------------


def test_nothing_is_reduced_within_a_pause(run_threads):
    def serve(group):
        rank = Rank(group)
        with rank.hooks.pause():
            rank.backward({0: 1.0, 1: 1.0, 2: 1.0})
        return group.launches

    assert run_threads(2, serve).results == [[], []]


def test_gradients_of_a_pause_wait_behind_the_placeholder():
    rank = Rank(LoneRank())
    with rank.hooks.pause():
        rank.backward({0: 1.0})
    assert rank.shown == [True, False, False]


@pytest.mark.parametrize("num_paused", [1, 3])
def test_gradients_of_a_pause_are_reduced_with_the_next_backward(run_threads, num_paused):
    def serve(group):
        rank = Rank(group)
        with rank.hooks.pause():
            for _ in range(num_paused):
                rank.backward({0: 1.0 + group.rank, 1: 4.0})
        rank.backward({2: 1.0, 1: 1.0, 0: 1.0})
        rank.finalize()
        return rank.averages, sum(kind == "reduce_scatter" for kind, _ in group.launches)

    run = run_threads(2, serve)
    assert values_of(run, lambda result: result[0]) == {
        0: {1.5 * num_paused + 1.0},
        1: {4.0 * num_paused + 1.0},
        2: {1.0},
    }
    assert [count for _, count in run.results] == [3, 3]


def test_gradients_of_a_pause_that_the_next_backward_does_not_reach_go_with_it(run_threads):
    def serve(group):
        rank = Rank(group)
        with rank.hooks.pause():
            rank.backward({0: 3.0, 1: 4.0})
        rank.backward({2: 1.0})
        num_launched = sum(kind == "reduce_scatter" for kind, _ in group.launches)
        rank.finalize()
        return rank.averages, num_launched

    run = run_threads(2, serve)
    assert values_of(run, lambda result: result[0]) == {0: {3.0}, 1: {4.0}, 2: {1.0}}
    assert [count for _, count in run.results] == [3, 3]


def test_gradients_of_a_pause_are_reduced_at_the_step(run_threads):
    def serve(group):
        rank = Rank(group)
        with rank.hooks.pause():
            rank.backward({0: 1.0 + group.rank})
        rank.finalize()
        return rank.averages

    assert values_of(run_threads(2, serve))[0] == {1.5}


def test_a_pause_on_one_rank_only_changes_no_average(run_threads):
    def serve(group):
        rank = Rank(group)
        if group.rank:
            with rank.hooks.pause():
                rank.backward({0: 2.0, 1: 2.0, 2: 2.0})
        else:
            rank.backward({0: 4.0, 1: 4.0, 2: 4.0})
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert (run.texts, run.num_left_over) == (["", ""], 0)
    assert values_of(run) == {0: {3.0}, 1: {3.0}, 2: {3.0}}


def test_a_pause_ends_where_an_exception_leaves_it():
    rank = Rank(LoneRank())
    with pytest.raises(ValueError, match="odd"), rank.hooks.pause():
        raise ValueError("odd")
    rank.backward({0: 1.0})
    assert rank.reducer.num_rounds == 1


def test_pauses_can_be_nested():
    rank = Rank(LoneRank())
    with rank.hooks.pause():
        with rank.hooks.pause():
            pass
        rank.backward({0: 1.0})
    assert rank.reducer.num_rounds == 0


# --- placeholders that vanish ---------------------------------------------------------------------


def test_a_gradient_whose_stand_in_was_removed_is_dropped(run_threads):
    """By ``module.zero_grad()``, say, on every rank."""

    def serve(group):
        rank = Rank(group)
        rank.backward({0: 9.0, 1: 9.0, 2: 9.0})
        for param in rank.params[:2]:
            param.grad = None
        rank.backward({0: 1.0, 2: 1.0})
        rank.finalize()
        return rank.averages, rank.reducer.used

    run = run_threads(2, serve)
    assert run.texts == ["", ""]
    assert values_of(run, lambda result: result[0]) == {0: {1.0}, 1: {0.0}, 2: {10.0}}
    assert [used for _, used in run.results] == [[True, False, True, False]] * 2


def test_a_waiting_gradient_whose_stand_in_was_removed_is_dropped_on_this_rank_alone(run_threads):
    def serve(group):
        rank = Rank(group)
        with rank.hooks.pause():
            rank.backward({0: 4.0})
        if group.rank:
            rank.params[0].grad = None
        rank.backward({0: 1.0})
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert run.texts == ["", ""]
    assert values_of(run)[0] == {3.0}


def test_a_reduced_gradient_whose_stand_in_was_removed_on_one_rank_stops_every_rank(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({0: 4.0})
        if group.rank:
            rank.params[0].grad = None
        rank.finalize()

    run = run_threads(2, serve)
    assert [text.partition(":")[0] for text in run.texts] == ["RankMismatchError"] * 2
    assert "were dropped 1 times on rank 1 and 0 times on rank 0" in run.texts[0]


def test_a_gradient_assigned_by_hand_takes_the_place_of_what_was_reduced(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({0: 4.0, 1: 2.0})
        rank.params[0].grad = gradient(0, 10.0 + 2 * group.rank)
        rank.finalize()
        return rank.averages

    run = run_threads(2, serve)
    assert run.texts == ["", ""]
    assert values_of(run) == {0: {11.0}, 1: {2.0}, 2: {0.0}}


def test_a_gradient_assigned_by_hand_is_taken_as_the_stand_in_shows_afterwards():
    rank = Rank(LoneRank())
    rank.params[0].grad = gradient(0, 3.0)
    rank.finalize()
    assert (rank.shown[0], rank.averages[0]) == (True, {3.0})


# --- watching -------------------------------------------------------------------------------------


def test_a_parameter_is_watched_once():
    rank = Rank(LoneRank())
    rank.hooks.watch()
    assert rank.autograd.num_watched == 3


def test_an_empty_parameter_is_not_watched():
    assert 3 not in Rank(LoneRank()).autograd.watched


def test_a_parameter_that_is_trained_later_is_watched_from_the_next_step_on():
    rank = Rank(LoneRank(), frozen=[1])
    rank.params[1].requires_grad_()
    rank.forget(after_step=True)
    assert sorted(rank.autograd.watched) == [0, 1, 2]


def test_a_parameter_outlives_what_watches_it():
    rank = Rank(LoneRank())
    watched, param = rank.autograd.watched[0], rank.params[0]
    rank.hooks = None
    gc.collect()
    param.grad = gradient(0, 1.0)
    watched.before()
    watched.after()
    assert param.grad is not None
