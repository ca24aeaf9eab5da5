"""Bytes, counted on the tensors that exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank keeps between steps."""

    params: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        """All three."""
        return self.params + self.gradients + self.optimizer_state


def measure(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Memory:
    """Count what this rank keeps now."""
    params = list(model.parameters())
    return Memory(
        params=count_bytes(params),
        gradients=count_bytes(param.grad for param in params if param.grad is not None),
        optimizer_state=count_bytes(find_tensors(optimizer.state)),
    )


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Sum the memory behind ``tensors``, once where several are views of the same."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({(s.device, s.data_ptr()): s.nbytes() for s in storages}.values())


def find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested dicts and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from find_tensors(item)
