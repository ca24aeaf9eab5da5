"""Steps taken inside backward, as the finalizer drives them; autograd is torch's own."""

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.errors import OverlapError
from shardopt.step import LossScale
from tests.stepping import NO_SCALE, Local, Rank

POLICIES = ["gradients", "element, gradients", "gradients, masters"]
policies = pytest.mark.parametrize("policy", POLICIES)


def make(group, policy="gradients", **options):
    """A rank that steps in backward, each parameter in a bucket of its own."""
    rank = Rank(group, policy, is_separable=True, bucket_mb=1e-9, step_in_backward=True, **options)
    rank.confirm = lambda scale=NO_SCALE: rank.reduction.stepper.confirm(
        scale, rank.reduction.finalizer
    )
    return rank


# --- updates --------------------------------------------------------------------------------------


@policies
@pytest.mark.parametrize("world_size", [2, 3])
def test_after_backward_every_parameter_is_updated_on_every_rank(run_threads, policy, world_size):
    def serve(group):
        rank = make(group, policy).backward(1.0, 2.0)
        values = rank.values
        rank.confirm()
        return values

    run = run_threads(world_size, serve)
    assert (run.texts, run.results) == ([""] * world_size, [[0.5, 0.0]] * world_size)
    assert run.num_left_over == 0


@policies
def test_a_lone_rank_takes_the_same_step(policy):
    rank = make(LoneRank(), policy).backward(1.0, 2.0)
    rank.confirm()
    assert rank.values == [0.5, 0.0]


@policies
def test_gradients_of_ranks_are_averaged(run_threads, policy):
    def serve(group):
        rank = make(group, policy).backward(1.0 + 2 * group.rank, 2.0)
        rank.confirm()
        return rank.values

    assert run_threads(2, serve).results == [[0.0, 0.0]] * 2


@policies
def test_a_parameter_without_gradient_stays_as_it_is(run_threads, policy):
    def serve(group):
        rank = make(group, policy)
        for values in ((1.0, 2.0), (None, 1.0), (1.0, None)):
            rank.backward(*values)
            rank.confirm()
        return rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.0, -0.5]] * 2)


@policies
def test_gradients_of_some_ranks_only_count_for_all(run_threads, policy):
    def serve(group):
        rank = make(group, policy).backward(*((2.0, None) if group.rank else (None, 4.0)))
        rank.confirm()
        return rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.5, 0.0]] * 2)


@policies
def test_a_bucket_that_slept_is_updated_in_the_backward_that_wakes_it(run_threads, policy):
    def serve(group):
        rank = make(group, policy).backward(1.0, None)
        rank.confirm()
        rank.backward(None, 2.0)
        values = rank.values
        rank.confirm()
        return values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.5, 0.0]] * 2)


@policies
def test_gradients_of_a_pause_are_used_by_the_backward_after_it(run_threads, policy):
    def serve(group):
        rank = make(group, policy)
        with rank.reduction.hooks.pause():
            rank.backward(1.0, None)
        values = rank.values
        rank.backward(1.0, 2.0)
        rank.confirm()
        return values, rank.values

    run = run_threads(2, serve)
    assert run.results == [([1.0, 1.0], [0.0, 0.0])] * 2


@policies
def test_an_empty_parameter_is_updated_once(run_threads, policy):
    def serve(group):
        rank = make(group, policy, numels=(4, 0))
        (rank.params[0].sum() + rank.params[1].sum()).backward()
        rank.confirm()
        return sum(shapes.count((0,)) for shapes in rank.local.stepped)

    run = run_threads(2, serve)
    assert (run.texts, sorted(run.results)) == (["", ""], [0, 1])


def test_the_local_optimizer_is_run_bucket_by_bucket():
    rank = make(LoneRank()).backward(1.0, 2.0)
    rank.confirm()
    assert [shapes for shapes in rank.local.stepped if shapes] == [[(9,)], [(4,)]]


def test_members_of_a_grid_take_the_same_step(run_hybrid):
    def serve(grid):
        rank = make(grid).backward(1.0, 2.0)
        rank.confirm()
        return rank.values

    run = run_hybrid(2, 2, serve)
    assert (run.texts, run.results) == ([""] * 4, [[0.5, 0.0]] * 4)


def test_every_rank_launches_the_same_in_the_same_order(run_threads):
    """Whatever each of them has a gradient for."""
    given = [(1.0, None, 3.0), (None, 2.0, None), (1.0, 2.0, 3.0)]

    def serve(group):
        rank = make(group, "element, gradients", numels=(4, 9, 5))
        rank.backward(*given[group.rank])
        rank.confirm()
        return [what for what in group.launches if what[0] != "all_gather"]

    run = run_threads(3, serve)
    assert run.texts == [""] * 3
    assert run.results == [run.results[0]] * 3


def test_options_set_on_the_whole_groups_are_those_of_the_step():
    rank = make(LoneRank())
    rank.groups[0]["lr"] = 0.25
    rank.backward(1.0, 2.0).confirm()
    assert rank.values == [0.75, 0.5]


def test_hooks_are_fired_once_around_each_step():
    rank = make(LoneRank())
    for _ in range(2):
        rank.backward(1.0, 2.0).confirm()
    assert rank.fired == ["before", "after"] * 2


def test_gradients_are_gone_after_the_step():
    rank = make(LoneRank()).backward(1.0, 2.0)
    rank.confirm()
    assert [param.grad for param in rank.params] == [None, None]


# --- what stops a step, on every rank and outside of backward -------------------------------------


class Failing(Local):
    """Raises where it updates a parameter of 4 elements."""

    def step(self, closure=None):
        result = super().step()
        if any(shape == (4,) for shape in self.stepped[-1]):
            raise ValueError("odd")
        return result


def failing_at_confirm(run_threads, prepare=lambda rank: None, **options):
    """Backward on two ranks, then confirm; returns the run, with the values on each rank."""
    values = [None, None]

    def serve(group):
        rank = make(group, **options)
        prepare(rank)
        rank.backward(1.0, 2.0)
        values[group.rank] = rank.values
        rank.confirm()

    run = run_threads(2, serve)
    run.results = values
    return run


def test_an_error_of_a_local_step_is_raised_by_confirm_on_every_rank(run_threads):
    run = failing_at_confirm(run_threads, kind=Failing)
    text = "the local optimizer's step() inside backward failed on another rank; rank 1: ValueError: odd"
    assert run.texts == [f"RemoteRankError: {text}", "ValueError: odd"]
    assert run.results == [[0.5, 0.0]] * 2


def test_options_that_differ_are_named_by_confirm_and_nothing_is_updated(run_threads):
    def prepare(rank):
        rank.groups[0]["lr"] += rank.group.rank

    run = failing_at_confirm(run_threads, prepare)
    assert [text.partition(":")[0] for text in run.texts] == ["RankMismatchError"] * 2
    assert run.results == [[1.0, 1.0]] * 2


def test_groups_edited_by_hand_on_one_rank_are_named_by_confirm(run_threads):
    def prepare(rank):
        if rank.group.rank:
            rank.groups[0]["params"] = rank.params[:1]

    run = failing_at_confirm(run_threads, prepare)
    assert run.texts[1].startswith("ParameterChangedError: param_groups hold 1 parameters")
    assert run.texts[0].startswith("RemoteRankError: preparing the step failed on another rank;")
    assert run.results == [[1.0, 1.0]] * 2


def test_after_a_step_that_failed_the_next_one_is_taken(run_threads):
    def serve(group):
        rank = make(group)
        rank.groups[0]["lr"] += group.rank
        rank.backward(1.0, 2.0)
        with pytest.raises(ValueError, match="options differ"):
            rank.confirm()
        rank.groups[0]["lr"] = 0.5
        rank.backward(1.0, 2.0)
        rank.confirm()
        return rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.5, 0.0]] * 2)


def test_a_step_without_a_backward_is_an_error():
    with pytest.raises(OverlapError) as caught:
        make(LoneRank()).confirm()
    assert str(caught.value) == (
        "step() with Sharding(step_in_backward=True) found that no update happened in backward since the last one; "
        "call it only after a backward outside of no_sync() that reaches a parameter of this optimizer"
    )


def test_several_backwards_before_a_step_are_an_error():
    rank = make(LoneRank()).backward(1.0, 2.0).backward(1.0, 2.0)
    with pytest.raises(OverlapError) as caught:
        rank.confirm()
    assert str(caught.value).startswith("2 updates were made in backward since the last step(); ")


def test_after_several_backwards_the_next_single_one_is_fine():
    rank = make(LoneRank()).backward(1.0, 2.0).backward(1.0, 2.0)
    with pytest.raises(OverlapError):
        rank.confirm()
    before = rank.values
    rank.backward(1.0, 2.0).confirm()
    assert [b - v for b, v in zip(before, rank.values, strict=True)] == [0.5, 1.0]


def test_a_scaler_comes_too_late():
    rank = make(LoneRank()).backward(1.0, 2.0)
    with pytest.raises(OverlapError, match="GradScaler unscales gradients between"):
        rank.confirm(LossScale(None, torch.tensor(0.0)))


def norm_of(rank):
    return rank.reduction.finalizer.norm(0, 2.0)


def clip(rank):
    return torch.nn.utils.clip_grad_norm_(rank.params, 1.0)


@pytest.mark.parametrize("use", [clip, norm_of])
def test_gradients_can_no_longer_be_changed(use):
    rank = make(LoneRank()).backward(1.0, 2.0)
    with pytest.raises(OverlapError, match="gradients were changed between backward and step"):
        use(rank)


def test_a_second_backward_after_one_that_failed_raises_what_failed(run_threads):
    """Before it goes on with replicas that may differ from what the user thinks they are."""

    def serve(group):
        rank = make(group)
        rank.groups[0]["lr"] += group.rank
        rank.backward(1.0, 2.0)
        rank.backward(1.0, 2.0)

    run = run_threads(2, serve)
    assert [text.partition(":")[0] for text in run.texts] == ["RankMismatchError"] * 2
