import pytest
import torch

from shardopt import Sharding
from shardopt.collectives import LoneRank
from shardopt.errors import RemoteRankError
from shardopt.frameworks.torch import TORCH
from shardopt.shards import Shards
from shardopt.step import EvaluatedClosure, LossScale, copy_options
from shardopt.stepper import Stepper

NO_SCALE = LossScale(None, None)
POLICIES = {
    "parameter": (Sharding(), False),
    "views": (Sharding(), True),
    "element": (Sharding(granularity="element"), True),
    "gradients": (Sharding(gradients=True), False),
    "element, gradients": (Sharding(granularity="element", gradients=True), True),
}
policies = pytest.mark.parametrize("policy", POLICIES)


class Local(torch.optim.SGD):
    """SGD with further methods, which can fail on a rank."""

    fails = False

    def step(self, closure=None):
        super().step()
        if self.fails:
            raise ValueError("odd")
        return "loss"

    def double(self, factor=2.0):
        for group in self.param_groups:
            for param in group["params"]:
                param.detach().mul_(factor)
        if self.fails:
            raise ValueError("odd")
        return factor

    def rename(self, rate):
        self.param_groups[0]["lr"] = rate

    def describe(self, word):
        if self.fails:
            raise ValueError("odd")
        return word, self.param_groups[0]["lr"]


class Rank:
    """Two parameters, of 4 and 9 elements, that two ranks share: by parameter rank 0 owns the larger."""

    def __init__(self, group, policy="parameter"):
        sharding, has_views = POLICIES[policy]
        self.group = group
        self.params = [torch.nn.Parameter(torch.ones(n)) for n in (4, 9)]
        self.groups = [{"params": self.params, "lr": 0.5}]
        self.shards = Shards(group, TORCH, sharding, has_views=has_views)
        self.shards.admit(self.groups, self.shards.plan(self.groups, []))
        self.local = Local(self.shards.local_groups(self.groups), lr=0.5)
        copy_options(self.local.param_groups, self.groups)
        self.stepper = Stepper(
            group,
            self.shards,
            self.local,
            param_groups=lambda: self.groups,
            reduces_gradients=sharding.gradients,
        )

    def give_gradients(self, *values):
        """Equal gradients, so that their average is the same as each of them."""
        for param, value in zip(self.params, values, strict=True):
            param.grad = None if value is None else torch.full_like(param, value)
        return self

    def step(self, *, scale=NO_SCALE, is_joined=False, is_in_join=False):
        return self.stepper.step(
            self.local.step, scale=scale, is_in_join=is_in_join, is_joined=is_joined
        )

    @property
    def values(self):
        """The one value of each parameter."""
        assert all((param == param.detach()[0]).all() for param in self.params)
        return [param.detach()[0].item() for param in self.params]


def gathers(run):
    return [counts["ints"] + counts["object"] for counts in run.world.num_gathers_by_rank]


# --- call: local ----------------------------------------------------------------------------------


def counted(group, function):
    """Result of a function, and how many gathers it took on this rank."""
    counts = group.world.num_gathers_by_rank[group.rank]
    before = sum(counts.values())
    result = function()
    return result, sum(counts.values()) - before


def test_a_method_that_changes_nothing_costs_one_gather(run_threads):
    def serve(group):
        rank = Rank(group)
        return counted(group, lambda: rank.stepper.call(rank.local.describe, word="x"))

    run = run_threads(2, serve)
    assert (run.results, run.world.messages) == ([(("x", 0.5), 1)] * 2, [])


def test_a_method_that_fails_on_one_rank_raises_on_every_rank(run_threads):
    def serve(group):
        rank = Rank(group)
        rank.local.fails = group.rank == 1
        return rank.stepper.call(rank.local.describe, "x")

    texts = run_threads(2, serve).texts
    assert texts[1] == "ValueError: odd"
    assert texts[0].startswith("RemoteRankError: describe() of the local optimizer failed")


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


def test_a_method_that_fails_after_it_changed_parameters_stops_every_rank(run_threads):
    values = [None, None]

    def serve(group):
        rank = Rank(group)
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


# --- step -----------------------------------------------------------------------------------------


@policies
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_updates_every_parameter_on_every_rank(run_threads, policy, world_size):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        return rank.step(), rank.values

    run = run_threads(world_size, serve)
    assert (run.texts, run.results) == ([""] * world_size, [("loss", [0.5, 0.0])] * world_size)


@policies
def test_a_lone_rank_takes_the_same_step(policy):
    rank = Rank(LoneRank(), policy).give_gradients(1.0, 2.0)
    assert (rank.step(), rank.values) == ("loss", [0.5, 0.0])


@policies
def test_a_parameter_without_gradient_stays_as_it_is(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        rank.give_gradients(None, 1.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[0.5, -0.5]] * 2


@pytest.mark.parametrize("policy", ["gradients", "element, gradients"])
def test_gradients_of_ranks_are_averaged(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0 + 2 * group.rank, 2.0)
        rank.step()
        return rank.values

    assert run_threads(2, serve).results == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("policy", ["gradients", "element, gradients"])
def test_reduced_gradients_are_consumed(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        tensors = [*rank.params, *rank.shards.tensors.values()]
        return [tensor.grad for tensor in tensors]

    for gradients in run_threads(2, serve).results:
        assert gradients == [None] * len(gradients)


@pytest.mark.parametrize("policy", ["parameter", "views", "element"])
def test_gradients_that_were_averaged_by_others_stay(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        return [param.grad[0].item() for param in rank.params]

    assert run_threads(2, serve).results == [[1.0, 2.0]] * 2


@pytest.mark.parametrize("policy", ["gradients", "element, gradients"])
def test_averages_of_an_earlier_step_are_not_used_again(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step()
        rank.give_gradients(3.0, None).step()
        return rank.values

    assert run_threads(2, serve).results == [[-1.0, 0.0]] * 2


@pytest.mark.parametrize(
    ("policy", "count"),
    [("parameter", 2), ("views", 2), ("element", 2), ("gradients", 3), ("element, gradients", 3)],
)
def test_a_step_costs_a_few_gathers_of_ints(run_threads, policy, count):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        return counted(group, rank.step)[1]

    run = run_threads(2, serve)
    assert run.results == [count] * 2


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


@pytest.mark.parametrize(
    "policy",
    [
        "parameter",
        "views",
        "element",
    ],
)
def test_taking_a_view_back_is_no_change_between_closure_and_update(policy):
    assert after_replacing_data(policy) == (("loss", "loss"), [2.5, 0.0])


def test_options_that_the_local_optimizer_sets_are_those_of_the_whole_groups():
    rank = Rank(LoneRank())
    rank.stepper.step(lambda: rank.local.rename(0.125), scale=NO_SCALE, is_in_join=False)
    assert rank.groups[0]["lr"] == 0.125


def test_options_that_differ_stop_every_rank_before_anything_is_updated(run_threads):
    values = [None, None]

    def serve(group):
        rank = Rank(group).give_gradients(1.0, 2.0)
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
            rank.params[0].data = torch.ones(4).double()
        rank.step()

    run = run_threads(2, serve)
    assert run.texts[0].startswith("RemoteRankError: preparing the step failed on another rank;")
    assert run.texts[1].startswith("ParameterChangedError: param 0: now (4,) torch.float64")


@policies
def test_a_local_step_that_fails_leaves_equal_replicas_and_raises_on_every_rank(
    run_threads, policy
):
    values = [None, None]

    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.local.fails = group.rank == 1
        try:
            rank.step()
        finally:
            values[group.rank] = rank.values

    assert run_threads(2, serve).texts == [
        "RemoteRankError: the local optimizer's step() failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]
    assert values == [[0.5, 0.0]] * 2


def skipping_on(rank_with_inf):
    def serve(group, policy):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        found = torch.tensor(float(group.rank == rank_with_inf))
        result = rank.step(scale=LossScale(None, found))
        return result, rank.values

    return serve


@policies
def test_an_inf_on_one_rank_skips_the_step_on_all(run_threads, policy):
    run = run_threads(2, lambda group: skipping_on(1)(group, policy))
    assert run.results == [(None, [1.0, 1.0])] * 2


@policies
def test_after_a_skipped_step_the_next_one_is_taken(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step(scale=LossScale(None, torch.tensor(1.0)))
        rank.give_gradients(2.0, 1.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[0.0, 0.5]] * 2


@pytest.mark.parametrize(
    "policy",
    [
        "gradients",
        "element, gradients",
    ],
)
def test_a_skipped_step_drops_all_gradients_or_none(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step(scale=LossScale(None, torch.tensor(1.0)))
        return len({param.grad is None for param in rank.params})

    assert run_threads(2, serve).results == [1, 1]


@pytest.mark.parametrize(
    "policy",
    [
        "parameter",
        "views",
        "element",
        "gradients",
        "element, gradients",
    ],
)
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


# --- ranks without inputs -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["parameter", "views", "element"])
@pytest.mark.parametrize("joined", [0, 1])
def test_a_rank_without_inputs_updates_what_it_owns(run_threads, policy, joined):
    def serve(group):
        rank = Rank(group, policy)
        if group.rank != joined:
            rank.groups[0]["lr"] = 0.25  # what a scheduler did since
            rank.give_gradients(1.0, 2.0)
        rank.step(is_joined=group.rank == joined, is_in_join=True)
        return rank.values, rank.groups[0]["lr"]

    assert run_threads(2, serve).results == [([0.75, 0.5], 0.25)] * 2


@pytest.mark.parametrize("policy", ["gradients", "element, gradients"])
@pytest.mark.parametrize("joined", [0, 1])
def test_a_rank_without_inputs_counts_as_zeros_where_gradients_are_averaged(
    run_threads, policy, joined
):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)  # those of the joined rank are stale
        rank.step(is_joined=group.rank == joined, is_in_join=True)
        return rank.values

    assert run_threads(2, serve).results == [[0.75, 0.5]] * 2


# --- clip_grad_norm -------------------------------------------------------------------------------


def clip(rank, max_norm, *, norm_type=2.0, error_if_nonfinite=False):
    norm = rank.stepper.clip_grad_norm(
        max_norm, norm_type, TORCH.norm, error_if_nonfinite=error_if_nonfinite
    )
    return norm.item()


reducing = pytest.mark.parametrize("policy", ["gradients", "element, gradients"])


@reducing
def test_clipped_gradients_are_averages_scaled_to_the_norm(run_threads, policy):
    """Averages 3 over 4 elements and 0 over 9: the norm is 6, and 1.5 is a quarter of it."""

    def serve(group):
        rank = Rank(group, policy).give_gradients(2.0 + 2 * group.rank, 0.0)
        norm = clip(rank, 1.5)
        rank.step()
        return norm, rank.params[0][0].item(), rank.params[1][0].item()

    for norm, first, second in run_threads(2, serve).results:
        assert (norm, first, second) == (6.0, pytest.approx(1 - 0.5 * 0.75, rel=1e-6), 1.0)


@reducing
def test_gradients_are_reduced_once_by_clipping_and_not_again_by_the_step(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        clip(rank, 1e9)
        before = len(group.world.messages)
        group.world.barrier.wait()
        rank.step()
        sent = [m for m in group.world.messages[before:] if m.src == group.rank]
        return rank.values, all(message.dst is None for message in sent)

    assert run_threads(2, serve).results == [([0.5, 0.0], True)] * 2


@reducing
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_asked_to(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(float("inf") if group.rank else 1.0, 2.0)
        clip(rank, 1.0, error_if_nonfinite=True)

    assert (
        run_threads(2, serve).texts
        == [
            "RuntimeError: the total norm of order 2.0 of the gradients is inf; "
            "pass error_if_nonfinite=False to clip all the same"
        ]
        * 2
    )


@reducing
def test_a_backward_after_clipping_stops_every_rank(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        clip(rank, 1.0)
        if group.rank == 1:
            rank.params[1].grad = torch.ones(9)  # by parameter it belongs to rank 0
        rank.step()

    run = run_threads(2, serve)
    assert run.texts[0].startswith("RemoteRankError: preparing the step failed on another rank;")
    assert run.texts[1] == (
        "RuntimeError: param 1: a backward added to its gradient after clip_grad_norm_() had reduced all of them; "
        "call clip_grad_norm_() once, after the last backward before step()"
    )


@reducing
def test_forgotten_gradients_are_reduced_anew(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(9.0, 9.0)
        clip(rank, 1.0)
        rank.stepper.forget_gradients()
        rank.give_gradients(1.0, 2.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[0.5, 0.0]] * 2
