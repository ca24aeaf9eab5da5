"""Time variants side by side on all ranks of a job, taking turns, so that a drifting machine treats them alike.

Machines that run benchmarks are shared and noisy: quote medians, and ratios of variants that took turns in one run.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table


def interleave(
    variants: dict[str, Callable[[], object]], *, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Run every variant ``repeats`` times per round and return the median seconds of each round.

    Collective: every rank runs the same variants. All ranks start a call together, and a call lasts until the slowest
    rank is done.
    """
    for run in variants.values():
        run()  # first touch of memory, caches, and DDP's or the optimizer's own lazy set-up
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            seconds[name].append(median(_slowest(run) for _ in range(repeats)))
    return seconds


def _slowest(run: Callable[[], object]) -> float:
    """Seconds of one call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    run()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)


def report(title: str, seconds: dict[str, list[float]], *, baseline: str) -> None:
    """Print, on rank 0, medians in ms and the median of same-round ratios to ``baseline``."""
    if dist.get_rank() != 0:
        return
    table = Table(title=title)
    for column in ("variant", "ms, by round", "median ms", f"/ {baseline}"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for name, rounds in seconds.items():
        ratio = median(a / b for a, b in zip(rounds, seconds[baseline], strict=True))
        by_round = " ".join(f"{1e3 * s:.2f}" for s in rounds)
        table.add_row(name, by_round, f"{1e3 * median(rounds):.2f}", f"{ratio:.2f}")
    console = Console(width=120)
    console.print(table)
    console.print(
        f"{dist.get_world_size()} ranks, gloo over loopback, one thread each; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )
