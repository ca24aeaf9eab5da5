"""Keep a bounded number of operations in flight, and await each exactly once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

Finish = Callable[[], None]
"""Waits for one launched operation and puts away what it brought."""


class InFlightQueue:
    """Operations that were launched and not yet finished, oldest first."""

    def __init__(self, *, depth: int) -> None:
        """Allow ``depth`` unfinished operations, 1 or more."""
        self._depth = depth
        self._in_flight: deque[Finish] = deque()

    def launch(self, launch: Callable[[], Finish]) -> None:
        """Finish the oldest operation if the queue is full, then launch another.

        Raises:
            Exception: What either raised, after everything else in flight was finished.
        """
        if len(self._in_flight) == self._depth:
            self.finish_oldest()
        try:
            self._in_flight.append(launch())
        except BaseException:
            self.abandon()
            raise

    def finish_oldest(self) -> None:
        """Finish one operation.

        Raises:
            Exception: What it raised, after everything else in flight was finished.
        """
        try:
            self._in_flight.popleft()()
        except BaseException:
            self.abandon()
            raise

    def drain(self) -> None:
        """Finish everything in flight, in launch order.

        Raises:
            Exception: The first that a finish raised, after all others were called.
        """
        while self._in_flight:
            self.finish_oldest()

    def abandon(self) -> None:
        """Finish what is left after an exception, which matters more than theirs."""
        while self._in_flight:
            with suppress(Exception):
                self._in_flight.popleft()()


def run_in_flight(launches: Iterable[Callable[[], Finish]], *, depth: int) -> None:
    """Launch operations in order, with at most ``depth`` of them unfinished at a time.

    Each launched operation is finished exactly once, in launch order, also when a launch, a finish or the iteration raises; the
    first exception is raised after that.

    Args:
        launches: Each starts an operation and returns what finishes it.
        depth: 1 or more.
    """
    queue = InFlightQueue(depth=depth)
    try:
        for launch in launches:
            queue.launch(launch)
    except BaseException:
        queue.abandon()
        raise
    queue.drain()
