"""What stops a step, on all ranks alike; and methods of the local optimizer that all ranks call together."""

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.errors import RemoteRankError
from tests.stepping import NO_SCALE, POLICIES, Rank, counted

policies = pytest.mark.parametrize("policy", POLICIES)
MASTERS = ["masters", "element, masters", "gradients, masters"]


# --- steps that are stopped -----------------------------------------------------------------------


@policies
def test_options_that_differ_stop_every_rank_before_anything_is_updated(run_threads, policy):
    values = [None, None]

    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.groups[0]["lr"] += group.rank
        try:
            rank.step()
        finally:
            values[group.rank] = rank.values

    run = run_threads(2, serve)
    assert [text.partition(":")[0] for text in run.texts] == ["RankMismatchError"] * 2
    assert values == [[1.0, 1.0]] * 2


@policies
def test_a_parameter_that_changed_on_one_rank_stops_every_rank(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        if group.rank == 1:
            rank.params[0].data = torch.ones(4).bfloat16()
        rank.step()

    run = run_threads(2, serve)
    assert run.texts[0].startswith("RemoteRankError: preparing the step failed on another rank;")
    assert run.texts[1].startswith("ParameterChangedError: param 0: now (4,) torch.bfloat16")


@policies
def test_groups_edited_by_hand_on_one_rank_stop_every_rank(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        if group.rank == 0:
            rank.groups[0]["params"] = rank.params[:1]
        rank.step()

    run = run_threads(2, serve)
    assert run.texts[0].startswith("ParameterChangedError: param_groups hold 1 parameters")
    assert run.texts[1].startswith("RemoteRankError: preparing the step failed on another rank;")


@policies
@pytest.mark.parametrize("is_separable", [False, True])
def test_a_local_step_that_fails_leaves_equal_replicas_and_raises_on_every_rank(
    run_threads, policy, is_separable
):
    values = [None, None]

    def serve(group):
        rank = Rank(group, policy, is_separable=is_separable).give_gradients(1.0, 2.0)
        rank.local.fails = group.rank == 1
        try:
            rank.step()
        finally:
            values[group.rank] = rank.values

    assert run_threads(2, serve).texts == [
        "RemoteRankError: the local optimizer's step() failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]
    assert values[0] == values[1]


@policies
def test_an_error_that_is_known_before_the_step_stops_every_rank(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        error = KeyError("loss") if group.rank else None
        rank.stepper.step(rank.local.step, scale=NO_SCALE, is_in_join=False, error=error)

    run = run_threads(2, serve)
    assert run.texts[1] == "KeyError: 'loss'"
    assert run.texts[0].endswith("rank 1: KeyError: 'loss'")


@pytest.mark.parametrize("policy", ["gradients", "element, gradients"])
def test_a_sparse_gradient_on_one_rank_stops_every_rank(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        if group.rank:
            rank.params[0].grad = torch.ones(4).to_sparse()
        rank.step()

    run = run_threads(2, serve)
    assert run.texts[1].startswith("ValueError: param 0: its gradient is sparse")
    assert run.texts[0].startswith("RemoteRankError")


@policies
def test_after_a_local_step_that_failed_the_next_one_is_taken(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.local.fails = group.rank == 1
        with pytest.raises((ValueError, RemoteRankError)):
            rank.step()
        rank.local.fails = False
        rank.give_gradients(1.0, 2.0).step()
        return rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.0, -1.0]] * 2)


# --- call: local ----------------------------------------------------------------------------------


@policies
def test_a_method_that_changes_nothing_costs_one_gather(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy)
        num_messages = len(group.launches)
        result = counted(group, lambda: rank.stepper.call(rank.local.describe, word="x"))
        return result, [kind for kind, _ in group.launches[num_messages:]]

    assert run_threads(2, serve).results == [((("x", 0.5), 1), ["all_gather_ints"])] * 2


def test_a_method_that_fails_on_one_rank_raises_on_every_rank(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.local.fails = group.rank == 1
        return rank.stepper.call(rank.local.describe, "x")

    texts = run_threads(2, serve).texts
    assert texts[1] == "ValueError: odd"
    assert texts[0] == (
        "RemoteRankError: describe() of the local optimizer failed on another rank; rank 1: ValueError: odd"
    )


def test_a_method_sees_the_options_of_the_whole_groups():
    rank = Rank(LoneRank())
    rank.groups[0]["lr"] = 0.25
    assert rank.stepper.call(rank.local.describe, "x") == ("x", 0.25)


def test_gradients_make_no_method_exchange_anything(run_threads):
    def serve(group):
        rank = Rank(group).give_gradients(1.0, 1.0)
        return counted(group, lambda: rank.stepper.call(rank.local.describe, "x"))[1]

    run = run_threads(2, serve)
    assert (run.results, run.world.messages) == ([1, 1], [])


@pytest.mark.parametrize("policy", MASTERS)
def test_a_method_keeps_what_was_written_into_parameters_since_the_step(run_threads, policy):
    """A state dict loaded into the model, say, which master weights follow at the next step only."""

    def serve(group):
        rank = Rank(group, policy)
        with torch.no_grad():
            for param in rank.params:
                param.fill_(7.0)
        rank.stepper.call(rank.local.describe, "x")
        return rank.values

    assert run_threads(2, serve).results == [[7.0, 7.0]] * 2


# --- call: collective -----------------------------------------------------------------------------


@policies
def test_parameters_that_a_method_changes_are_exchanged(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy)
        return rank.stepper.call(rank.local.double, 3.0), rank.values

    assert run_threads(2, serve).results == [(3.0, [3.0, 3.0])] * 2


def test_options_that_a_method_changes_are_those_of_the_whole_groups(run_threads):
    def serve(group):
        rank = Rank(group)
        _, count = counted(group, lambda: rank.stepper.call(rank.local.rename, 0.125))
        return rank.groups[0]["lr"], count

    assert run_threads(2, serve).results == [(0.125, 2)] * 2


@policies
def test_a_method_that_fails_after_it_changed_parameters_stops_every_rank(run_threads, policy):
    values = [None, None]

    def serve(group):
        rank = Rank(group, policy)
        rank.local.fails = group.rank == 1
        try:
            rank.stepper.call(rank.local.double)
        finally:
            values[group.rank] = rank.values

    assert run_threads(2, serve).texts == [
        "RemoteRankError: double() of the local optimizer failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]
    assert values == [[2.0, 2.0]] * 2


def test_a_step_after_a_method_starts_from_what_it_made(run_threads):
    def serve(group):
        rank = Rank(group, "gradients, masters")
        rank.stepper.call(rank.local.double, 3.0)
        rank.give_gradients(1.0, 2.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[2.5, 2.0]] * 2
