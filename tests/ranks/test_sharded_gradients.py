"""Sharding(gradients=True): the optimizer averages gradients itself, and no DDP is needed."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from shardopt import Sharding
from shardopt.testing import run_ranks
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

POLICIES = {
    "by parameter": ({"sharding": Sharding(gradients=True)}),
    "by parameter, views": {
        "sharding": Sharding(gradients=True),
        "parameters_as_bucket_view": True,
    },
    "by element": {
        "sharding": Sharding(gradients=True, granularity="element"),
        "parameters_as_bucket_view": True,
    },
    "by element, small buckets": {
        "sharding": Sharding(gradients=True, granularity="element", bucket_mb=0.0005),
        "parameters_as_bucket_view": True,
    },
}


def average_in_rank_order(model: nn.Module) -> None:
    """What DDP does, with the sum taken in the order of ranks."""
    for param in model.parameters():
        mine = param.grad if param.grad is not None else torch.zeros_like(param)
        everyone = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine * (1.0 / dist.get_world_size()))
        total = everyone[0]
        for theirs in everyone[1:]:
            total = total + theirs
        has = torch.tensor(param.grad is not None)
        dist.all_reduce(has, op=dist.ReduceOp.MAX)
        param.grad = total if has else None


def train_unsharded(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        average_in_rank_order(model)
        optimizer.step()


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


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_params_used_on_some_ranks_or_on_none_equal_the_unsharded(policy: str) -> None:
    def backward(model: nn.Module, step: int) -> None:
        loss_of(model, step).backward()
        params = list(model.parameters())
        params[step % 6].grad = None
        if dist.get_rank() == step % 2:
            params[(step + 1) % 6].grad = None

    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
    for step in range(8):
        plain.zero_grad()
        backward(reference, step)
        average_in_rank_order(reference)
        plain.step()
        zero.zero_grad()
        backward(model, step)
        zero.step()
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_gradients_of_micro_batches_add_up_before_one_reduction(policy: str) -> None:
    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **POLICIES[policy])
    for step in range(4):
        for trained in (reference, model):
            for micro in range(3):
                trained(batch(3 * step + micro)).square().mean().backward()
        average_in_rank_order(reference)
        plain.step()
        plain.zero_grad()
        zero.step()  # consumes the gradients
    assert_same_params(model, reference)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_a_step_moves_twice_the_parameters_once_around(policy: str) -> None:
    """S * (N - 1) / N bytes of gradients out per rank, and as much for each byte of parameters that others receive."""
    world_size = dist.get_world_size()
    params = [nn.Parameter(torch.ones(96)) for _ in range(60 * world_size)]
    zero = sharded(params, torch.optim.SGD, **POLICIES[policy])
    for param in params:
        param.grad = torch.ones_like(param)
    with counted() as traffic:
        zero.step()
    size = sum(param.nbytes for param in params)
    padding = 1.34 if policy == "by element, small buckets" else 1.01
    assert traffic.nbytes("isend") <= padding * size * (world_size - 1) / world_size
    assert traffic.nbytes("broadcast") <= padding * size / world_size
    assert traffic.nbytes("all_reduce") == 0


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


@run_ranks(2, 3)
def test_an_inf_on_one_rank_lets_all_skip_before_it_is_averaged_in() -> None:
    for policy in POLICIES.values():
        model = make_model()
        zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **policy)
        before = [p.detach().clone() for p in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss_of(model, 0)).backward()
        if dist.get_rank() == 1:
            next(model.parameters()).grad[0, 0] = torch.inf
        scaler.step(zero)
        scaler.update()
        assert_equal([p.detach() for p in model.parameters()], before)


@run_ranks(2, 3)
def test_a_failing_update_leaves_equal_replicas_and_raises_everywhere() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            if dist.get_rank() == 1:
                raise FloatingPointError("it went wrong")
            return result

    model = make_model()
    zero = sharded(model.parameters(), Fails, lr=0.1, sharding=Sharding(gradients=True))
    loss_of(model, 0).backward()
    texts = raises_everywhere(zero.step)
    assert all("it went wrong" in t for t in texts)
    assert_replicas_equal(model.parameters())


@run_ranks(2)
def test_a_sparse_gradient_is_refused_on_every_rank() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    zero = sharded(table.parameters(), torch.optim.SGD, lr=0.1, sharding=Sharding(gradients=True))
    table(torch.tensor([1, 2])).sum().backward()
    texts = raises_everywhere(zero.step)
    assert all("param 0: its gradient is sparse" in t for t in texts)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_clipping_equals_the_unsharded_and_returns_the_same_norm_on_all_ranks(
    policy: str, norm_type: float
) -> None:
    """Whole parameters: to the bit. Parts: norms are summed in another order, over fewer than 300 elements; each of
    at most 300 additions rounds by at most half a unit, so 300 eps bounds the relative error of a sum of powers, and
    with it that of the norm and of a step taken with it."""
    reference, model = make_model(), make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **POLICIES[policy])
    for step in range(3):
        plain.zero_grad()
        loss_of(reference, step).backward()
        average_in_rank_order(reference)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        plain.step()
        zero.zero_grad()
        loss_of(model, step).backward()
        norm = zero.clip_grad_norm_(0.01, norm_type)
        zero.step()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, norm)
        assert_equal(everyone, [everyone[0]] * dist.get_world_size())
        if "element" in policy:
            bound = 300 * torch.finfo(torch.float32).eps
            torch.testing.assert_close(norm, expected, rtol=bound, atol=0)
            for param, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(param, other, rtol=0, atol=3 * bound * 0.1 * 0.01)
        else:
            assert_equal(norm, expected)
            assert_same_params(model, reference)


@run_ranks(2, 3)
def test_clipping_with_unused_params_equals_the_unsharded_to_the_bit() -> None:
    reference, model = make_model(), make_model()
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, sharding=Sharding(gradients=True))
    for trained in (reference, model):
        loss_of(trained, 0).backward()
        list(trained.parameters())[1].grad = None
    average_in_rank_order(reference)
    assert_equal(zero.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(reference.parameters(), 0.01))


@run_ranks(1, 2)
def test_clipping_without_sharded_gradients_is_the_frameworks_own() -> None:
    reference, model = ddp(make_model()), ddp(make_model())
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1)
    loss_of(reference, 0).backward()
    loss_of(model, 0).backward()
    assert_equal(zero.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_equal(param.grad, other.grad)


@run_ranks(1, 2, 3)
def test_a_norm_that_is_not_finite_raises_on_every_rank_if_asked_to() -> None:
    model = make_model()
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, sharding=Sharding(gradients=True))
    loss_of(model, 0).backward()
    if dist.get_rank() == 0:
        next(model.parameters()).grad[0, 0] = torch.inf
    texts = raises_everywhere(lambda: zero.clip_grad_norm_(1.0, error_if_nonfinite=True))
    assert all(
        "RuntimeError: the total norm of order 2.0 of the gradients is inf" in t for t in texts
    )


@run_ranks(2, 3)
def test_a_backward_between_clipping_and_step_raises_on_every_rank() -> None:
    model = make_model()
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, sharding=Sharding(gradients=True))
    loss_of(model, 0).backward()
    zero.clip_grad_norm_(1.0)
    loss_of(model, 1).backward()
    texts = raises_everywhere(zero.step)
    assert all("a backward added to its gradient after clip_grad_norm_()" in t for t in texts)
    zero.zero_grad()
    loss_of(model, 1).backward()
    zero.step()


@run_ranks(2)
def test_clipping_after_unscaling_equals_the_unsharded() -> None:
    def run(model: nn.Module, optimizer: Any, clip: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            clip()
            scaler.step(optimizer)
            scaler.update()

    reference, model = ddp(make_model()), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(
        model.parameters(), torch.optim.AdamW, lr=0.01, sharding=Sharding(gradients=True)
    )
    run(reference, plain, lambda: nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
    run(model, zero, lambda: zero.clip_grad_norm_(0.01))
    assert_same_params(model, reference.module)


@pytest.mark.parametrize("fused", [False, True])
@run_ranks(2, 3)
def test_training_goes_on_rightly_after_an_inf_on_one_rank_parted_the_scales(fused: bool) -> None:
    """Scales are powers of two, so scaling and dividing round nothing."""
    reference, model = make_model(), make_model()
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01, fused=fused)
    zero = sharded(
        model.parameters(),
        torch.optim.AdamW,
        lr=0.01,
        fused=fused,
        sharding=Sharding(gradients=True),
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=2)
    for step in range(6):
        if step != 1:
            train_unsharded(reference, plain, range(step, step + 1))
        zero.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 1 and dist.get_rank() == 0:
            next(model.parameters()).grad.fill_(torch.inf)
        scaler.step(zero)
        scaler.update()
    scales: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(scales, scaler.get_scale())
    assert len(set(scales)) > 1
    assert_same_params(model, reference)
