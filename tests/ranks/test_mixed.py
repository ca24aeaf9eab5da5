"""Granularity per param group, and packing by cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardopt import Sharding, newton_schulz_work
from shardopt.testing import run_ranks
from tests.ranks.averaging import average_in_rank_order, train_sharded, train_unsharded
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    full_state_dict,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
)

ELEMENT = Sharding(gradients=True, granularity="element")


class OwnAdam(torch.optim.Adam):
    """An element-wise optimizer that is not one of torch's."""


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    params = list(model.parameters())
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def mixed_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices, others = split(model)
    return [{"params": matrices, "granularity": "parameter", "lr": 0.02}, {"params": others}]


@pytest.mark.parametrize("bucket_mb", [25.0, 0.0005])
@pytest.mark.parametrize("in_backward", [False, True])
@run_ranks(1, 2, 3)
def test_groups_of_both_granularities_equal_the_unsharded(
    bucket_mb: float, in_backward: bool
) -> None:
    reference, model = make_model(), make_model()
    matrices, others = split(reference)
    plain = torch.optim.AdamW([{"params": matrices, "lr": 0.02}, {"params": others}], lr=0.01)
    sharding = Sharding(
        gradients=True,
        granularity="element",
        bucket_mb=bucket_mb,
        step_in_backward=in_backward,
    )
    zero = sharded(
        mixed_groups(model),
        torch.optim.AdamW,
        lr=0.01,
        parameters_as_bucket_view=True,
        sharding=sharding,
    )
    train_unsharded(reference, plain, range(5))
    train_sharded(model, zero, range(5))
    assert_same_params(model, reference)
    assert_equal(full_state_dict(zero), plain.state_dict())
    assert all("granularity" not in group for group in zero.param_groups)


@run_ranks(1, 2, 3)
def test_muon_on_matrices_beside_adamw_on_the_rest_equals_both_unsharded() -> None:
    reference, model = make_model(), make_model()
    matrices, others = split(reference)
    plain = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
    matrices, others = split(model)
    muon = sharded(
        matrices,
        torch.optim.Muon,
        lr=0.02,
        sharding=Sharding(gradients=True, cost=newton_schulz_work),
    )
    adamw = sharded(
        others, torch.optim.AdamW, lr=0.01, parameters_as_bucket_view=True, sharding=ELEMENT
    )
    for step in range(5):
        reference.zero_grad()
        loss_of(reference, step).backward()
        average_in_rank_order(reference)
        for optimizer in plain:
            optimizer.step()
        loss_of(model, step).backward()
        muon.step()
        adamw.step()
    assert_same_params(model, reference)


@run_ranks(2)
def test_costs_decide_who_owns_what_and_the_imbalance_is_reported() -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in [(8, 8), (2, 32), (64,)]]
    by_numel = sharded(params, torch.optim.SGD, lr=0.1)
    assert by_numel.imbalance == pytest.approx(128 / 96)
    costs = {(8, 8): 10.0, (2, 32): 6.0, (64,): 4.0}
    by_cost = sharded(
        params, torch.optim.SGD, lr=0.1, sharding=Sharding(cost=lambda spec: costs[spec.shape])
    )
    assert by_cost.shards.owners == [0, 1, 1]
    assert by_cost.imbalance == 1.0


@run_ranks(1, 2, 3)
def test_an_optimizer_that_one_vouches_for_is_cut_by_element() -> None:
    model, reference = make_model(), make_model()
    plain = OwnAdam(reference.parameters(), lr=0.01)
    sharding = Sharding(gradients=True, granularity="element", elementwise=True)
    zero = sharded(
        model.parameters(), OwnAdam, lr=0.01, parameters_as_bucket_view=True, sharding=sharding
    )
    train_unsharded(reference, plain, range(4))
    train_sharded(model, zero, range(4))
    assert_same_params(model, reference)


@run_ranks(1, 2)
def test_optimizers_that_look_at_whole_parameters_are_refused_whoever_vouches() -> None:
    sharding = Sharding(granularity="element", elementwise=True)
    for optimizer_class in (torch.optim.Adafactor, torch.optim.Muon):
        texts = raises_everywhere(
            lambda optimizer_class=optimizer_class: sharded(
                make_model(bias=False).parameters(),
                optimizer_class,
                parameters_as_bucket_view=True,
                sharding=sharding,
            )
        )
        assert all(
            f"{optimizer_class.__name__} looks at whole parameters" in text for text in texts
        )
        assert all("use granularity='parameter'" in text for text in texts)


@run_ranks(1, 2)
def test_an_unknown_optimizer_names_both_ways_out() -> None:
    texts = raises_everywhere(
        lambda: sharded(
            make_model().parameters(), OwnAdam, parameters_as_bucket_view=True, sharding=ELEMENT
        )
    )
    assert all("OwnAdam is not known to update every element on its own" in t for t in texts)
    assert all("granularity='parameter'" in t and "elementwise=True" in t for t in texts)


@run_ranks(1, 2, 3)
def test_state_is_keyed_by_the_parameters_of_the_model_and_live() -> None:
    model = make_model()
    zero = sharded(
        model.parameters(),
        torch.optim.AdamW,
        lr=0.01,
        parameters_as_bucket_view=True,
        sharding=ELEMENT,
    )
    for step in range(2):
        loss_of(model, step).backward()
        zero.step()
    owned = dict(zero.state.items())
    assert set(owned) <= set(model.parameters())
    total = sum(entry["exp_avg"].numel() for entry in owned.values())
    assert total == sum(part.numel for part in zero.shards.parts)
    for part in zero.shards.parts:
        param = zero.shards.params[part.param]
        shape = tuple(param.shape) if part.numel == param.numel() else (part.numel,)
        assert tuple(owned[param]["exp_avg"].shape) == shape
        owned[param]["exp_avg"].zero_()
        assert not zero.state[param]["exp_avg"].any()
        with pytest.raises(TypeError):
            zero.state[param]["other"] = 1
