"""What lies in memory: resident bytes of the process, and the memory of tensors by what they are for."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STATUS = Path("/proc/self/status")


def resident_bytes(field: str = "VmRSS") -> int:
    """``VmRSS``, now, or ``VmHWM``, the peak, of this process. (``ru_maxrss`` begins with the parent's.)"""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {field} in {STATUS}")


def forget_peak() -> None:
    """Let ``VmHWM`` begin anew, where the system lets us."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes of each piece of memory behind some tensors, by address."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own memory
        try:
            storage = local.untyped_storage()
            address = storage.data_ptr()
        except (RuntimeError, NotImplementedError):
            continue  # stands for memory that is elsewhere, or nowhere
        if address and local.device.type == "cpu":
            found[address] = storage.nbytes()
    return found


def living_tensors() -> list[Tensor]:
    """Every tensor that Python knows of."""
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def held_bytes(
    module: nn.Module, optimizers: Iterable[Any], gradients: Iterable[Any]
) -> dict[str, int]:
    """Bytes of tensors on this rank, each piece of memory counted once, under the first name that fits.

    ``parameters``: those of the module, and its buffers. ``state``: what the optimizers keep and, if it is no
    parameter, what they update (master weights). ``gradients``. ``buffers``: all other tensors that Python can see.
    """
    local = list(optimizers)
    groups = {
        "parameters": storages([*module.parameters(), *module.buffers()]),
        "state": storages(
            tensor
            for optimizer in local
            for tensor in tensors_in(
                [list(optimizer.state.values()), [g["params"] for g in optimizer.param_groups]]
            )
        ),
        "gradients": storages(tensors_in(list(gradients))),
        "buffers": storages(living_tensors()),
    }
    seen: set[int] = set()
    result = {}
    for name, found in groups.items():
        result[name] = sum(nbytes for address, nbytes in found.items() if address not in seen)
        seen |= found.keys()
    return result
