"""Master weights: low-precision parameters, updated in float32 on their owners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import Sharding
from shardopt.testing import run_ranks
from tests.ranks.averaging import average
from tests.ranks.training import (
    assert_equal,
    batch,
    full_state_dict,
    make_model,
    sharded,
)

POLICIES: dict[str, dict[str, Any]] = {
    "by parameter": {"granularity": "parameter"},
    "by parameter, views": {"granularity": "parameter", "views": True},
    "by element": {"granularity": "element", "views": True},
    "small buckets": {"granularity": "element", "views": True, "bucket_mb": 0.0005},
    "in backward": {"granularity": "element", "views": True, "step_in_backward": True},
}


def make(dtype: torch.dtype) -> nn.Module:
    return make_model().to(dtype)


def policy(name: str, *, gradients: bool = True, **changes: Any) -> dict[str, Any]:
    options = {**POLICIES[name], **changes}
    views = options.pop("views", False)
    sharding = Sharding(gradients=gradients, master_dtype=torch.float32, **options)
    return {"parameters_as_bucket_view": views, "sharding": sharding}


def loss_of(model: nn.Module, step: int) -> Tensor:
    dtype = next(model.parameters()).dtype
    return model(batch(step).to(dtype)).float().square().mean()


class Reference:
    """Keeps float32 masters of everything, and rounds them into the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.01)

    def step(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            master.grad = average(param.grad).float()
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.masters, strict=True):
                param.copy_(master)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", POLICIES)
@run_ranks(1, 2, 3)
def test_training_equals_full_masters_to_the_bit(name: str, dtype: torch.dtype) -> None:
    reference, model = Reference(make(dtype)), make(dtype)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **policy(name))
    train(reference.model, reference, range(6))
    train(model, zero, range(6))
    assert_equal(values(model), values(reference.model))
    state = full_state_dict(zero)["state"]
    for index, master in enumerate(reference.masters):
        assert_equal(state[index]["master_weight"], master.detach())
        assert_equal(state[index]["exp_avg"], reference.optimizer.state[master]["exp_avg"])


@pytest.mark.parametrize("name", ["by parameter", "by parameter, views", "by element"])
@run_ranks(1, 2, 3)
def test_averages_made_by_somebody_else_train_masters_too(name: str) -> None:
    reference, model = Reference(make(torch.bfloat16)), make(torch.bfloat16)
    options = policy(name, gradients=False)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **options)
    train(reference.model, reference, range(4))
    for step in range(4):
        loss_of(model, step).backward()
        for param in model.parameters():
            param.grad = average(param.grad)
        zero.step()
        zero.zero_grad()
    assert_equal(values(model), values(reference.model))


@pytest.mark.parametrize("other", ["by parameter", "by element"])
@run_ranks(1, 2, 3)
def test_a_state_dict_goes_on_at_another_granularity_to_the_bit(other: str) -> None:
    model = make(torch.bfloat16)
    zero = sharded(model.parameters(), torch.optim.AdamW, lr=0.01, **policy("small buckets"))
    train(model, zero, range(3))
    saved = full_state_dict(zero)
    resumed = make(torch.bfloat16)
    again = sharded(resumed.parameters(), torch.optim.AdamW, lr=0.01, **policy(other))
    again.load_state_dict(saved)
    resumed.load_state_dict(model.state_dict())  # as loaded, what masters round to
    train(model, zero, range(3, 6))
    train(resumed, again, range(3, 6))
    assert_equal(values(resumed), values(model))
    assert_equal(full_state_dict(again)["state"], full_state_dict(zero)["state"])


@run_ranks(1, 2, 3)
def test_masters_follow_parameters_that_somebody_else_changes() -> None:
    for name in ("by parameter", "by parameter, views", "by element"):
        model, fresh = make(torch.bfloat16), make(torch.bfloat16)
        zero = sharded(model.parameters(), torch.optim.SGD, lr=0.5, **policy(name))
        train(model, zero, range(2))
        with torch.no_grad():
            for param, other in zip(model.parameters(), fresh.parameters(), strict=True):
                other.mul_(3).add_(2)  # far from what training has made of it
                param.copy_(other)
        train(model, zero, range(2, 3))
        other = sharded(fresh.parameters(), torch.optim.SGD, lr=0.5, **policy(name))
        train(fresh, other, range(2, 3))
        assert_equal(values(model), values(fresh))


@run_ranks(2, 3)
def test_wire_and_sum_dtypes_round_where_they_say() -> None:
    """Gradients of float32 parameters travel in bfloat16 and are added up in float32."""
    model = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    sharding = Sharding(gradients=True, reduce_dtype=torch.bfloat16, sum_dtype=torch.float32)
    zero = sharded(model.parameters(), torch.optim.SGD, lr=1.0, sharding=sharding)
    generator = torch.Generator().manual_seed(dist.get_rank())
    factor = torch.randn(8, 8, generator=generator)
    (model.weight * factor).sum().backward()
    zero.step()
    everyone = [torch.empty_like(factor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, factor)
    num_ranks = dist.get_world_size()
    scaled = [(one * (1.0 / num_ranks)).to(torch.bfloat16).float() for one in everyone]
    if num_ranks == 2:  # a bucket of one parameter: sent as it is, the sum scaled
        scaled = [one.to(torch.bfloat16).float() * 0.5 for one in everyone]
    expected = scaled[0]
    for one in scaled[1:]:
        expected = expected + one
    assert_equal(model.weight.detach(), -expected)


@pytest.mark.parametrize("stage", [1, 2])
@run_ranks(1, 2, 4)
def test_memory_is_that_of_the_zero_paper(stage: int) -> None:
    """Bytes per parameter with Adam: 4 + 12 / N in stage 1, 2 + 14 / N in stage 2; parts share padding below 1 %."""
    world_size = dist.get_world_size()
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)]).to(torch.bfloat16)
    zero = sharded(
        model.parameters(),
        torch.optim.Adam,
        parameters_as_bucket_view=True,
        sharding=Sharding(
            granularity="element", gradients=stage == 2, master_dtype=torch.float32, bucket_mb=0.1
        ),
    )

    def backward() -> None:
        model(torch.ones(2, 128, dtype=torch.bfloat16)).float().sum().backward()

    backward()
    zero.step()
    zero.zero_grad()
    backward()
    params = list(model.parameters())
    nbytes = sum(param.nbytes for param in params)
    if stage == 1:
        nbytes += sum(param.grad.nbytes for param in params)
    else:
        nbytes += sum(bucket.shard.nbytes for bucket in zero.shards.gradient_buckets)
    nbytes += sum(s.masters.nbytes for s in zero.shards.sections if s.masters is not None)
    nbytes += sum(t.nbytes for entry in zero.state.values() for t in entry.values())
    numel = sum(param.numel() for param in params)
    expected = {1: 4 + 12 / world_size, 2: 2 + 14 / world_size}[stage]
    assert nbytes / numel == pytest.approx(expected, rel=0.01)
    zero.step()
