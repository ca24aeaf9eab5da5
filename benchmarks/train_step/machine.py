"""What a job used of the machine, and what others used meanwhile."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

BUSY = (0, 1, 2, 7)
"""Columns of ``/proc/stat``: user, nice, system, and stolen by other virtual machines."""


@dataclass(frozen=True)
class Usage:
    """Between two moments.

    Attributes:
        seconds: That passed.
        sent_bytes: By all processes over the loopback device, headers included.
        own_cpu: Seconds of CPU of this process.
        busy_cpu: Seconds of CPU of all processes.
    """

    seconds: float
    sent_bytes: int
    own_cpu: float
    busy_cpu: float

    def foreign_cpu(self, own_cpu: float) -> float:
        """The share of all CPUs' time that processes used that are not in the sum of ``own_cpu``."""
        available = self.seconds * (os.cpu_count() or 1)
        return max(0.0, self.busy_cpu - own_cpu) / available


class Interval:
    """Reads the counters when it is made, and when it is stopped."""

    def __init__(self) -> None:
        self._start = _read()

    def stop(self) -> Usage:
        """What happened since."""
        return Usage(*(end - start for start, end in zip(self._start, _read(), strict=True)))


def _read() -> tuple[float, int, float, float]:
    own = resource.getrusage(resource.RUSAGE_SELF)
    return time.perf_counter(), _sent_bytes(), own.ru_utime + own.ru_stime, _busy_seconds()


def _sent_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, counters = line.partition(":")
        if device.strip() == "lo":
            return int(counters.split()[8])
    raise LookupError("no loopback device in /proc/net/dev")


def _busy_seconds() -> float:
    columns = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(int(columns[i]) for i in BUSY) / os.sysconf("SC_CLK_TCK")
