"""Several optimizers over one model, each of which reduces the gradients of its own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardopt import Sharding
from shardopt.testing import run_ranks
from tests.ranks.averaging import POLICIES, average_in_rank_order, with_sharding
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    full_state_dict,
    loss_of,
    make_model,
    sharded,
)

Split = Callable[[nn.Module], list[list[nn.Parameter]]]


def _alternating(model: nn.Module) -> list[list[nn.Parameter]]:
    params = list(model.parameters())
    return [params[::2], params[1::2]]


def _halves(model: nn.Module) -> list[list[nn.Parameter]]:
    params = list(model.parameters())
    return [params[len(params) // 2 :], params[: len(params) // 2]]


def _assert_trains_alike(
    make: Callable[[], nn.Module], split: Split, backward: Any, policy: dict[str, Any], steps: range
) -> None:
    kinds: list[Any] = [torch.optim.AdamW, torch.optim.SGD]
    reference, model = make(), make()
    plain = [kind(part, lr=0.01) for kind, part in zip(kinds, split(reference), strict=True)]
    zeros = [
        sharded(part, kind, lr=0.01, **policy)
        for kind, part in zip(kinds, split(model), strict=True)
    ]
    for step in steps:
        reference.zero_grad()
        backward(reference, step)
        average_in_rank_order(reference)
        backward(model, step)
        for optimizer in (*plain, *zeros):
            optimizer.step()
        assert_same_params(model, reference)
    for zero, unsharded in zip(zeros, plain, strict=True):
        assert_equal(full_state_dict(zero), unsharded.state_dict())


@pytest.mark.parametrize("split", [_alternating, _halves])
@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_two_optimizers_side_by_side_equal_the_unsharded(policy: str, split: Split) -> None:
    _assert_trains_alike(
        make_model,
        split,
        lambda model, step: loss_of(model, step).backward(),
        POLICIES[policy],
        range(4),
    )


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_two_optimizers_that_step_in_backward_equal_the_unsharded(policy: str) -> None:
    _assert_trains_alike(
        make_model,
        _halves,
        lambda model, step: loss_of(model, step).backward(),
        with_sharding(POLICIES[policy], step_in_backward=True),
        range(4),
    )


@run_ranks(1, 2, 3)
def test_muon_on_matrices_beside_adamw_by_element_equals_the_unsharded() -> None:
    def split(model: nn.Module) -> list[list[nn.Parameter]]:
        params = list(model.parameters())
        return [[p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]]

    reference, model = make_model(), make_model()
    matrices, others = split(reference)
    plain = [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.02)]
    matrices, others = split(model)
    zeros = [
        sharded(matrices, torch.optim.Muon, lr=0.01, sharding=Sharding(gradients=True)),
        sharded(others, torch.optim.AdamW, lr=0.02, **POLICIES["by element"]),
    ]
    for step in range(6):
        reference.zero_grad()
        loss_of(reference, step).backward()
        average_in_rank_order(reference)
        loss_of(model, step).backward()
        for optimizer in (*plain, *zeros):
            optimizer.step()
    assert_same_params(model, reference)
    for zero, unsharded in zip(zeros, plain, strict=True):
        assert_equal(full_state_dict(zero), unsharded.state_dict())
