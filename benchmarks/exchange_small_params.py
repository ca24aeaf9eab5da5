"""What does a step's parameter exchange cost for 300 small parameters?

The wrapped optimizer updates nothing, so a step is its exchange (and what the class does around it). Beside it: torch's
class, and the least that could be done, one broadcast per rank of a flat tensor that is there already.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/exchange_small_params.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from interleave import interleave, report
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from shardopt import ZeroRedundancyOptimizer


class NoUpdate(torch.optim.SGD):
    """Leaves parameters as they are."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def make_params(num: int, numel: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(numel)) for _ in range(num)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def coalesced(num: int, numel: int) -> Any:
    """The bare exchange: each rank broadcasts its part of one flat tensor."""
    parts = torch.ones(num * numel).chunk(dist.get_world_size())

    def run() -> None:
        works = [dist.broadcast(part, src=rank, async_op=True) for rank, part in enumerate(parts)]
        for work in works:
            work.wait()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=300)
    parser.add_argument("--numel", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def step(cls: Any, **kwargs: Any) -> Any:
        return cls(make_params(options.params, options.numel), NoUpdate, lr=0.1, **kwargs).step

    seconds = interleave(
        {
            "one coalesced exchange": coalesced(options.params, options.numel),
            "shardopt": step(ZeroRedundancyOptimizer),
            "shardopt, bucket view": step(ZeroRedundancyOptimizer, parameters_as_bucket_view=True),
            "torch ZeRO": step(TorchZero),
            "torch ZeRO, bucket view": step(TorchZero, parameters_as_bucket_view=True),
        },
        rounds=options.rounds,
        repeats=options.repeats,
    )
    mb = options.params * options.numel * 4 / 2**20
    report(
        f"exchange of {options.params} parameters of {options.numel} elements, {mb:.1f} MiB",
        seconds,
        baseline="one coalesced exchange",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
