"""Clipping of gradients that are sharded, by all ranks together."""

import pytest
import torch

from shardopt.collectives import LoneRank
from tests.stepping import REDUCING, Rank

reducing = pytest.mark.parametrize("policy", REDUCING)
NORM_TYPES = [1.0, 2.0, 3.0, 0.5, float("inf")]


def clip(rank, max_norm, *, norm_type=2.0, error_if_nonfinite=False):
    norm = rank.reduction.clipper.clip(
        rank.reduction.finalizer, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
    )
    return norm.item()


def unsharded(*gradients, max_norm=1e9, norm_type=2.0):
    """What ``clip_grad_norm_`` returns for the averages, and the values that it leaves."""
    params = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)
    return norm.item(), [param.grad for param in params]


# --- norms ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norm_of_whole_parameters_is_bitwise_the_unsharded_one(
    run_threads, norm_type, world_size
):
    def serve(group):
        rank = Rank(group, "gradients").backward(0.1, 0.7)
        return clip(rank, 1e9, norm_type=norm_type)

    run = run_threads(world_size, serve)
    rank = Rank(LoneRank(), "gradients").backward(0.1, 0.7)
    rank.reduction.finalizer.complete()
    # equal gradients, but averages over 3 ranks round
    averages = [torch.full((n,), v) * (1.0 / world_size) for n, v in ((4, 0.1), (9, 0.7))]
    totals = [sum([average] * world_size) for average in averages]
    expected, _ = unsharded(*totals, norm_type=norm_type)
    assert (run.texts, run.results) == ([""] * world_size, [expected] * world_size)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("policy", REDUCING)
def test_the_norm_on_a_lone_rank_is_the_unsharded_one(policy, norm_type):
    rank = Rank(LoneRank(), policy).backward(0.1, 0.7)
    expected, _ = unsharded(torch.full((4,), 0.1), torch.full((9,), 0.7), norm_type=norm_type)
    assert clip(rank, 1e9, norm_type=norm_type) == pytest.approx(expected, rel=2**-20)


@reducing
def test_gradients_below_the_norm_keep_their_bits(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).backward(1.0, 2.0)
        clip(rank, 1e9)
        rank.step()
        return rank.values

    assert run_threads(2, serve).results == [[0.5, 0.0]] * 2


@reducing
def test_a_parameter_without_gradient_does_not_count(run_threads, policy):
    def serve(group):
        return clip(Rank(group, policy).backward(3.0, None), 1e9)

    assert run_threads(2, serve).results == [6.0, 6.0]


@pytest.mark.parametrize("step", [2, 3, 5])
def test_parameters_without_gradient_do_not_change_the_order_of_the_sum(step):
    """A sum of squares is vectorized, so zeros among them would round otherwise."""
    gradients = torch.randn(101, 3, generator=torch.Generator().manual_seed(0)).unbind()
    rank = Rank(LoneRank(), "gradients", numels=(3,) * len(gradients))
    for index in range(0, len(gradients), step):
        rank.params[index].grad = gradients[index].clone()
    expected, _ = unsharded(*gradients[::step])
    assert clip(rank, 1e9) == expected


@reducing
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_without_any_gradient_the_norm_is_0_as_torch_has_it(run_threads, policy, norm_type):
    run = run_threads(2, lambda group: clip(Rank(group, policy), 1.0, norm_type=norm_type))
    assert (run.texts, run.results) == (["", ""], [0.0, 0.0])


def test_norms_over_a_grid_are_those_of_the_averages_of_all_members(run_hybrid):
    def serve(grid):
        member = grid._column.rank * grid.world_size + grid.rank
        return clip(Rank(grid, "gradients").backward(float(member), None), 1e9)

    run = run_hybrid(2, 2, serve)
    assert (run.texts, run.results) == ([""] * 4, [1.5 * 2.0] * 4)


def test_gradients_of_several_dtypes_have_a_norm_in_float32():
    rank = Rank(LoneRank(), "gradients")
    assert rank.reduction.clipper.norms(2.0, [False, False]).dtype == torch.float32


def test_norms_are_taken_in_the_dtype_of_the_averages():
    rank = Rank(LoneRank(), "gradients", sum_dtype=torch.float64)
    assert rank.reduction.clipper.norms(2.0, [False, False]).dtype == torch.float64


# --- reductions -----------------------------------------------------------------------------------


@reducing
def test_gradients_are_reduced_once_by_clipping_and_not_again_by_the_step(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        clip(rank, 1e9)
        num_before = len(group.launches)
        rank.step()
        kinds = {kind for kind, _ in group.launches[num_before:]}
        return rank.values, kinds

    assert run_threads(2, serve).results == [([0.5, 0.0], {"all_gather_ints", "all_gather"})] * 2


@reducing
def test_what_a_backward_adds_after_clipping_is_added_to_clipped_averages(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).backward(3.0, 0.0)
        clip(rank, 3.0)
        rank.backward(1.0, 2.0).step()
        return rank.params[0][0].item(), rank.params[1][0].item()

    for first, second in run_threads(2, serve).results:
        assert (first, second) == (pytest.approx(1 - 0.5 * (1.5 + 1.0), abs=1e-5), 0.0)


@reducing
def test_forgotten_gradients_are_reduced_anew(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(9.0, 9.0)
        clip(rank, 1.0)
        rank.reduction.finalizer.forget(after_step=False)
        rank.give_gradients(1.0, 2.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[0.5, 0.0]] * 2


# --- what stops it --------------------------------------------------------------------------------


@reducing
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_asked_to(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(float("inf") if group.rank else 1.0, 2.0)
        clip(rank, 1.0, error_if_nonfinite=True)

    text = (
        "RuntimeError: the total norm of order 2.0 of the gradients is inf; "
        "pass error_if_nonfinite=False to clip all the same"
    )
    assert run_threads(2, serve).texts == [text] * 2


@reducing
def test_where_a_norm_that_is_not_finite_raises_nothing_was_scaled(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).backward(float("inf"), 2.0)
        with pytest.raises(RuntimeError, match="total norm"):
            clip(rank, 1.0, error_if_nonfinite=True)
        rank.step()
        return rank.params[1][0].item()

    assert run_threads(2, serve).results == [0.0, 0.0]


@reducing
def test_norms_that_differ_between_ranks_stop_every_rank(run_threads, policy):
    run = run_threads(2, lambda g: clip(Rank(g, policy).backward(1.0, 2.0), 1.0 + g.rank))
    assert run.texts[0] == run.texts[1]
    assert run.texts[0].endswith("first difference at max_norm: 2.0 on rank 1, 1.0 on rank 0")


@reducing
def test_a_parameter_that_changed_on_one_rank_stops_every_rank(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).backward(1.0, 2.0)
        if group.rank == 0:
            rank.params[0].grad = None
            rank.params[0].data = torch.ones(4).bfloat16()
        clip(rank, 1.0)

    run = run_threads(2, serve)
    assert run.texts[0].startswith("ParameterChangedError: param 0")
    assert run.texts[1].startswith("RemoteRankError: preparing the step failed on another rank;")


@pytest.mark.parametrize("norm_type", [0, -1.0, float("nan")])
def test_a_norm_of_no_order_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type") as caught:
        clip(Rank(LoneRank(), "gradients"), 1.0, norm_type=norm_type)
    assert str(caught.value) == (f"norm_type: expected a number above 0, or inf, got {norm_type!r}")


@reducing
def test_a_backward_of_one_rank_only_between_two_clippings_keeps_ranks_in_step(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).backward(1.0, 2.0)
        clip(rank, 1e9)
        if group.rank:
            rank.backward(1.0, None)
        return clip(rank, 1e9)

    run = run_threads(2, serve)
    assert (run.texts, len(set(run.results))) == (["", ""], 1)
