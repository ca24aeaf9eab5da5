"""Bring updated parameters from their owners to everyone.

One broadcast per bucket and changed section: each byte leaves its owner once, S * (N - 1) / N bytes per rank and step
on average over N ranks for S bytes of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from shardopt.buffers import ParamBucket
from shardopt.collectives import Finish, Group, Pending, run_windowed

DEPTH = 2
"""Buckets in flight: one being packed or unpacked while another travels."""


def exchange(
    group: Group, buckets: Sequence[ParamBucket], changed: Sequence[Sequence[int]]
) -> None:
    """Send the changed sections of all buckets and put them into the parameters of every rank. Collective.

    Args:
        group: The sharding group.
        buckets: Equal plans, in equal order, on every rank.
        changed: For each bucket the ranks whose section changed; equal on every rank.
    """
    run_windowed(
        (
            partial(launch_exchange, group, bucket, ranks)
            for bucket, ranks in zip(buckets, changed, strict=True)
            if ranks
        ),
        depth=DEPTH,
    )


def equalize(group: Group, buckets: Sequence[ParamBucket]) -> None:
    """Make the parameters of every rank those of rank 0. Collective."""
    run_windowed(
        (
            partial(
                launch_exchange,
                group,
                bucket,
                [section.rank for section in bucket.plan.sections if section.slots],
                src=0,
            )
            for bucket in buckets
        ),
        depth=DEPTH,
    )


def launch_exchange(
    group: Group, bucket: ParamBucket, ranks: Sequence[int], *, src: int | None = None
) -> Finish:
    """Launch the broadcasts of some sections of one bucket; the result waits and puts them into the parameters.

    Args:
        group: The sharding group.
        bucket: The bucket.
        ranks: The ranks whose sections travel, none of them empty.
        src: The rank that sends all of them; by default each rank sends its own.
    """
    if group.world_size == 1:
        return lambda: None  # nobody to send to: do not even copy into the bucket
    opened = bucket.open(ranks)
    sources = {rank: rank if src is None else src for rank in ranks}
    launched: list[Pending] = []

    def finish() -> None:
        received: list[int] = []
        try:
            Pending(launched).wait()
            received = [rank for rank, source in sources.items() if source != group.rank]
        finally:
            opened.close(received)

    try:
        for rank, source in sources.items():
            flat = opened.outgoing(rank) if source == group.rank else opened.incoming(rank)
            launched.append(group.broadcast(flat, src=source))
    except BaseException:
        with suppress(Exception):
            finish()
        raise
    return finish
