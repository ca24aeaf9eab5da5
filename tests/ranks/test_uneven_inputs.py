"""Training on uneven inputs with Join: what comes out is what plain DDP with the unsharded optimizer gives."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from shardopt import OverlapError
from shardopt.testing import run_ranks
from tests.ranks.training import (
    assert_equal,
    assert_replicas_equal,
    assert_same_params,
    ddp,
    full_state_dict,
    loss_of,
    make_model,
    sharded,
    train,
)


def _epoch(model: nn.Module, optimizer: Any, joinables: list[Any], steps: range) -> None:
    with warnings.catch_warnings(), Join(joinables):  # Join resets warning filters when it ends
        train(model, optimizer, steps)


ORDERS = {
    "ddp first": lambda model, zero: [model, zero],
    "zero first": lambda model, zero: [zero, model],
}


def _num_inputs(pattern: str, rank: int | None = None) -> int:
    rank, world_size = dist.get_rank() if rank is None else rank, dist.get_world_size()
    return {
        "rising": 2 + 3 * rank,
        "falling": 2 + 3 * (world_size - 1 - rank),
        "even": 3,
        "none on rank 0": 4 * min(rank, 1),
    }[pattern]


def _share_state(optimizer: torch.optim.Optimizer, pattern: str) -> None:
    """Give every rank the state of one that saw every step: plain DDP leaves those of its replicas different."""
    counts = [_num_inputs(pattern, rank) for rank in range(dist.get_world_size())]
    box = [optimizer.state_dict()]
    dist.broadcast_object_list(box, src=counts.index(max(counts)))
    optimizer.load_state_dict(box[0])


@pytest.mark.parametrize("pattern", ["rising", "falling", "even", "none on rank 0"])
@pytest.mark.parametrize("order", ORDERS)
@run_ranks(2, 3)
def test_uneven_inputs_with_ddp_equal_the_unsharded_optimizer(order: str, pattern: str) -> None:
    num_inputs = _num_inputs(pattern)
    reference = ddp(make_model())
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for epoch in range(2):
        _epoch(reference, plain, [reference], range(10 * epoch, 10 * epoch + num_inputs))
        _share_state(plain, pattern)
    for view in (False, True):
        model = ddp(make_model())
        zero = sharded(
            model.parameters(), torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=view
        )
        for epoch in range(2):
            steps = range(10 * epoch, 10 * epoch + num_inputs)
            _epoch(model, zero, ORDERS[order](model, zero), steps)
        assert_same_params(model, reference)
        assert_replicas_equal(model.parameters())
        assert_equal(full_state_dict(zero), plain.state_dict())
        train(model, zero, range(90, 92))  # after Join a step announces nothing and hangs nobody
    assert zero.join_process_group is dist.group.WORLD
    assert zero.join_device == torch.device("cpu")


@run_ranks(2)
def test_a_constant_gradient_moves_a_weight_by_the_average_over_ranks_with_inputs() -> None:
    def make() -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    num_inputs = [2, 5][dist.get_rank()]
    model = ddp(make())
    zero = sharded(model.parameters(), torch.optim.SGD, lr=1.0)
    with warnings.catch_warnings(), Join([model, zero]):
        for _ in range(num_inputs):
            zero.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            zero.step()
    assert model.module.weight.item() == -3.5  # 2 steps of gradient 1, then 3 of (1 + 0) / 2


@run_ranks(2, 3)
def test_rates_changed_while_a_rank_has_no_inputs_reach_its_shard() -> None:
    num_inputs = _num_inputs("rising")
    results = []
    for make in (torch.optim.AdamW, lambda params, **kw: sharded(params, torch.optim.AdamW, **kw)):
        model = ddp(make_model())
        optimizer = make(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        joinables = [model] if make is torch.optim.AdamW else [model, optimizer]
        with warnings.catch_warnings(), Join(joinables):
            for step in range(num_inputs):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                schedule.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert_equal(results[1], results[0])


@run_ranks(2, 3)
def test_join_of_the_optimizer_alone_applies_the_gradients_of_a_rank_with_inputs() -> None:
    def grad(step: int) -> float:
        return float(step + 1)

    params = [nn.Parameter(torch.zeros(n)) for n in (3, 4, 5)]
    zero = sharded(params, torch.optim.SGD, lr=1.0)
    num_inputs = _num_inputs("rising")
    with warnings.catch_warnings(), Join([zero]):
        for step in range(num_inputs):
            for param in params:
                param.grad = torch.full_like(param, grad(step))
            zero.step()
    longest = 2 + 3 * (dist.get_world_size() - 1)
    total = sum(grad(step) for step in range(longest))
    assert all(torch.equal(p.detach(), torch.full_like(p, -total)) for p in params)


@run_ranks(2, 3)
def test_two_sharded_optimizers_join_in_any_order() -> None:
    num_inputs = _num_inputs("falling")

    def split(model: nn.Module) -> tuple[list[Any], list[Any]]:
        params = list(model.parameters())
        return params[::2], params[1::2]

    def run(model: nn.Module, optimizers: list[Any], joinables: list[Any]) -> None:
        with warnings.catch_warnings(), Join(joinables):
            for step in range(num_inputs):
                model.zero_grad()
                loss_of(model, step).backward()
                for optimizer in optimizers:
                    optimizer.step()

    reference, model = ddp(make_model()), ddp(make_model())
    weights, biases = split(reference)
    plain = [torch.optim.AdamW(weights, lr=0.01), torch.optim.SGD(biases, lr=0.1)]
    run(reference, plain, [reference])
    weights, biases = split(model)
    zeros = [sharded(weights, torch.optim.AdamW, lr=0.01), sharded(biases, torch.optim.SGD, lr=0.1)]
    run(model, zeros, [zeros[0], model, zeros[1]])
    assert_same_params(model, reference)


@run_ranks(2, 3)
def test_grad_scaler_under_join_equals_the_unsharded() -> None:
    num_inputs = _num_inputs("rising")
    results = []
    for is_sharded in (False, True):
        model = ddp(make_model())
        options: dict[str, Any] = {"lr": 0.01, "fused": True}
        if is_sharded:
            optimizer: Any = sharded(model.parameters(), torch.optim.AdamW, **options)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with warnings.catch_warnings(), Join([model, optimizer] if is_sharded else [model]):
            for step in range(num_inputs):
                optimizer.zero_grad()
                scaler.scale(loss_of(model, step)).backward()
                scaler.step(optimizer)
                scaler.update()
        results.append([p.detach().clone() for p in model.parameters()])
    assert_equal(results[1], results[0])


@run_ranks(2)
def test_gradients_as_bucket_views_work_under_join() -> None:
    num_inputs = _num_inputs("rising")
    reference = ddp(make_model(), gradient_as_bucket_view=True)
    model = ddp(make_model(), gradient_as_bucket_view=True)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
    _epoch(reference, plain, [reference], range(num_inputs))
    _epoch(model, zero, [model, zero], range(num_inputs))
    assert_same_params(model, reference)


@run_ranks(2)
def test_early_termination_raises_on_every_rank() -> None:
    model = ddp(make_model())
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01)
    num_inputs = _num_inputs("rising")

    def run() -> None:
        with Join([model, zero], throw_on_early_termination=True):
            for step in range(num_inputs):
                loss_of(model, step).backward()
                zero.step()

    with warnings.catch_warnings(), pytest.raises(RuntimeError, match="exhaust"):
        run()


@run_ranks(2)
def test_join_with_overlap_is_refused() -> None:
    zero = sharded(make_model().parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    with pytest.raises(OverlapError, match="Join cannot be combined with steps in backward"):
        Join([zero])


@run_ranks(2)
def test_joinables_in_a_tuple_are_refused_where_their_order_cannot_work() -> None:
    model = ddp(make_model())
    zero = sharded(model.parameters(), torch.optim.AdamW)
    with pytest.raises(TypeError, match="pass the joinables in a list"):
        Join((zero, model))
