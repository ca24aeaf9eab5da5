"""What torch has for gradients, on placeholders of sharded ones: clipping and loss scaling."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import Sharding
from shardopt.testing import run_ranks
from tests.ranks.averaging import average_in_rank_order
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    ddp,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
)

POLICIES: dict[str, dict[str, Any]] = {
    "by parameter": {"sharding": Sharding(gradients=True)},
    "small buckets": {"sharding": Sharding(gradients=True, bucket_mb=0.0005)},
    "by element": {
        "sharding": Sharding(gradients=True, granularity="element"),
        "parameters_as_bucket_view": True,
    },
}
EXACT = ("by parameter", "small buckets")
BOUND = 300 * torch.finfo(torch.float32).eps
"""Partial norms are added up in another order, over fewer than 300 elements; each addition rounds by half a unit."""


def make(model: nn.Module, policy: str, **options: Any) -> Any:
    options = {"lr": 0.1, **options}
    return sharded(model.parameters(), torch.optim.SGD, **options, **POLICIES[policy])


def assert_close(policy: str, actual: Any, expected: Any) -> None:
    bound = 0 if policy in EXACT else BOUND
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False, True])
@run_ranks(1, 2, 3)
def test_stock_clipping_by_norm_equals_that_of_averages(
    policy: str, norm_type: float, foreach: bool | None
) -> None:
    reference, model = make_model(), make_model()
    plain, zero = torch.optim.SGD(reference.parameters(), lr=0.1), make(model, policy)
    for step in range(2):
        reference.zero_grad()
        loss_of(reference, step).backward()
        average_in_rank_order(reference)
        clip = nn.utils.clip_grad_norm_
        expected = clip(reference.parameters(), 0.01, norm_type, foreach=foreach)
        plain.step()
        loss_of(model, step).backward()
        norm = clip(model.parameters(), 0.01, norm_type, foreach=foreach)
        assert_close(policy, norm, expected)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, norm)
        assert_equal(everyone, everyone[:1] * dist.get_world_size())
        zero.step()
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(policy, param, other)


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_stock_clipping_by_value_equals_that_of_averages(policy: str, foreach: bool | None) -> None:
    reference, model = make_model(), make_model()
    plain, zero = torch.optim.SGD(reference.parameters(), lr=0.1), make(model, policy)
    loss_of(reference, 0).backward()
    average_in_rank_order(reference)
    nn.utils.clip_grad_value_(reference.parameters(), 0.01, foreach=foreach)
    plain.step()
    loss_of(model, 0).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
    zero.step()
    assert_same_params(model, reference)


@run_ranks(2, 3)
def test_gradients_left_in_place_by_no_sync_are_reduced_before_they_are_clipped() -> None:
    reference, model = make_model(), make_model()
    zero = make(model, "by parameter")
    loss_of(reference, 0).backward()
    average_in_rank_order(reference)
    with zero.no_sync():
        loss_of(model, 0).backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    assert_equal(nn.utils.clip_grad_norm_(model.parameters(), 0.01), expected)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("policy", EXACT)
@run_ranks(2)
def test_scaled_training_with_an_inf_on_one_rank_equals_ddp(
    policy: str, fused: bool, clips: bool
) -> None:
    def run(model: nn.Module, optimizer: Any) -> float:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            if step == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
        return float(scaler.get_scale())

    reference, model = ddp(make_model()), make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, fused=fused)
    expected = run(reference, plain)
    scale = run(model, make(model, policy, fused=fused))
    scales: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(scales, scale)
    assert scales == [expected] * dist.get_world_size()
    assert_same_params(model, reference.module)


def pickled(gradient: Any) -> None:
    torch.save(gradient, io.BytesIO())


OTHER_USES: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda gradient: gradient + 1,
    "a sum": lambda gradient: gradient.sum(),
    "a norm along a dimension": lambda gradient: gradient.norm(dim=0),
    "numpy": lambda gradient: gradient.numpy(),
    "a copy": lambda gradient: gradient.clone(),
    "deepcopy": copy.deepcopy,
    "pickling": pickled,
}


@pytest.mark.parametrize("use", OTHER_USES)
@run_ranks(1, 2)
def test_any_other_use_raises_with_the_way_out_and_changes_nothing(use: str) -> None:
    model, reference = make_model(), make_model()
    zero, other = make(model, "by parameter"), make(reference, "by parameter")
    loss_of(model, 0).backward()
    loss_of(reference, 0).backward()
    gradient = next(model.parameters()).grad
    assert tuple(gradient.shape) == tuple(next(model.parameters()).shape)
    assert repr(gradient).startswith("ShardedGradient((11, 6), torch.float32")
    texts = raises_everywhere(lambda: OTHER_USES[use](gradient))
    assert all(text.startswith(("RuntimeError", "TypeError")) for text in texts)
    zero.step()
    other.step()
    assert_same_params(model, reference)
