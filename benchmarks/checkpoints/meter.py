"""What is measured of a call, on every rank: seconds, and how far memory grew above what it was before."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from benchmarks.checkpoints import sampler
from benchmarks.checkpoints.sampler import own_bytes
from benchmarks.train_step.machine import Interval, Usage
from benchmarks.train_step.memory import forget_peak, resident_bytes
from benchmarks.train_step.worker import gather

Mark = Callable[[str], None]


@dataclass(frozen=True)
class Phase:
    """From the start of a call to its end, or to a mark before that.

    Attributes:
        name: As it is reported.
        start: Seconds on the system's clock.
        stop: The same.
        own_before: ``own_bytes`` at the start.
        own_after: At the stop.
        peak_growth: Of ``VmHWM``, which counts mapped files too.
    """

    name: str
    start: float
    stop: float
    own_before: int
    own_after: int
    peak_growth: int


class Meter:
    """Measures calls; ranks start each together."""

    def __init__(self) -> None:
        """Start the process that watches memory."""
        command = [sys.executable, "-I", "-S", sampler.__file__, str(os.getpid())]
        self._sampler = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._sampler.stdout is not None
        self._sampler.stdout.readline()
        self._phases: list[Phase] = []
        self._usages: list[Usage] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[Mark]:
        """Measure what is done within; the ``Mark`` measures, under another name, what was done up to then. Collective."""
        tidy()
        dist.barrier()
        interval = Interval()
        forget_peak()
        own, peak = own_bytes(), resident_bytes("VmHWM")
        start = time.monotonic()

        def mark(name: str) -> None:
            stop = time.monotonic()
            growth = resident_bytes("VmHWM") - peak
            self._phases.append(Phase(name, start, stop, own, own_bytes(), growth))

        yield mark
        mark(name)
        dist.barrier()
        self._usages.append(interval.stop())

    def finish(self) -> dict[str, Any]:
        """Stop, and return the numbers of all ranks. Collective."""
        text, _ = self._sampler.communicate()
        samples = json.loads(text)
        by_rank = gather([numbers(phase, samples) for phase in self._phases])
        foreign = [usage.foreign_cpu(sum(gather(usage.own_cpu))) for usage in self._usages]
        phases = {
            phase.name: {key: [theirs[n][key] for theirs in by_rank] for key in by_rank[0][n]}
            for n, phase in enumerate(self._phases)
        }
        return {"phases": phases, "foreign_cpu": max(foreign)}


def numbers(phase: Phase, samples: list[tuple[float, int]]) -> dict[str, float]:
    """What a rank reports of a phase."""
    seen = [nbytes for moment, nbytes in samples if phase.start <= moment <= phase.stop]
    peak = max([phase.own_before, phase.own_after, *seen])
    return {
        "seconds": phase.stop - phase.start,
        "own_growth": peak - phase.own_before,
        "rss_growth": phase.peak_growth,
    }


def tidy() -> None:
    """Give free memory back to the system, so that using it again counts as growth."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
