"""Bring updated parameters from their owners to everyone.

One message per bucket, changed section and receiver: each byte leaves its owner N - 1 times, S * (N - 1) / N bytes per
rank and step over N ranks for S bytes of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from shardopt.buffers import ParamBucket
from shardopt.collectives import Finish, Group, Pending, run_in_flight

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 2
"""Buckets in flight that need memory beside that of parameters: one being packed or unpacked while another travels."""


class Exchange:
    """The changed sections of all buckets, on their way."""

    def __init__(
        self,
        group: Group,
        buckets: Sequence[ParamBucket],
        *,
        is_bounded: Callable[[int], bool],
        touch: Callable[[int, Sequence[int]], None],
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            buckets: Equal plans, in equal order, on every rank; may grow.
            is_bounded: Whether a bucket, by number, holds memory while it travels, so that no more than ``DEPTH`` may.
            touch: Told the number of each bucket of which sections have changed and are there, and their ranks.
        """
        self._group = group
        self._buckets = buckets
        self._is_bounded = is_bounded
        self._touch = touch
        self._in_flight: dict[int, tuple[Finish, Sequence[int]]] = {}

    def launch(self, number: int, ranks: Sequence[int]) -> None:
        """Launch the sections of ``ranks``, equal on every rank, of one bucket. Collective."""
        if not ranks:
            return
        if self._group.world_size == 1:
            self._touch(number, ranks)
            return
        self.wait(number)
        if self._is_bounded(number) and len(bounded := self._bounded_in_flight()) == DEPTH:
            self.wait(bounded[0])
        try:
            finish = launch_exchange(self._group, self._buckets[number], ranks)
            self._in_flight[number] = finish, ranks
        except BaseException:
            self._abandon()
            raise

    def wait(self, number: int) -> None:
        """Wait until the parameters of one bucket are there, if they are on their way. Local."""
        if number not in self._in_flight:
            return
        finish, ranks = self._in_flight.pop(number)
        try:
            finish()
        except BaseException:
            self._abandon()
            raise
        self._touch(number, ranks)

    def drain(self) -> None:
        """Wait until all parameters are there. Local."""
        while self._in_flight:
            self.wait(next(iter(self._in_flight)))

    def drain_copies(self) -> None:
        """Wait for buckets that hold memory while they travel, so that it need not be held until they are used. Local."""
        for number in self._bounded_in_flight():
            self.wait(number)

    def _bounded_in_flight(self) -> list[int]:
        return [number for number in self._in_flight if self._is_bounded(number)]

    def _abandon(self) -> None:
        """Finish what is left after an exception, which matters more than theirs."""
        while self._in_flight:
            with suppress(Exception):
                self._in_flight.pop(next(iter(self._in_flight)))[0]()


def equalize(group: Group, buckets: Sequence[ParamBucket]) -> None:
    """Make the parameters of every member those of member 0. Collective."""
    run_in_flight((partial(_launch_equalizing, group, bucket) for bucket in buckets), depth=DEPTH)


def launch_exchange(group: Group, bucket: ParamBucket, ranks: Sequence[int]) -> Finish:
    """Launch some sections of one bucket, each from its rank; the result waits and puts them into the parameters.

    Args:
        group: The sharding group.
        bucket: The bucket.
        ranks: The ranks whose sections travel, none of them empty.
    """
    if group.world_size == 1:
        return lambda: None  # nobody to send to: do not even copy into the bucket
    mine = [rank for rank in ranks if rank == group.rank]
    return _launch(bucket, ranks, mine=mine, send=group.all_gather)


def _launch_equalizing(group: Group, bucket: ParamBucket) -> Finish:
    """Launch all sections of one bucket, from member 0."""
    if group.num_members == 1:
        return lambda: None
    ranks = [section.rank for section in bucket.plan.sections if section.slots]

    def send(flats: Mapping[int, Tensor]) -> Pending:
        return Pending([group.broadcast(flat) for flat in flats.values()])

    return _launch(bucket, ranks, mine=ranks if group.is_first else [], send=send)


def _launch(
    bucket: ParamBucket,
    ranks: Sequence[int],
    *,
    mine: Sequence[int],
    send: Callable[[Mapping[int, Tensor]], Pending],
) -> Finish:
    """Open the sections of ``ranks``, launch what ``send`` makes of them, and return what puts away all but ``mine``."""
    opened = bucket.open(ranks)
    try:
        pending = send({r: opened.outgoing(r) if r in mine else opened.incoming(r) for r in ranks})
    except BaseException:
        opened.close([])
        raise

    def finish() -> None:
        received: list[int] = []
        try:
            pending.wait()
            received = [rank for rank in ranks if rank not in mine]
        finally:
            opened.close(received)

    return finish
