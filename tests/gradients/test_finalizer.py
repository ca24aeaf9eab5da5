"""Gradients before a step: what ranks tell each other, what is asked of placeholders, and what is forgotten."""

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.errors import OverlapError
from tests.gradients.feeding import Rank, gradient, values_of

# --- settling -------------------------------------------------------------------------------------


def test_what_any_rank_had_a_gradient_for_is_used_on_all(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({group.rank: 1.0})
        rank.finalize()
        return rank.reducer.used, rank.shown

    run = run_threads(2, serve)
    assert run.results == [([True, True, False, False], [True, True, False])] * 2


def test_an_empty_parameter_is_used_where_it_has_a_gradient_and_shows_nothing():
    rank = Rank(LoneRank())
    rank.params[3].grad = torch.zeros(0)
    rank.finalize()
    assert (rank.reducer.used[3], rank.params[3].grad) == (True, None)


def test_a_parameter_that_no_rank_had_a_gradient_for_shows_none_after_all():
    rank = Rank(LoneRank())
    rank.backward({0: 1.0})
    shown = rank.shown
    rank.finalize()
    assert (shown, rank.shown) == ([True, True, True], [True, False, False])


def test_gradients_of_a_rank_without_inputs_are_consumed_and_do_not_count(run_threads):
    def serve(group):
        rank = Rank(group)
        for index in range(3):
            rank.params[index].grad = gradient(index, 4.0)
        rank.finalize(has_inputs=group.rank == 0)
        return rank.averages

    assert values_of(run_threads(2, serve)) == {0: {2.0}, 1: {2.0}, 2: {2.0}}


def test_without_an_autograd_to_watch_gradients_wait_for_the_step(run_threads):
    def serve(group):
        rank = Rank(group, has_autograd=False)
        rank.params[0].grad = gradient(0, 1.0 + group.rank)
        launched = list(group.launches)
        rank.finalize()
        return rank.averages, launched, [param.grad for param in rank.params]

    run = run_threads(2, serve)
    assert [result[1:] for result in run.results] == [([], [None] * 4)] * 2
    assert values_of(run, lambda result: result[0])[0] == {1.5}


def test_gradients_that_wait_can_be_changed_in_place(run_threads):
    def serve(group):
        rank = Rank(group)
        with rank.hooks.pause():
            rank.backward({0: 8.0})
        rank.params[1].grad = gradient(1, 4.0)
        for waiting in rank.finalizer.waiting():
            waiting.mul_(0.25)
        rank.finalize()
        return rank.averages

    assert values_of(run_threads(2, serve)) == {0: {2.0}, 1: {1.0}, 2: {0.0}}


# --- parts ----------------------------------------------------------------------------------------


def test_a_part_is_what_this_rank_holds_of_the_average_and_can_be_changed(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({0: 2.0, 1: 4.0, 2: 8.0})
        rank.finalizer.part(1).mul_(0.5)
        return rank.averages

    assert values_of(run_threads(2, serve)) == {0: {2.0}, 1: {2.0}, 2: {8.0}}


def test_a_rank_that_owns_nothing_of_a_parameter_has_no_part(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({0: 2.0})
        return rank.finalizer.part(0) is None

    assert run_threads(5, serve).results == [False] * 4 + [True]


def test_asking_for_parts_settles_once_and_not_again_before_the_next_backward(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({0: 2.0})
        counts = []
        for _ in range(2):
            rank.finalizer.part(0)
            rank.finalizer.part(1)
            counts.append(group.world.num_gathers_by_rank[group.rank]["ints"])
        rank.backward({0: 2.0})
        rank.finalizer.part(0)
        return [*counts, group.world.num_gathers_by_rank[group.rank]["ints"]]

    assert run_threads(2, serve).results == [[1, 1, 2]] * 2


def test_what_is_left_is_reduced_before_a_part_is_handed_out(run_threads):
    def serve(group):
        rank = Rank(group)
        with rank.hooks.pause():
            rank.backward({0: 2.0 + 2 * group.rank})
        return set(rank.finalizer.part(0).tolist())

    assert run_threads(2, serve).results == [{3.0}] * 2


def test_a_part_of_what_has_been_changed_is_what_the_step_uses(run_threads):
    """Finalizing at the step adds nothing to what was final before."""

    def serve(group):
        rank = Rank(group)
        rank.backward({0: 2.0, 1: 2.0, 2: 2.0})
        rank.finalizer.part(0).mul_(0.5)
        rank.finalize()
        return rank.averages

    assert values_of(run_threads(2, serve)) == {0: {1.0}, 1: {2.0}, 2: {2.0}}


# --- norms ----------------------------------------------------------------------------------------


def test_a_norm_is_that_of_its_parameter():
    rank = Rank(LoneRank())
    rank.backward({0: 1.0})
    assert [rank.finalizer.norm(index, 3.0).item() for index in range(3)] == [3.0, 6.0, 9.0]


def test_norms_of_one_kind_are_taken_once_together():
    rank = Rank(LoneRank())
    rank.backward({0: 1.0})
    for norm_type in (2.0, 2.0, 3.0, 2.0):
        for index in range(3):
            rank.finalizer.norm(index, norm_type)
    used = [True, False, False, False]
    assert rank.asked_norms == [(2.0, used), (3.0, used)]


@pytest.mark.parametrize(
    "change",
    [
        lambda rank: rank.backward({0: 1.0}),
        lambda rank: rank.finalizer.part(0),
        lambda rank: rank.forget(after_step=False),
    ],
    ids=["backward", "part handed out", "forgotten"],
)
def test_norms_are_taken_anew_after_gradients_may_have_changed(change):
    rank = Rank(LoneRank())
    rank.backward({0: 1.0})
    rank.finalizer.norm(0, 2.0)
    change(rank)
    rank.finalizer.norm(0, 2.0)
    assert len(rank.asked_norms) == 2


def test_an_inf_that_one_rank_found_is_found_by_all(run_threads):
    def serve(group):
        rank = Rank(group)
        found = torch.tensor([float(group.rank)])
        rank.finalizer.all_reduce_max(found)
        return found.item()

    assert run_threads(3, serve).results == [2.0] * 3


# --- moments at which gradients cannot be used ----------------------------------------------------


def test_gradients_cannot_be_used_while_their_backward_is_under_way():
    rank = Rank(LoneRank())
    errors = []

    def use():
        with pytest.raises(RuntimeError) as caught:
            rank.finalizer.complete()
        errors.append(str(caught.value))

    rank.backward({2: 1.0}, between=use)
    assert errors == [
        "gradients are sharded and still being reduced in this backward; use them after it"
    ]


def test_gradients_can_be_used_after_a_backward_that_failed():
    rank = Rank(LoneRank())
    rank.backward({2: 1.0}, fails=True)
    assert set(rank.finalizer.part(2).tolist()) == {1.0}


class Driver:
    """Writes down what it is told."""

    def __init__(self):
        self.told = []

    def opened(self):
        self.told.append("opened")

    def launched(self, number):
        self.told.append(number)

    def closed(self, finalizer):
        self.told.append(("closed", finalizer.reducer.is_open))


def test_a_driver_is_told_when_a_round_begins_launches_and_ends():
    driver = Driver()
    rank = Rank(LoneRank(), step_in_backward=driver)
    rank.backward({2: 1.0, 0: 1.0})
    assert driver.told == ["opened", 0, 1, 2, ("closed", False)]


def test_gradients_cannot_be_used_where_a_driver_has_used_them_in_backward():
    rank = Rank(LoneRank(), step_in_backward=Driver())
    rank.backward({2: 1.0})
    with pytest.raises(OverlapError, match="gradients were changed between backward and step"):
        rank.finalizer.norm(0, 2.0)


# --- ranks without inputs -------------------------------------------------------------------------


def in_join(group):
    return Rank(group, is_paused=lambda: True)


def test_while_ranks_may_have_no_inputs_nothing_is_reduced_in_backward():
    rank = in_join(LoneRank())
    rank.backward({0: 1.0})
    assert (rank.reducer.num_rounds, rank.shown) == (0, [True, False, False])


def test_while_ranks_may_have_no_inputs_a_part_is_this_ranks_own_gradient():
    rank = in_join(LoneRank())
    rank.backward({0: 3.0})
    assert (rank.finalizer.part(0).tolist(), rank.finalizer.part(1)) == ([3.0] * 4, None)


def test_while_ranks_may_have_no_inputs_no_norm_can_be_taken():
    rank = in_join(LoneRank())
    rank.backward({0: 3.0})
    with pytest.raises(RuntimeError) as caught:
        rank.finalizer.norm(0, 2.0)
    assert str(caught.value) == (
        "gradients that are sharded cannot be clipped within Join, since ranks without inputs take no part in it"
    )


def test_while_ranks_may_have_no_inputs_what_was_found_stays_on_its_rank():
    class Untouchable(LoneRank):
        def all_reduce(self, tensor, *, maximum=False):
            raise AssertionError("ranks without inputs take no part")

    in_join(Untouchable()).finalizer.all_reduce_max(torch.ones(1))


# --- forgetting -----------------------------------------------------------------------------------


def with_everything(group):
    """A rank with a reduced gradient, one that waits and one that was assigned by hand."""
    rank = Rank(group)
    rank.backward({0: 9.0})
    with rank.hooks.pause():
        rank.backward({1: 9.0})
    rank.params[2].grad = gradient(2, 9.0)
    return rank


@pytest.mark.parametrize("after_step", [False, True])
def test_all_gradients_are_forgotten(run_threads, after_step):
    def serve(group):
        rank = with_everything(group)
        rank.forget(after_step=after_step)
        gradients = [param.grad for param in rank.params]
        rank.backward({0: 1.0, 1: 1.0, 2: 1.0})
        rank.finalize()
        return rank.averages, gradients

    run = run_threads(2, serve)
    assert (run.texts, [gradients for _, gradients in run.results]) == (["", ""], [[None] * 4] * 2)
    assert values_of(run, lambda result: result[0]) == {0: {1.0}, 1: {1.0}, 2: {1.0}}


def test_forgetting_on_one_rank_only_stops_every_rank(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.backward({0: 9.0})
        if group.rank == 0:
            rank.forget(after_step=False)
        rank.finalize()

    run = run_threads(2, serve)
    assert [text.partition(":")[0] for text in run.texts] == ["RankMismatchError"] * 2


def test_only_a_step_lets_buckets_fall_asleep():
    rank = Rank(LoneRank())
    rank.backward({0: 1.0})
    rank.finalize()
    rank.forget(after_step=False)
    rank.backward({1: 1.0})
    assert rank.reducer.is_present(1)


def test_gradients_forgotten_by_a_step_are_no_drop():
    rank = Rank(LoneRank())
    rank.step({0: 1.0})
    assert rank.reducer.num_dropped == 0
