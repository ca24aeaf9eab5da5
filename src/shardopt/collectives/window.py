"""Keep a bounded number of operations in flight, and await each exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

Finish = Callable[[], None]
"""Waits for one launched operation and puts away what it brought."""


def run_windowed(launches: Iterable[Callable[[], Finish]], *, depth: int) -> None:
    """Launch operations in order, with at most ``depth`` of them unfinished at a time.

    Each launched operation is finished exactly once, in launch order, also when a launch or a finish raises; the
    first exception is raised after that.

    Args:
        launches: Each starts an operation and returns what finishes it.
        depth: 1 or more.
    """
    in_flight: deque[Finish] = deque()
    try:
        for launch in launches:
            if len(in_flight) == depth:
                in_flight.popleft()()
            in_flight.append(launch())
        while in_flight:
            in_flight.popleft()()
    finally:
        _finish_quietly(in_flight)


def _finish_quietly(in_flight: deque[Finish]) -> None:
    """Finish what is left after an exception, which matters more than theirs."""
    while in_flight:
        finish = in_flight.popleft()
        try:
            finish()
        except Exception:
            continue
