"""Loss scales and steps that a GradScaler skips, whatever is sharded."""

import pytest
import torch

from shardopt.step import LossScale
from tests.stepping import NO_SCALE, POLICIES, REDUCING, Rank

policies = pytest.mark.parametrize("policy", POLICIES)
reducing = pytest.mark.parametrize("policy", REDUCING)


@policies
def test_a_loss_scale_is_divided_out_of_gradients(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(8.0, 16.0)
        rank.step(scale=LossScale(torch.tensor(8.0), torch.tensor(0.0)))
        return rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.5, 0.0]] * 2)


@policies
def test_loss_scales_that_differ_stop_every_rank(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(8.0, 16.0)
        rank.step(scale=LossScale(torch.tensor(8.0 + group.rank), torch.tensor(0.0)))

    run = run_threads(2, serve)
    assert run.texts[0] == run.texts[1]
    assert "first difference at GradScaler's scale: 9.0 on rank 1, 8.0 on rank 0" in run.texts[0]


@policies
def test_an_inf_on_one_rank_skips_the_step_on_all(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        result = rank.step(scale=LossScale(None, torch.tensor(float(group.rank == 1))))
        return result, rank.values

    assert run_threads(2, serve).results == [(None, [1.0, 1.0])] * 2


@policies
def test_after_a_skipped_step_the_next_one_is_taken(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).give_gradients(1.0, 2.0)
        rank.step(scale=LossScale(None, torch.tensor(1.0)))
        rank.give_gradients(2.0, 1.0).step()
        return rank.values

    assert run_threads(2, serve).results == [[0.0, 0.5]] * 2


@reducing
def test_a_skipped_step_drops_all_gradients(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy).backward(1.0, 2.0)
        rank.step(scale=LossScale(None, torch.tensor(1.0)))
        return [param.grad for param in rank.params]

    assert run_threads(2, serve).results == [[None, None]] * 2


@reducing
def test_a_loss_scale_is_divided_out_before_ranks_without_inputs_average(run_threads, policy):
    def serve(group):
        rank = Rank(group, policy, is_in_join=True).backward(8.0, 16.0)
        is_joined = group.rank == 1
        scale = NO_SCALE if is_joined else LossScale(torch.tensor(4.0), torch.tensor(0.0))
        rank.step(scale=scale, is_joined=is_joined)
        return rank.values

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.5, 0.0]] * 2)
