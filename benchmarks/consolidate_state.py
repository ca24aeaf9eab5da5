"""What does it cost to collect the optimizer's state on one rank, in seconds and in memory?

Variants take turns as jobs of their own, since peak memory is a property of a process. Each job makes Adam state of the
given size, notes its peak memory, consolidates on rank 0, and notes it again.

    python benchmarks/consolidate_state.py --state-mb 500 --ranks 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median
from typing import Any

VARIANTS = ("shardopt", "torch")


def job(variant: str, state_mb: int) -> None:
    """Run on every rank of one job; rank 0 prints seconds and growth of peak memory as JSON."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if variant == "shardopt":
        from shardopt import ZeroRedundancyOptimizer
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer
    num_params = 20
    numel = state_mb * 2**20 // 8 // num_params  # two moments of 4 bytes per element
    params = [nn.Parameter(torch.zeros(numel)) for _ in range(num_params)]
    optimizer: Any = ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=1e-3, fused=True)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in params:
        param.grad = None
    dist.barrier()
    before = peak_mb()
    start = time.perf_counter()
    optimizer.consolidate_state_dict(to=0)
    dist.barrier()
    seconds = time.perf_counter() - start
    growth: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(growth, peak_mb() - before)
    if dist.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        assert len(state) == num_params
        print(json.dumps({"seconds": seconds, "growth_mb": growth}))
    dist.destroy_process_group()


def peak_mb() -> float:
    """Highest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def launch(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job and return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={options.ranks}", __file__, "--variant", variant]
    command += ["--state-mb", str(options.state_mb)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=600, env=environment
    )
    result: dict[str, Any] = json.loads(output.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-mb", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        job(options.variant, options.state_mb)
        return
    from rich.console import Console
    from rich.table import Table

    results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant in VARIANTS:
            results[variant].append(launch(variant, options))
    table = Table(
        title=f"consolidating {options.state_mb} MiB of Adam state, {options.ranks} ranks"
    )
    for column in ("variant", "seconds, by round", "median s", "peak memory growth by rank, MiB"):
        table.add_column(column)
    for variant, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        growth = [
            median(by_rank) for by_rank in zip(*(run["growth_mb"] for run in runs), strict=True)
        ]
        table.add_row(
            variant,
            " ".join(f"{s:.2f}" for s in seconds),
            f"{median(seconds):.2f}",
            " / ".join(f"{mb:.0f}" for mb in growth),
        )
    console = Console(width=120)
    console.print(table)
    ratio = median(
        t["seconds"] / s["seconds"]
        for s, t in zip(results["shardopt"], results["torch"], strict=True)
    )
    console.print(f"torch / shardopt, median of same-round ratios: {ratio:.1f}")


if __name__ == "__main__":
    main()
