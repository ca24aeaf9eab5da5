"""Runs jobs in fresh processes, and keeps the disk and the files' cache in the same state before each."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.job import Job
from benchmarks.checkpoints.variants import VARIANTS
from benchmarks.train_step.launch import ROOT, run

WORKER = "benchmarks.checkpoints.worker"
CHUNK_NBYTES = 2**24


def launch(job: Job, *, timeout: float) -> dict[str, Any]:
    """Run one job; return what it measured, or why not, as ``error``."""
    for path in Path(job.folder).glob("*.json"):
        path.unlink()
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={VARIANTS[job.variant].ranks}"]
    command += ["--module", WORKER, job.dumps()]
    log = Path(job.folder) / "log.txt"
    error = run(command, environment, log, timeout=timeout)
    if error is None and job.result_path.exists():
        result: dict[str, Any] = json.loads(job.result_path.read_text())
        return result
    return failure(job, log, error or "no result")


def failure(job: Job, log: Path, what: str) -> dict[str, Any]:
    """The first error that a rank wrote, else the end of the log."""
    paths = Path(job.folder).glob("error-*.json")
    written = sorted(paths, key=lambda path: path.stat().st_mtime)
    if written:
        found: dict[str, Any] = json.loads(written[0].read_text())
        return found
    return {"error": what, "traceback": log.read_text(errors="replace")[-3000:]}


def empty(folder: Path) -> Path:
    """Make a folder, or remove what is in it; wait until the disk is idle."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    return folder


def set_cache(folder: Path, *, is_warm: bool) -> None:
    """Drop all files of a folder from the system's cache, or read them into it."""
    os.sync()
    for path in (found for found in folder.rglob("*") if found.is_file()):
        with path.open("rb", buffering=0) as file:
            if is_warm:
                while file.read(CHUNK_NBYTES):
                    pass
            else:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
