"""One launch, on every rank: make the optimizer, save or load its state, and check what was loaded."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoints.job import Job
from benchmarks.checkpoints.meter import Meter
from benchmarks.checkpoints.systems import SYSTEMS, check
from benchmarks.checkpoints.variants import VARIANTS
from benchmarks.train_step.worker import gather, machine, versions, write


def measure(job: Job) -> dict[str, Any]:
    """Do what the variant does; return what it cost. Collective."""
    variant = VARIANTS[job.variant]
    subject = SYSTEMS[variant.system](job) if variant.system else None
    if subject and not variant.source:
        subject.step()
    os.sync()
    meter = Meter()
    variant.run(subject, Path(job.source or job.output), meter)
    result = meter.finish()
    if subject:
        result["numel"] = sum(param.numel() for param in subject.model.parameters())
        state = sum(tensor.numel() * tensor.element_size() for tensor in subject.tensors())
        result["state_nbytes"] = gather(state)
        if variant.source:
            result["check"] = check(subject)
    return result


def preload() -> None:
    """Import what torch imports late, so that the code of libraries counts in nobody's time or memory.

    Before the process group is made: some of torch's modules refer to it if they are imported later.
    """
    for module in ("torch._dynamo", "shardopt.torch"):
        importlib.import_module(module)


def main() -> None:
    job = Job.loads(sys.argv[1])
    torch.set_num_threads(1)
    preload()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        result = measure(job)
    except BaseException as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        write(job.error_path(rank), {"error": what, "traceback": traceback.format_exc()})
        raise
    if rank == 0:
        packages = ("torch", "shardopt", "numpy")
        write(job.result_path, {**result, "versions": versions(packages), "machine": machine()})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
