"""What the exchange of a sharded step costs at least here: each part alone, in the fastest form we know.

S bytes of gradients are summed to their owners, and S bytes of parameters gathered, in messages of 25 MB over the
network; or added up and copied in memory, by all ranks at once. Each rank updates S / N bytes of parameters in one fused
AdamW.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.train_step.machine import Interval
from benchmarks.train_step.models import build
from benchmarks.train_step.settings import Settings

MESSAGE_NBYTES = 25_000_000
IN_FLIGHT = 4


def measure_exchange(settings: Settings) -> dict[str, Any]:
    """Milliseconds of each part, the slowest rank's. Collective."""
    dtype = getattr(torch, settings.dtype)
    numel = sum(p.numel() for p in build(settings.model, dtype=dtype).parameters())
    world_size = dist.get_world_size()
    message = MESSAGE_NBYTES // dtype.itemsize // world_size * world_size
    buckets = torch.ones(numel // world_size * world_size, dtype=dtype).split(message)
    repeats = max(3, settings.steps // 2)
    parts = {
        "reduce_scatter": lambda: pipelined(buckets, launch_reduce_scatter),
        "all_gather": lambda: pipelined(buckets, launch_all_gather),
        "broadcasts": lambda: pipelined(buckets, launch_broadcasts),
        "sum in memory": lambda: in_memory(buckets, add_parts),
        "copies in memory": lambda: in_memory(buckets, copy_parts),
        "update": make_update(numel // world_size),
    }
    interval = Interval()
    times = {name: slowest_ms(run, repeats) for name, run in parts.items()}
    used = interval.stop()
    own_cpu = torch.tensor(used.own_cpu, dtype=torch.float64)
    dist.all_reduce(own_cpu)
    gather = min(times["all_gather"], times["broadcasts"])
    network = times["reduce_scatter"] + gather
    memory = times["sum in memory"] + times["copies in memory"]
    return {
        "parts_ms": times,
        "step_ms": min(network, memory) + times["update"],
        "foreign_cpu": used.foreign_cpu(float(own_cpu)),
    }


def pipelined(
    buckets: Iterable[Tensor], launch: Callable[[Tensor, int], Callable[[], object]]
) -> None:
    """Exchange all buckets, a few at a time."""
    waiting: list[Callable[[], object]] = []
    for number, bucket in enumerate(buckets):
        waiting.append(launch(bucket, number))
        if len(waiting) > IN_FLIGHT:
            waiting.pop(0)()
    for wait in waiting:
        wait()


def peers() -> list[int]:
    """The other ranks, each rank's own successors first."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [(rank + distance) % world_size for distance in range(1, world_size)]


_scratch: dict[tuple[int, int], list[Tensor]] = {}


def scratch(slot: int, numel: int, like: Tensor) -> list[Tensor]:
    """Memory to receive into, used again and again: touching new memory is slow."""
    key = (slot, numel)
    if key not in _scratch:
        _scratch[key] = [torch.zeros(numel, dtype=like.dtype) for _ in peers()]
    return _scratch[key]


def launch_reduce_scatter(bucket: Tensor, number: int) -> Callable[[], None]:
    """Send each rank its part, and add what the others send to this rank's."""
    parts = bucket.tensor_split(dist.get_world_size())
    own = parts[dist.get_rank()]
    received = scratch(number % (IN_FLIGHT + 1), own.numel(), own)
    works = []
    for peer, into in zip(peers(), received, strict=True):
        works.append(dist.irecv(into, src=peer, tag=number))
        works.append(dist.isend(parts[peer], dst=peer, tag=number))

    def wait() -> None:
        for work in works:
            work.wait()
        for other in received:
            own.add_(other)

    return wait


def launch_all_gather(bucket: Tensor, number: int) -> Callable[[], object]:
    """Send this rank's part to each other rank."""
    parts = bucket.tensor_split(dist.get_world_size())
    works = []
    for peer in peers():
        works.append(dist.irecv(parts[peer], src=peer, tag=number))
        works.append(dist.isend(parts[dist.get_rank()], dst=peer, tag=number))
    return lambda: [work.wait() for work in works]


def launch_broadcasts(bucket: Tensor, number: int) -> Callable[[], object]:
    """One broadcast per part."""
    parts = bucket.tensor_split(dist.get_world_size())
    works = [dist.broadcast(part, src=rank, async_op=True) for rank, part in enumerate(parts)]
    return lambda: [work.wait() for work in works]


def in_memory(buckets: Iterable[Tensor], move: Callable[[list[Tensor], Tensor], None]) -> None:
    """Do with each bucket what its owner, or a receiver, has to do at least."""
    for bucket in buckets:
        parts = list(bucket.tensor_split(dist.get_world_size()))
        move(parts, scratch(0, parts[0].numel(), bucket)[0])


def add_parts(parts: list[Tensor], out: Tensor) -> None:
    """Add this rank's part of all ranks' gradients up."""
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out.add_(part)


def copy_parts(parts: list[Tensor], out: Tensor) -> None:
    """Copy this rank's parameters to where others can read them, and those of all others from there."""
    for part in parts:
        out[: part.numel()].copy_(part)


def make_update(numel: int) -> Callable[[], object]:
    """A fused AdamW over one flat parameter."""
    param = nn.Parameter(torch.zeros(numel))
    param.grad = torch.ones_like(param)
    return torch.optim.AdamW([param], lr=3e-4, fused=True).step


def slowest_ms(run: Callable[[], object], repeats: int) -> float:
    """Median over repeats of the slowest rank's milliseconds. Collective."""
    run()
    times = torch.empty(repeats, dtype=torch.float64)
    for repeat in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        run()
        times[repeat] = time.perf_counter() - start
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return 1e3 * median(times.tolist())
