"""Checkpoints of every kind to look into and to convert, made in one process, and what stands in files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardopt import Sharding, ZeroRedundancyOptimizer
from shardopt.files import TensorFile
from shardopt.frameworks.torch import empty_on_cpu

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW by parameter": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW by element": (
        torch.optim.AdamW,
        {
            "lr": 0.01,
            "parameters_as_bucket_view": True,
            "sharding": Sharding(granularity="element"),
        },
    ),
    "bf16 with master weights": (
        torch.optim.AdamW,
        {"lr": 0.01, "sharding": Sharding(master_dtype=torch.float32)},
    ),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def make_params(case: str) -> list[tuple[str, nn.Parameter]]:
    """A channels-last convolution, a matrix, one element and nothing; equal whenever they are made."""
    generator = torch.Generator().manual_seed(5)
    dtype = torch.bfloat16 if "bf16" in case else torch.float32
    values = [torch.randn(shape, generator=generator) for shape in [(4, 3, 3, 3), (7, 5), (1,)]]
    values[0] = values[0].to(memory_format=torch.channels_last)
    names = ["conv.weight", "head.weight", "head.bias"]
    return [
        (name, nn.Parameter(value.to(dtype))) for name, value in zip(names, values, strict=True)
    ]


def make_optimizer(case: str) -> ZeroRedundancyOptimizer:
    optimizer_class, options = CASES[case]
    return ZeroRedundancyOptimizer(make_params(case), optimizer_class, **options)


def take_steps(optimizer: Any, num_steps: int = 3) -> None:
    """With gradients that are equal on all ranks."""
    generator = torch.Generator().manual_seed(11)
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                gradient = torch.randn(param.shape, generator=generator).to(param.dtype)
                param.grad = torch.empty_like(param).copy_(gradient)
        optimizer.step()


def trained(case: str) -> ZeroRedundancyOptimizer:
    optimizer = make_optimizer(case)
    take_steps(optimizer)
    return optimizer


def state_dict_of(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    optimizer.consolidate_state_dict()
    return optimizer.state_dict()


def save_plain(path: Path, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Write the state dict of an unsharded optimizer, and return it."""
    optimizer = optimizer_class([p for _, p in make_params("")], lr=0.01, **options)
    take_steps(optimizer)
    torch.save(optimizer.state_dict(), path)
    return optimizer.state_dict()


def tensors_in(*paths: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of some files: its name, dtype, shape and bytes."""
    found = {}
    for path in paths:
        with TensorFile(path) as file:
            for name, entry in file.entries.items():
                flat = empty_on_cpu(entry.numel, entry.dtype)
                file.read(name, 0, flat)
                data = bytes(flat.view(torch.uint8).tolist()) if entry.numel else b""
                found[name] = (entry.dtype, entry.shape, data)
    return found


def damage(path: Path, name: str) -> None:
    """Change one byte of a tensor in a file of ours."""
    with TensorFile(path) as file:
        start = file._start + file._offsets[name][0]
    flip(path, start)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def run_without(modules: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process where some modules are not installed."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({modules!r})); from shardopt.cli import main; "
        f"sys.exit(main({list(arguments)!r}))"
    )
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
