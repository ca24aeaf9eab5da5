"""Sharding(gradients=True): the optimizer averages gradients itself, and no DDP is needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from shardopt import Sharding
from shardopt.collectives import StagingPool
from shardopt.frameworks.sharded_gradient import ShardedGradient
from shardopt.testing import run_ranks
from tests.ranks.averaging import (
    POLICIES,
    average,
    average_in_rank_order,
    train_sharded,
    train_unsharded,
)
from tests.ranks.test_equality import OPTIMIZERS
from tests.ranks.traffic import counted
from tests.ranks.training import (
    assert_equal,
    assert_replicas_equal,
    assert_same_params,
    batch,
    ddp,
    full_state_dict,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
    train,
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "name", ["Adam", "AdamW fused", "Adagrad", "RMSprop", "SGD", "SGD momentum"]
)
@run_ranks(1, 2, 3)
def test_ten_steps_equal_the_unsharded_optimizer_on_averaged_gradients(
    name: str, policy: str
) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    reference, model = make_model(), make_model()
    plain = optimizer_class(reference.parameters(), **options)
    zero = sharded(model.parameters(), optimizer_class, **options, **POLICIES[policy])
    train_unsharded(reference, plain, range(10))
    train(model, zero, range(10))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2)
def test_at_two_ranks_ten_steps_equal_ddp_to_the_bit(policy: str) -> None:
    reference, model = ddp(make_model()), make_model()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(10))
    train(
        model,
        sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy]),
        range(10),
    )
    assert_same_params(model, reference.module)


@run_ranks(2, 3)
def test_muon_gets_whole_reduced_matrices() -> None:
    reference, model = make_model(bias=False), make_model(bias=False)
    train_unsharded(reference, torch.optim.Muon(reference.parameters(), lr=0.01), range(5))
    zero = sharded(model.parameters(), torch.optim.Muon, lr=0.01, sharding=Sharding(gradients=True))
    train(model, zero, range(5))
    assert_same_params(model, reference)


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_replicas_start_equal_to_the_first_rank(policy: str) -> None:
    model = make_model()
    expected = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank())
    sharded(model.parameters(), torch.optim.SGD, **POLICIES[policy])
    assert_equal([p.detach() for p in model.parameters()], expected)


def _assign_gradients(model: nn.Module, step: int) -> None:
    """Plain gradients, set by hand, of which one is missing everywhere and another one on some rank."""
    params = list(model.parameters())
    computed = torch.autograd.grad(loss_of(model, step), params)
    for param, gradient in zip(params, computed, strict=True):
        param.grad = gradient
    params[step % 6].grad = None
    if dist.get_rank() == step % 2:
        params[(step + 1) % 6].grad = None


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_gradients_assigned_by_hand_on_some_ranks_or_on_none_equal_the_unsharded(
    policy: str,
) -> None:
    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
    train_unsharded(reference, plain, range(8), _assign_gradients)
    train_sharded(model, zero, range(8), _assign_gradients)
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_a_gradient_assigned_over_a_reduced_one_replaces_it_and_none_drops_it(policy: str) -> None:
    def backward(model: nn.Module, step: int) -> None:
        loss_of(model, step).backward()
        params = list(model.parameters())
        params[step % 6].grad = torch.full_like(params[step % 6], float(dist.get_rank() + 1))
        params[(step + 1) % 6].grad = None

    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
    train_unsharded(reference, plain, range(6), backward)
    train_sharded(model, zero, range(6), backward)
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


def _micro_batch(model: nn.Module, step: int, micro: int) -> None:
    model(batch(3 * step + micro)).square().mean().backward()


@pytest.mark.parametrize("num_unsynced", [2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_micro_batches_under_no_sync_add_up_before_one_reduction(
    policy: str, num_unsynced: int
) -> None:
    """Whether the last backward stands outside of the block, and so reduces, or inside, so that ``step()`` does."""
    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
    for step in range(4):
        for micro in range(3):
            _micro_batch(reference, step, micro)
        average_in_rank_order(reference)
        plain.step()
        plain.zero_grad()
        with counted() as traffic, zero.no_sync():
            for micro in range(num_unsynced):
                _micro_batch(model, step, micro)
        assert not traffic.messages
        for micro in range(num_unsynced, 3):
            _micro_batch(model, step, micro)
        zero.step()
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_micro_batches_outside_of_no_sync_add_up_average_by_average(policy: str) -> None:
    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
    for step in range(4):
        totals = [torch.zeros_like(param) for param in reference.parameters()]
        for micro in range(3):
            plain.zero_grad()
            _micro_batch(reference, step, micro)
            for total, param in zip(totals, reference.parameters(), strict=True):
                total += average(param.grad)
            _micro_batch(model, step, micro)
        for total, param in zip(totals, reference.parameters(), strict=True):
            param.grad = total
        plain.step()
        zero.step()
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_a_step_moves_twice_the_parameters_once_around(policy: str) -> None:
    """S * (N - 1) / N bytes of gradients out per rank, and as much of parameters; in backward, or for those by hand."""
    world_size = dist.get_world_size()
    params = [nn.Parameter(torch.ones(96)) for _ in range(60 * world_size)]
    zero = sharded(params, torch.optim.SGD, **POLICIES[policy])
    half = sum(param.nbytes for param in params) * (world_size - 1) // world_size
    for by_hand in (True, False):
        with counted() as backward:
            if by_hand:
                for param in params:
                    param.grad = torch.ones_like(param)
            else:
                sum(param.sum() for param in params).backward()
        with counted() as step:
            zero.step()
        assert backward.nbytes("isend") == (0 if by_hand else half)
        assert step.nbytes("isend") == (2 * half if by_hand else half)
        assert step.nbytes("broadcast", "all_reduce") == 0
        assert backward.nbytes("broadcast", "all_reduce") == 0


@contextmanager
def _lent_nbytes() -> Iterator[list[int]]:
    """Bytes of staging memory in use after each time that some was taken or given back."""
    in_use, take, give_back = [0], StagingPool.take, StagingPool.give_back

    def count_taken(pool: StagingPool, numel: int, *, like: torch.Tensor) -> torch.Tensor:
        taken = take(pool, numel, like=like)
        in_use.append(in_use[-1] + taken.nbytes)
        return taken

    def count_given_back(pool: StagingPool, tensor: torch.Tensor) -> None:
        in_use.append(in_use[-1] - tensor.nbytes)
        give_back(pool, tensor)

    with (
        mock.patch.object(StagingPool, "take", count_taken),
        mock.patch.object(StagingPool, "give_back", count_given_back),
    ):
        yield in_use


@pytest.mark.parametrize("shared_memory", [True, False])
@run_ranks(2, 3)
def test_a_rank_keeps_its_part_of_the_gradients_and_at_most_two_buckets_under_way(
    shared_memory: bool,
) -> None:
    """S / N bytes; a third bucket is being filled meanwhile, and what is received needs room for N - 1 sections more."""
    world_size = dist.get_world_size()
    params = [nn.Parameter(torch.ones(1024)) for _ in range(60 * world_size)]
    size, bucket_nbytes = sum(p.nbytes for p in params), 4 * world_size * 4096
    sharding = Sharding(
        gradients=True,
        granularity="element",
        bucket_mb=bucket_nbytes / 2**20,
        shared_memory=shared_memory,
    )
    zero = sharded(params, torch.optim.SGD, sharding=sharding, parameters_as_bucket_view=True)
    for _ in range(3):
        with _lent_nbytes() as in_use:
            sum(param.square().sum() for param in params).backward()
        assert (
            sum(bucket.shard.nbytes for bucket in zero.shards.gradient_buckets)
            == size // world_size
        )
        assert all(type(param.grad) is ShardedGradient for param in params)
        assert in_use[-1] <= 2 * bucket_nbytes
        assert max(in_use) <= 4 * bucket_nbytes
        zero.step()


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_uneven_inputs_equal_ddp_under_the_same_join(policy: str) -> None:
    num_inputs = 2 + 3 * dist.get_rank()
    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
    for step in range(2 + 3 * (dist.get_world_size() - 1)):
        plain.zero_grad()
        if step < num_inputs:
            loss_of(reference, step).backward()
        average_in_rank_order(reference)
        plain.step()
    with warnings.catch_warnings(), Join([zero]):
        train(model, zero, range(num_inputs))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())
    train_unsharded(reference, plain, range(90, 92))
    train(model, zero, range(90, 92))  # after Join gradients are reduced in backward again
    assert_same_params(model, reference)


class _Fails(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if dist.get_rank() == 1:
            raise FloatingPointError("it went wrong")
        return result


@run_ranks(2, 3)
def test_a_failing_update_leaves_equal_replicas_and_raises_everywhere() -> None:
    model = make_model()
    zero = sharded(model.parameters(), _Fails, lr=0.1, sharding=Sharding(gradients=True))
    for step in range(2):
        loss_of(model, step).backward()
        texts = raises_everywhere(zero.step)
        assert all("it went wrong" in t for t in texts)
        assert_replicas_equal(model.parameters())
        assert all(param.grad is None for param in model.parameters())


@run_ranks(2)
def test_a_sparse_gradient_is_refused_on_every_rank() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    zero = sharded(table.parameters(), torch.optim.SGD, lr=0.1, sharding=Sharding(gradients=True))
    table(torch.tensor([1, 2])).sum().backward()
    texts = raises_everywhere(zero.step)
    assert all("param 0: its gradient is sparse" in t for t in texts)


@run_ranks(2)
def test_no_sync_is_refused_where_the_optimizer_does_not_reduce() -> None:
    zero = sharded(make_model().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match="use that of DDP"), zero.no_sync():
        pass


@run_ranks(1, 2, 3)
def test_a_closure_runs_backward_once_and_its_gradients_are_averaged() -> None:
    reference = make_model()
    train_unsharded(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(4))
    for policy in POLICIES.values():
        model, steps = make_model(), []
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **policy)

        def closure(model: nn.Module = model, zero: Any = zero, steps: Any = steps) -> Any:
            zero.zero_grad()
            loss = loss_of(model, len(steps))
            steps.append(loss)
            loss.backward()
            return loss

        losses = [zero.step(closure) for _ in range(4)]
        assert all(loss is step for loss, step in zip(losses, steps, strict=True))
        assert_same_params(model, reference)
