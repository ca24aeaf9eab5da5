"""One step after backward, whatever is sharded."""

import types

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.step import EvaluatedClosure
from tests.stepping import NO_SCALE, POLICIES, REDUCING, Rank, counted

policies = pytest.mark.parametrize("policy", POLICIES)
separable = pytest.mark.parametrize("is_separable", [False, True])
reducing = pytest.mark.parametrize("policy", REDUCING)
AVERAGED = [policy for policy in POLICIES if policy not in REDUCING]


# --- updates --------------------------------------------------------------------------------------


@policies
@separable
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_updates_every_parameter_on_every_rank(
    run_threads, policy, is_separable, world_size
):
    def serve(group):
        rank = Rank(group, policy, is_separable=is_separable, bucket_mb=1e-9)
        return rank.give_gradients(1.0, 2.0).step(), rank.values

    run = run_threads(world_size, serve)
    assert (run.texts, run.results) == ([""] * world_size, [("loss", [0.5, 0.0])] * world_size)


@policies
@separable
def test_a_lone_rank_takes_the_same_step(policy, is_separable):
    rank = Rank(LoneRank(), policy, is_separable=is_separable).give_gradients(1.0, 2.0)
    assert (rank.step(), rank.values) == ("loss", [0.5, 0.0])


@reducing
@separable
def test_gradients_of_a_backward_are_those_of_the_step(run_threads, policy, is_separable):
    def serve(group):
        rank = Rank(group, policy, is_separable=is_separable, bucket_mb=1e-9)
        rank.backward(1.0 + 2 * group.rank, 2.0).step()
        rank.backward(1.0, None).step()
        return rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[-0.5, 0.0]] * 2)


@policies
def test_a_parameter_without_gradient_stays_as_it_is(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        rank.give_gradients(None, 1.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[0.5, -0.5]] * 2


@policies
@separable
def test_without_any_gradient_nothing_travels(run_threads, policy, is_separable):
    def serve(group):
        rank = Rank(group, policy, is_separable=is_separable)
        before = len(group.launches)
        rank.step()
        return {kind for kind, _ in group.launches[before:]}, rank.values

    assert run_threads(2, serve).results == [({"all_gather_ints"}, [1.0, 1.0])] * 2


@reducing
def test_gradients_of_ranks_are_averaged(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0 + 2 * group.rank, 2.0)
        rank.step()
        return rank.values

    assert run_threads(2, serve).results == [[0.0, 0.0]] * 2


@reducing
def test_reduced_gradients_are_consumed(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        tensors = [*rank.params, *rank.shards.tensors.values()]
        return [tensor.grad for tensor in tensors]

    for gradients in run_threads(2, serve).results:
        assert gradients == [None] * len(gradients)


@pytest.mark.parametrize("policy", AVERAGED)
def test_gradients_that_were_averaged_by_others_stay(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        return [param.grad[0].item() for param in rank.params]

    assert run_threads(2, serve).results == [[1.0, 2.0]] * 2


@reducing
def test_averages_of_an_earlier_step_are_not_used_again(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        rank.give_gradients(3.0, None).step()
        return rank.values

    assert run_threads(2, serve).results == [[-1.0, 0.0]] * 2


@policies
def test_a_step_costs_two_gathers_of_ints(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        return counted(group, rank.step)[1]

    assert run_threads(2, serve).results == [2, 2]


@policies
@separable
def test_after_a_step_every_parameter_is_there(run_threads, policy, is_separable):
    def serve(group):
        rank = Rank(group, policy, is_separable=is_separable, bucket_mb=1e-9)
        rank.give_gradients(1.0, 2.0).step()
        group.launches.clear()
        rank.exchange.drain()
        return rank.values

    run = run_threads(2, serve)
    assert (run.results, run.num_left_over) == ([[0.5, 0.0]] * 2, 0)


@policies
def test_members_of_a_grid_take_the_same_step(run_hybrid, policy):
    def serve(grid):
        rank = Rank(grid, policy).give_gradients(1.0, 2.0)
        rank.step()
        return rank.values

    run = run_hybrid(2, 2, serve)
    assert (run.texts, run.results) == ([""] * 4, [[0.5, 0.0]] * 4)


# --- parts of a step ------------------------------------------------------------------------------


def test_a_separable_optimizer_is_run_bucket_by_bucket():
    rank = Rank(LoneRank(), numels=(4, 9, 0), is_separable=True, bucket_mb=1e-9)
    rank.give_gradients(1.0, 2.0, 0.0).step()
    assert rank.local.stepped == [[(9,)], [(4,), (0,)]]


def test_any_other_optimizer_is_run_once():
    rank = Rank(LoneRank(), numels=(4, 9, 0), bucket_mb=1e-9)
    rank.give_gradients(1.0, 2.0, 0.0).step()
    assert rank.local.stepped == [[(4,), (9,), (0,)]]


def test_a_rank_without_any_bucket_runs_its_optimizer_once(run_threads):
    def serve(group):
        rank = Rank(group, numels=(0,), is_separable=True)
        rank.step()
        return rank.local.stepped

    assert run_threads(2, serve).results == [[[(0,)]], [[]]]


@reducing
def test_an_empty_parameter_has_a_gradient_where_any_rank_had_one(run_threads, policy):
    seen = [None, None]

    def serve(group):
        rank = Rank(group, policy, numels=(4, 0))
        rank.give_gradients(1.0, 0.0 if group.rank else None)
        step = rank.local.step

        def watched():
            listed = [p for g in rank.local.param_groups for p in g["params"] if not p.numel()]
            seen[group.rank] = [p.grad is not None for p in listed]
            return step()

        rank.stepper.step(watched, scale=NO_SCALE, is_in_join=False)

    run = run_threads(2, serve)
    assert (run.texts, sorted(map(str, seen))) == (["", ""], ["[True]", "[]"])


@separable
def test_param_groups_are_whole_again_after_a_step(is_separable):
    rank = Rank(LoneRank(), is_separable=is_separable, bucket_mb=1e-9).give_gradients(1.0, 2.0)
    rank.step()
    assert [p.numel() for p in rank.local.param_groups[0]["params"]] == [4, 9]


def awaited_in_forward(group, *, is_ready):
    """A rank whose parameters may arrive in the next forward, once that has shown who waits for them."""
    rank = Rank(group, "views", is_separable=True, numels=(4, 4, 4, 4), bucket_mb=1e-9)
    rank.stepper.attach(types.SimpleNamespace(is_ready=is_ready))
    return rank.give_gradients(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("is_ready", "num_touched"), [(False, 2), (True, 0)])
def test_parameters_may_travel_on_after_a_step_where_a_forward_waits_for_them(
    run_threads, is_ready, num_touched
):
    def serve(group):
        rank = awaited_in_forward(group, is_ready=is_ready)
        before = [param._version for param in rank.params]
        rank.step()
        arrived = sum(
            param._version > version and rank.shards.owners[index] != group.rank
            for index, (param, version) in enumerate(zip(rank.params, before, strict=True))
        )
        rank.exchange.drain()
        return arrived, rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [(num_touched, [0.5] * 4)] * 2)


@pytest.mark.parametrize(("is_ready", "order"), [(False, [1, 0]), (True, [0, 1])])
def test_what_the_next_forward_needs_first_travels_first_where_it_waits(
    run_threads, is_ready, order
):
    def serve(group):
        rank = awaited_in_forward(group, is_ready=is_ready)
        launched = []
        launch = rank.exchange.launch
        rank.exchange.launch = lambda n, ranks: (launched.append(n), launch(n, ranks))
        rank.step()
        rank.exchange.drain()
        return launched[:2]

    assert run_threads(2, serve).results == [order] * 2


def test_parameters_on_their_way_are_waited_for_by_the_next_step(run_threads):
    def serve(group):
        rank = awaited_in_forward(group, is_ready=True)
        for _ in range(3):
            rank.give_gradients(1.0, 1.0, 1.0, 1.0).step()
        rank.exchange.drain()
        return rank.values

    run = run_threads(2, serve)
    assert (run.results, run.num_left_over) == ([[-0.5] * 4] * 2, 0)


# --- options --------------------------------------------------------------------------------------


@policies
def test_options_set_on_the_whole_groups_are_those_of_the_step(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.groups[0]["lr"] = 0.25
        rank.step()
        return rank.values

    assert run_threads(2, serve).results == [[0.75, 0.5]] * 2


def after_replacing_data(policy):
    """A step with an evaluated closure, before which the data of a parameter was replaced."""
    rank = Rank(LoneRank(), policy).give_gradients(1.0, 2.0)
    rank.params[0].data = torch.full((4,), 3.0)

    def step_local():
        closure = EvaluatedClosure("loss", rank.shards.versions)
        return closure(), rank.local.step()

    result = rank.stepper.step(step_local, scale=NO_SCALE, is_in_join=False)
    return result, rank.values


@pytest.mark.parametrize("policy", AVERAGED)
def test_taking_a_view_back_is_no_change_between_closure_and_update(policy):
    assert after_replacing_data(policy) == (("loss", "loss"), [2.5, 0.0])


def test_options_that_the_local_optimizer_sets_are_those_of_the_whole_groups():
    rank = Rank(LoneRank())
    rank.stepper.step(lambda: rank.local.rename(0.125), scale=NO_SCALE, is_in_join=False)
    assert rank.groups[0]["lr"] == 0.125


# --- ranks without inputs -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", AVERAGED)
@pytest.mark.parametrize("joined", [0, 1])
def test_a_rank_without_inputs_updates_what_it_owns(run_threads, policy, joined):
    def serve(group):
        rank = Rank(group, policy, is_in_join=True)
        if group.rank != joined:
            rank.groups[0]["lr"] = 0.25  # what a scheduler did since
            rank.give_gradients(1.0, 2.0)
        rank.step(is_joined=group.rank == joined)
        return rank.values, rank.groups[0]["lr"]

    assert run_threads(2, serve).results == [([0.75, 0.5], 0.25)] * 2


@reducing
@pytest.mark.parametrize("joined", [0, 1])
@pytest.mark.parametrize("how", ["give_gradients", "backward"])
def test_a_rank_without_inputs_counts_as_zeros_where_gradients_are_averaged(
    run_threads, policy, joined, how
):
    def serve(group):
        rank = Rank(group, policy, is_in_join=True)
        getattr(rank, how)(1.0, 2.0)  # those of the joined rank are stale
        rank.step(is_joined=group.rank == joined)
        return rank.values

    assert run_threads(2, serve).results == [[0.75, 0.5]] * 2


def test_a_shadow_step_takes_part_without_inputs(run_threads):
    def serve(group):
        rank = Rank(group, is_in_join=True)
        if group.rank:
            rank.stepper.shadow_step()
        else:
            rank.give_gradients(1.0, 2.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[0.5, 0.0]] * 2
