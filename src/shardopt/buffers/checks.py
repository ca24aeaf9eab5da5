"""What must hold of parameters for buckets to stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardopt.errors import ParameterChangedError
from shardopt.partition import ParamSpec

if TYPE_CHECKING:
    from torch import Tensor


def find_shared_memory(params: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the positions of two parameters that overlap in memory, or None.

    Such parameters could get different owners, whose updates would then overwrite each other.
    """
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + _extent_nbytes(p), position)
        for position, p in enumerate(params)
        if p.numel() and p.data_ptr()
    )
    for (device, _, stop, position), (next_device, start, _, next_position) in pairwise(spans):
        if device == next_device and start < stop:
            return (min(position, next_position), max(position, next_position))
    return None


def _extent_nbytes(param: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    last = sum(
        (length - 1) * stride for length, stride in zip(param.shape, param.stride(), strict=True)
    )
    return (int(last) + 1) * param.element_size()


def require_unchanged(
    params: Sequence[Tensor], specs: Sequence[ParamSpec], devices: Sequence[Any]
) -> None:
    """Raise if a parameter no longer has the shape, dtype and device that the layout was planned for.

    Raises:
        ParameterChangedError: Names the parameter, what it is and what it was.
    """
    for param, spec, device in zip(params, specs, devices, strict=True):
        if (
            tuple(param.shape) != spec.shape
            or str(param.dtype) != spec.dtype
            or param.device != device
        ):
            raise ParameterChangedError(
                f"{spec.label}: now {tuple(param.shape)} {param.dtype} on {param.device}, but {spec.shape} "
                f"{spec.dtype} on {device} when the optimizer was made; convert, resize or move the model first, then "
                "make the optimizer and load its state"
            )
