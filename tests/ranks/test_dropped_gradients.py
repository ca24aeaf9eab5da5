"""Backwards that fail, and gradients that are dropped: on all ranks together, or all raise at the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt.testing import run_ranks
from tests.ranks.averaging import (
    POLICIES,
    average_in_rank_order,
    train_sharded,
    train_unsharded,
)
from tests.ranks.training import (
    assert_same_params,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
)


class _Fails(torch.autograd.Function):
    """The identity, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ArithmeticError("out of luck")


def _fail_half_way(model: nn.Module, step: int) -> None:
    """Run a backward that ends between the layers."""
    assert isinstance(model, nn.Sequential)
    x = torch.full((2, 6), float(step + 1))
    loss = model[2:](_Fails.apply(model[:2](x))).sum()
    with pytest.raises(ArithmeticError):
        loss.backward()


def _made(model: nn.Module, policy: str) -> Any:
    return sharded(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, **POLICIES[policy])


@pytest.mark.parametrize("failing", [[0], [1], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_after_a_backward_that_failed_anywhere_and_zero_grad_everywhere_training_goes_on(
    policy: str, failing: list[int]
) -> None:
    reference, model = make_model(), make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    zero = _made(model, policy)
    train_unsharded(reference, plain, range(2))
    train_sharded(model, zero, range(2))
    if dist.get_rank() in failing:
        _fail_half_way(model, 2)
    else:
        loss_of(model, 2).backward()
    zero.zero_grad()
    train_unsharded(reference, plain, range(3, 5))
    train_sharded(model, zero, range(3, 5))
    assert_same_params(model, reference)


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_gradients_dropped_on_one_rank_only_raise_at_the_step_of_all(policy: str) -> None:
    model = make_model()
    zero = _made(model, policy)
    train_sharded(model, zero, range(2))
    loss_of(model, 2).backward()
    before = [param.detach().clone() for param in model.parameters()]
    if dist.get_rank() == 1:
        zero.zero_grad()
    texts = raises_everywhere(zero.step)
    assert all("were dropped 1 times on rank 1 and 0 times on rank 0" in text for text in texts)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2, 3)
def test_after_that_zero_grad_everywhere_lets_training_go_on(policy: str) -> None:
    reference, model = make_model(), make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    zero = _made(model, policy)
    loss_of(model, 2).backward()
    if dist.get_rank() == 0:
        zero.zero_grad()
    assert all(raises_everywhere(zero.step))
    zero.zero_grad()
    train_unsharded(reference, plain, range(3, 5))
    train_sharded(model, zero, range(3, 5))
    assert_same_params(model, reference)


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(1, 2, 3)
def test_gradients_of_one_module_dropped_by_it_on_all_ranks_do_not_count(policy: str) -> None:
    """``module.zero_grad()`` of a part of the model, between backward and step."""
    reference, model = make_model(), make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    zero = sharded(model.parameters(), torch.optim.SGD, lr=0.1, **POLICIES[policy])
    for step in range(3):
        plain.zero_grad()
        loss_of(reference, step).backward()
        average_in_rank_order(reference)
        loss_of(model, step).backward()
        for part in (reference[2], model[2]):  # type: ignore[index]
            part.zero_grad()
        plain.step()
        zero.step()
    assert_same_params(model, reference)
