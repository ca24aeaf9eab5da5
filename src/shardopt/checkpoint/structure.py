"""Nested state without its tensors: small, picklable, and turned back into state by filling the tensors in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardopt.partition import is_dense

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands for a tensor in a structure.

    Attributes:
        number: Its position among the tensors of the structure.
        shape: Its shape.
        stride: Its strides if dense; None for a tensor with gaps, which is rebuilt contiguous.
        dtype: ``str()`` of its dtype.
    """

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: str

    def shape_flat(self, flat: Tensor) -> Tensor:
        """View (numel,) elements in memory order as the tensor."""
        if self.stride is None:
            return flat.view(self.shape)
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())


def map_tensors(value: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """Return ``value`` with ``function`` applied to each leaf in its dicts, lists, deques and tuples, which are new objects."""
    if is_leaf(value):
        return function(value)
    if isinstance(value, (dict, list, deque)):
        mapped: Any = copy(value)  # keeps what a subclass holds besides its items
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            mapped[key] = map_tensors(item, function, is_leaf)
        return mapped
    if isinstance(value, tuple):
        items = [map_tensors(item, function, is_leaf) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def is_nested(value: Any) -> bool:
    """Whether a value is a container that holds tensors."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, (list, tuple, deque)):
        return False
    return any(hasattr(item, "shape") or is_nested(item) for item in value)


def take_tensors(value: Any, is_tensor: Callable[[Any], bool]) -> tuple[Any, list[Tensor]]:
    """Return the structure of ``value`` and its tensors in order."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> TensorSlot:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        tensors.append(tensor)
        kept = stride if is_dense(shape, stride) else None
        return TensorSlot(len(tensors) - 1, shape, kept, str(tensor.dtype))

    return map_tensors(value, take, is_tensor), tensors


def put_tensors(structure: Any, tensors: list[Tensor]) -> Any:
    """Undo ``take_tensors``."""
    return map_tensors(
        structure, lambda slot: tensors[slot.number], lambda value: isinstance(value, TensorSlot)
    )


def slots_of(structure: Any) -> list[TensorSlot]:
    """The slots of a structure, in order of their numbers."""
    slots: list[TensorSlot] = []
    map_tensors(structure, slots.append, lambda value: isinstance(value, TensorSlot))
    return slots


def flatten(tensor: Tensor) -> Tensor:
    """View a dense tensor as (numel,) in memory order; copy one with gaps in logical order."""
    detached = tensor.detach()
    if is_dense(tuple(tensor.shape), tuple(tensor.stride())):
        return detached.as_strided((tensor.numel(),), (1,), detached.storage_offset())
    return detached.contiguous().view(-1)
