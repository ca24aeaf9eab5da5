"""What the TensorPlay rank tests share: a model, data, and the comparison with the unsharded optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorplay as tp
import tensorplay.distributed as dist
from tensorplay import nn

from shardopt.tensorplay import ZeroRedundancyOptimizer


def make_model(*, bias: bool = True) -> Any:
    """A small model, equal on every rank, whose largest parameter is not the first."""
    tp.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 11, bias=bias),
        nn.Tanh(),
        nn.Linear(11, 17, bias=bias),
        nn.Tanh(),
        nn.Linear(17, 3, bias=bias),
    )


def loss_of(model: Any, step: int, rank: int | None = None) -> Any:
    """A loss on inputs that differ between steps and ranks."""
    tp.manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    outputs = model(tp.randn(5, 6))
    return (outputs * outputs).mean()


def average_in_rank_order(model: Any) -> None:
    """Replace gradients by their average over ranks, summed in the order of ranks."""
    world_size = dist.get_world_size()
    for param in model.parameters():
        everyone = [tp.zeros_like(param.detach()) for _ in range(world_size)]
        dist.all_gather(everyone, param.grad.detach() * (1.0 / world_size))
        total = everyone[0]
        for theirs in everyone[1:]:
            total = total + theirs
        param.grad = total


def train(
    model: Any,
    optimizer: Any,
    steps: range,
    *,
    averages: bool = True,
    after_step: Callable[[int], None] | None = None,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if averages:
            average_in_rank_order(model)
        optimizer.step()
        if after_step is not None:
            after_step(step)


def sharded(
    params: Any, optimizer_class: Any, *args: Any, **options: Any
) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optimizer_class, *args, **options)


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    """Equal types, keys, dtypes, shapes and bits, through dicts and sequences."""
    assert type(actual) is type(expected), f"{path}: {type(actual)} is not {type(expected)}"
    if tp.is_tensor(expected):
        assert actual.dtype == expected.dtype, f"{path}: {actual.dtype} is not {expected.dtype}"
        assert tp.equal(actual, expected), f"{path}: {actual} is not {expected}"
    elif isinstance(expected, dict):
        assert set(actual) == set(expected), f"{path}: {list(actual)} are not {list(expected)}"
        for key in expected:
            assert_equal(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{path}: {len(actual)} are not {len(expected)}"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(one, other, f"{path}[{number}]")
    else:
        assert actual == expected, f"{path}: {actual!r} is not {expected!r}"


def values(model: Any) -> list[Any]:
    return [param.detach() for param in model.parameters()]


def full_state_dict(optimizer: Any) -> dict[str, Any]:
    """The consolidated state on every rank."""
    result: list[Any] = []
    for rank in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank():
            result.append(optimizer.state_dict())
    return result[0]


def raises_everywhere(action: Callable[[], Any]) -> list[str]:
    """What ``action`` raised on each rank: ``"Type: text"``, ``""`` for nothing."""
    text = ""
    try:
        action()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return everyone
