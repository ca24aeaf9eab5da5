"""All ranks raise or none does.

What may differ between ranks is compared, and what may fail on one rank is made known to all, before anyone starts a
collective that depends on it. Both cost one all-gather of a few integers while all is well; words are exchanged only
on the way to an exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

from shardopt.collectives.fingerprint import digest
from shardopt.collectives.flags import pack_flags, unpack_flags
from shardopt.collectives.group import Group
from shardopt.errors import RankMismatchError, RemoteRankError


def require_equal(
    group: Group,
    fingerprint: Sequence[tuple[str, str]],
    *,
    subject: str,
    ranks: Sequence[int] | None = None,
) -> None:
    """Raise on all ranks unless the compared ranks give equal fingerprints. Collective.

    Args:
        group: The sharding group.
        fingerprint: (label, value) pairs, in an order that the ranks share.
        subject: What the fingerprint describes, to open the message with.
        ranks: The ranks to compare; all of them by default.

    Raises:
        RankMismatchError: Names the first difference and both ranks; the same text on every rank.
    """
    compared = range(group.num_members) if ranks is None else ranks
    digests = group.all_gather_ints([digest(fingerprint)])
    if any(digests[rank] != digests[compared[0]] for rank in compared):
        fingerprints_by_rank = group.all_gather_object(list(fingerprint))
        raise RankMismatchError(f"{subject}: {_first_difference(fingerprints_by_rank, compared)}")


def _first_difference(
    fingerprints_by_rank: Sequence[Sequence[tuple[str, str]]], ranks: Sequence[int]
) -> str:
    """Say where the first rank that differs from the first one does so first."""
    first = ranks[0]
    other = next(
        rank for rank in ranks if fingerprints_by_rank[rank] != fingerprints_by_rank[first]
    )
    pairs = zip_longest(
        fingerprints_by_rank[first], fingerprints_by_rank[other], fillvalue=("", "absent")
    )
    here, there = next((here, there) for here, there in pairs if here != there)
    label = here[0] or there[0]
    value = there[1] if there[0] in (label, "") else f"absent (next is {there[0]})"
    return (
        f"rank {other} was given other things than rank {first}; first difference at {label}: "
        f"{value} on rank {other}, {here[1]} on rank {first}"
    )


def raise_if_any_failed(group: Group, error: Exception | None, *, doing: str) -> None:
    """Raise on every rank if ``error`` is set on any. Collective.

    Args:
        group: The sharding group.
        error: What this rank failed with, or None.
        doing: What was being done, for the message on the other ranks.

    Raises:
        Exception: On a failing rank, its own error.
        RemoteRankError: On the others, naming each failing rank and its error.
    """
    failed = group.all_gather_ints([int(error is not None)])
    if any(flag for (flag,) in failed):
        raise_failures(group, error, doing=doing)


def raise_failures(group: Group, error: Exception | None, *, doing: str) -> None:
    """Raise what ``raise_if_any_failed`` raises, once all ranks know that one of them failed. Collective."""
    texts = group.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    raise RemoteRankError(f"{doing} failed on another rank; {'; '.join(failures)}")


@contextmanager
def raise_together(group: Group, *, doing: str) -> Iterator[None]:
    """Run a block without collectives, then raise on every rank if it raised on any. Collective at its end."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    raise_if_any_failed(group, error, doing=doing)


def any_over_ranks(group: Group, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag, equally many on each rank, whether any rank has set it. Collective."""
    reports = [unpack_flags(ints, len(flags)) for ints in group.all_gather_ints(pack_flags(flags))]
    return [any(of_members) for of_members in zip(*reports, strict=True)]
