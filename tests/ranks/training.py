"""What the rank tests share: a model, data, and the comparison with the unsharded optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardopt import ZeroRedundancyOptimizer


def make_model(*, bias: bool = True) -> nn.Module:
    """A small model, equal on every rank, whose largest parameter is not the first."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 11, bias=bias),
        nn.Tanh(),
        nn.Linear(11, 17, bias=bias),
        nn.Tanh(),
        nn.Linear(17, 3, bias=bias),
    )


def batch(step: int, rank: int | None = None) -> Tensor:
    """Inputs that differ between steps and ranks."""
    generator = torch.Generator().manual_seed(
        1000 * step + (dist.get_rank() if rank is None else rank)
    )
    return torch.randn(5, 6, generator=generator)


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(batch(step)).square().mean()


def train(
    model: nn.Module, optimizer: Any, steps: range, after_step: Callable[[int], None] | None = None
) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if after_step is not None:
            after_step(step)


def ddp(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """DDP with buckets so small that there are several."""
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005, **options})


def sharded(
    params: Any, optimizer_class: Any, *args: Any, **options: Any
) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(params, optimizer_class, *args, **options)


def assert_equal(actual: Any, expected: Any, path: str = "") -> None:
    """Equal types, keys, dtypes, shapes and bits, through dicts and sequences."""
    assert type(actual) is type(expected), f"{path}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{path}: {text}"
        )
    elif isinstance(expected, dict):
        assert list(actual) == list(expected) or set(actual) == set(expected), (
            f"{path}: keys {list(actual)} are not {list(expected)}"
        )
        for key in expected:
            assert_equal(actual[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{path}: {len(actual)} items are not {len(expected)}"
        for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal(one, other, f"{path}[{number}]")
    else:
        assert actual == expected, f"{path}: {actual!r} is not {expected!r}"


def assert_same_params(model: nn.Module, reference: nn.Module) -> None:
    for (name, param), (_, expected) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert_equal(param.detach(), expected.detach(), name)


def assert_replicas_equal(params: Any) -> None:
    """Every rank holds the same bits."""
    for number, param in enumerate(params):
        mine = param.detach().contiguous().view(-1)
        if mine.numel():
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine.clone())
            for rank, theirs in enumerate(everyone):
                assert_equal(theirs, everyone[0], f"param {number} on rank {rank}")


def full_state_dict(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The consolidated state on every rank, for comparing it there; the rounds leave each rank its own snapshot."""
    result: list[Any] = []
    for rank in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to=rank)
        if rank == dist.get_rank():
            result.append(optimizer.state_dict())
    return result[0]


def raises_everywhere(action: Callable[[], Any]) -> list[str]:
    """Run ``action`` on every rank and return, on each, what it raised on all: ``"Type: text"``, ``""`` for nothing."""
    text = ""
    try:
        action()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return everyone


def gradients(params: Any, step: int) -> Iterator[Tensor]:
    """Random gradients, equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        real = torch.randn(param.shape, generator=generator)
        imaginary = torch.randn(param.shape, generator=generator)
        value = torch.complex(real, imaginary) if param.is_complex() else real
        yield value.to(param.dtype).to(memory_format=torch.preserve_format)
