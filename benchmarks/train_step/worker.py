"""One measurement, on every rank of a job of its own, since peak memory is a property of a process."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.train_step.exchange import measure_exchange
from benchmarks.train_step.machine import Interval
from benchmarks.train_step.memory import forget_peak, held_bytes, resident_bytes
from benchmarks.train_step.models import Batches, build
from benchmarks.train_step.settings import EXCHANGE, REFERENCE, Settings, Unavailable
from benchmarks.train_step.variants import VARIANTS, Trainer

PACKAGES = ("torch", "shardopt", "fairscale", "deepspeed", "numpy")
LOADED_LATE = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim")
"""Modules that torch loads at the first step, or that a variant imports."""


def measure(settings: Settings) -> dict[str, Any]:
    """Train with one variant; return what it cost. Collective."""
    base = resident_bytes()
    model = build(settings.model, dtype=getattr(torch, settings.dtype))
    result: dict[str, Any] = {"numel": sum(p.numel() for p in model.parameters())}
    result["nbytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    trainer = VARIANTS[settings.variant].make(model, settings)
    batches = Batches(settings.model, rank=dist.get_rank())
    for _ in range(settings.check_steps):
        result["check_loss"] = float(trainer.train(batches.take()))
    peak = resident_bytes("VmHWM")
    if settings.check_steps and settings.variant != "compute":
        trainer.finish()
        result["check"] = check(trainer, model, settings)
        forget_peak()
    for _ in range(settings.warmup):
        trainer.train(batches.take())
    result |= time_steps(trainer, batches, settings.steps)
    result["peak_rss"] = gather(max(peak, resident_bytes("VmHWM")) - base)
    return result | held_after_backward(trainer, model, batches, base)


def preload(settings: Settings) -> None:
    """Import what variants use, so that the code of libraries counts in nobody's memory.

    It has to be done before the process group is made: some of torch's modules take a reference to it when they are
    imported, as a default argument, and the process may abort at its end if the group lives until then.
    """
    package = VARIANTS[settings.variant].package if settings.variant != EXCHANGE else None
    for module in (*LOADED_LATE, "shardopt.torch", *([package] if package else [])):
        importlib.import_module(module)


def time_steps(trainer: Trainer, batches: Batches, num_steps: int) -> dict[str, Any]:
    """Take steps, one after the other as in training, and note when each ends. Collective."""
    tokens = [batches.take() for _ in range(num_steps)]
    trainer.finish()
    dist.barrier()
    interval = Interval()
    marks = [time.perf_counter()]
    for number, batch in enumerate(tokens):
        loss = trainer.train(batch)
        if number == num_steps - 1:
            trainer.finish()
        marks.append(time.perf_counter())
    dist.barrier()
    used = interval.stop()
    own = [end - start for start, end in pairwise(marks)]
    slowest = [max(ranks) for ranks in zip(*gather(own), strict=True)]
    return {
        "step_ms": 1e3 * median(slowest),
        "steps_ms": [1e3 * seconds for seconds in slowest],
        "wire_bytes": used.sent_bytes / dist.get_world_size() / num_steps,
        "foreign_cpu": used.foreign_cpu(sum(gather(used.own_cpu))),
        "loss": float(loss),
    }


def held_after_backward(
    trainer: Trainer, model: nn.Module, batches: Batches, base: int
) -> dict[str, Any]:
    """Bytes of tensors that a rank holds between backward and step, the largest rank's. Collective."""
    trainer.backward(trainer.module(batches.take()))
    gradients = trainer.gradients or (lambda: [p.grad for p in model.parameters()])
    held = held_bytes(model, trainer.optimizers, gradients())
    held["buffers"] += trainer.hidden_nbytes
    held["resident"] = resident_bytes() - base
    trainer.step()
    trainer.finish()
    by_rank = gather(held)
    return {"held": {name: [held[name] for held in by_rank] for name in held}}


def check(trainer: Trainer, model: nn.Module, settings: Settings) -> dict[str, Any]:
    """Digest of all parameters, whether ranks agree on it, and the distance from the reference. Collective."""
    parameters = trainer.parameters or model.named_parameters
    is_first = dist.get_rank() == 0
    reference = None
    if is_first and settings.reference_path.exists():
        reference = torch.load(settings.reference_path, mmap=True)
    saved: dict[str, Tensor] | None = None
    if is_first and settings.variant == REFERENCE and reference is None:
        saved = {}
    digest, distance = hashlib.blake2b(digest_size=16), 0.0
    for name, param in parameters():
        tensor = param.detach().contiguous()
        digest.update(memoryview(tensor.flatten().view(torch.uint8).numpy()))
        if reference is not None:
            distance = max(distance, largest_difference(tensor, reference[name]))
        if saved is not None:
            saved[name] = tensor
    if saved is not None:
        torch.save(saved, settings.reference_path)
    digests = gather(digest.hexdigest())
    return {
        "digest": digests[0],
        "ranks_agree": len(set(digests)) == 1,
        "max_difference": None if reference is None else distance,
    }


def largest_difference(a: Tensor, b: Tensor, numel: int = 1 << 20) -> float:
    """Of two tensors, in pieces, so that it takes little memory."""
    pieces = zip(a.flatten().split(numel), b.flatten().split(numel), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pieces)


def gather(value: Any) -> list[Any]:
    """The value of every rank. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of what is installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """What the numbers depend on."""
    memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    return {"cpus": os.cpu_count(), "memory_gib": memory, "arch": platform.machine()}


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def main() -> None:
    settings = Settings.loads(sys.argv[1])
    torch.set_num_threads(1)
    preload(settings)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        run = measure_exchange if settings.variant == EXCHANGE else measure
        result = run(settings) | {"versions": versions(PACKAGES), "machine": machine()}
    except Unavailable as reason:
        result = {"unavailable": str(reason), "is_hopeless": True}
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        write(settings.error_path(rank), {"error": what, "traceback": traceback.format_exc()})
        raise
    if rank == 0:
        write(settings.result_path, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
