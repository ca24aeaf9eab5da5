"""The reference for sharded gradients: the unsharded optimizer on gradients averaged in the order of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardopt import Sharding
from tests.ranks.training import assert_equal, full_state_dict, loss_of, sharded

POLICIES: dict[str, dict[str, Any]] = {
    "by parameter": ({"sharding": Sharding(gradients=True)}),
    "by parameter, views": {
        "sharding": Sharding(gradients=True),
        "parameters_as_bucket_view": True,
    },
    "by parameter, small buckets": {"sharding": Sharding(gradients=True, bucket_mb=0.0005)},
    "by element": {
        "sharding": Sharding(gradients=True, granularity="element"),
        "parameters_as_bucket_view": True,
    },
    "by element, small buckets": {
        "sharding": Sharding(gradients=True, granularity="element", bucket_mb=0.0005),
        "parameters_as_bucket_view": True,
    },
    "by element, small buckets, over the network": {
        "sharding": Sharding(
            gradients=True, granularity="element", bucket_mb=0.0005, shared_memory=False
        ),
        "parameters_as_bucket_view": True,
    },
}

Backward = Callable[[Any, int], Any]
"""(model, step) -> ignored: lets the gradients of one step arrive in ``param.grad``."""


def average(tensor: Tensor) -> Tensor:
    """The mean over ranks, summed in their order."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor * (1.0 / dist.get_world_size()))
    total = everyone[0]
    for theirs in everyone[1:]:
        total = total + theirs
    return total


def on_any_rank(flag: bool) -> bool:
    has = torch.tensor(flag)
    dist.all_reduce(has, op=dist.ReduceOp.MAX)
    return bool(has)


def average_in_rank_order(model: nn.Module | Iterable[nn.Parameter]) -> None:
    """What DDP does, with the sum taken in the order of ranks; no gradient counts as zero where another rank has one."""
    params = model.parameters() if isinstance(model, nn.Module) else model
    for param in params:
        mine = param.grad if param.grad is not None else torch.zeros_like(param)
        total = average(mine.detach())
        param.grad = total if on_any_rank(param.grad is not None) else None


def backward_of_loss(model: Any, step: int) -> None:
    loss_of(model, step).backward()


def train_unsharded(
    model: Any, optimizer: Any, steps: Iterable[int], backward: Backward = backward_of_loss
) -> None:
    """Train on averages of what one or several backwards have added up on each rank."""
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        average_in_rank_order(model)
        optimizer.step()


def add_up_averages(model: nn.Module, backwards: Iterable[Callable[[], Any]]) -> None:
    """Leave in ``param.grad`` the sum of the averages of several backwards."""
    totals: dict[nn.Parameter, Tensor] = {}
    for backward in backwards:
        model.zero_grad()
        backward()
        average_in_rank_order(model)
        for param in model.parameters():
            if param.grad is not None:
                totals[param] = totals[param] + param.grad if param in totals else param.grad
    for param in model.parameters():
        param.grad = totals.get(param)


def train_sharded(
    model: Any, optimizer: Any, steps: Iterable[int], backward: Backward = backward_of_loss
) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()


def assert_trains_alike(
    make: Callable[[], nn.Module],
    backward: Callable[..., Any] = backward_of_loss,
    *,
    average_backward: Backward | None = None,
    steps: Iterable[int] = range(4),
    policies: Mapping[str, dict[str, Any]] = POLICIES,
    optimizer_class: Any = torch.optim.AdamW,
    **options: Any,
) -> None:
    """Parameters and state under each policy are bitwise those of the unsharded optimizer.

    Args:
        make: Makes the model.
        backward: (model, step) -> ignored, for every model.
        average_backward: The same for the unsharded one, if something else leaves averages in ``param.grad``.
        steps: What is handed to ``backward``.
        policies: Arguments of the sharded optimizer, by name.
        optimizer_class: The optimizer.
        **options: Its options.
    """
    options = options or {"lr": 0.01}
    steps = list(steps)
    reference = make()
    plain = optimizer_class(reference.parameters(), **options)
    for step in steps:
        plain.zero_grad()
        if average_backward is None:
            backward(reference, step)
            average_in_rank_order(reference)
        else:
            average_backward(reference, step)
        plain.step()
    expected = [p.detach() for p in reference.parameters()]
    for name, policy in policies.items():
        model = make()
        zero = sharded(model.parameters(), optimizer_class, **options, **policy)
        train_sharded(model, zero, steps, backward)
        assert_equal([p.detach() for p in model.parameters()], expected, name)
        assert_equal(full_state_dict(zero), plain.state_dict(), name)
        assert all(p.grad is None for p in model.parameters())


def with_sharding(policy: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The policy with some fields of its ``Sharding`` replaced."""
    return {**policy, "sharding": replace(policy["sharding"], **changes)}
