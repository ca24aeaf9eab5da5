"""What every rank says before a step, and what follows from it for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.collectives import (
    Group,
    digest,
    option_fingerprint,
    pack_flags,
    raise_failures,
    ranks_by_flag,
    require_equal,
    unpack_flags,
)
from shardopt.errors import RankMismatchError


@dataclass(frozen=True, slots=True)
class Intent:
    """What the group is about to do, known on every rank.

    Attributes:
        is_skipped: A rank found an inf or NaN in its gradients, so no rank updates.
        joined: Ranks that ran out of inputs and take part only for their shards.
        active: The other ranks; never empty.
        updating: For each bucket the ranks that have a gradient for something in their section.
    """

    is_skipped: bool
    joined: tuple[int, ...]
    active: tuple[int, ...]
    updating: tuple[tuple[int, ...], ...]


def agree(
    group: Group,
    param_groups: Sequence[Mapping[str, Any]],
    *,
    error: Exception | None = None,
    skip: bool = False,
    is_joined: bool = False,
    updates: Sequence[bool] = (),
    fingerprint: Sequence[tuple[str, str]] = (),
    extra: Sequence[int] = (),
    on_extra: Callable[[list[list[int]]], None] | None = None,
) -> Intent:
    """Compare options and let all ranks fail or none before anything is updated. Collective.

    Args:
        group: The sharding group.
        param_groups: The whole optimizer's param groups. Those of joined ranks are not compared: they are stale.
        error: Why this rank cannot step, or None.
        skip: Whether this rank wants the update skipped.
        is_joined: Whether this rank ran out of inputs.
        updates: For each bucket whether this rank has a gradient for something in its section.
        fingerprint: What is compared beside the options.
        extra: Further ints for the other ranks, equally many on each.
        on_extra: Told of those of every member, before anything is raised. Collective. May raise ``RankMismatchError`` on
            every rank.

    Raises:
        Exception: As ``raise_if_any_failed``, where ``error`` is set on any rank.
        RankMismatchError: Options differ; without this every shard would be trained with its owner's options.
    """
    compared = [*fingerprint, *option_fingerprint(param_groups)]
    mine = digest(compared)
    everything = group.all_gather_ints(
        [int(error is not None), int(skip), int(is_joined), mine, *pack_flags(updates), *extra]
    )
    reports = [theirs[: len(theirs) - len(extra)] for theirs in everything]
    mismatch: RankMismatchError | None = None
    if on_extra is not None:
        try:
            on_extra([theirs[len(theirs) - len(extra) :] for theirs in everything])
        except RankMismatchError as raised:  # on every rank; may follow from another rank's error
            mismatch = raised
    if any(failed for failed, *_ in reports):
        raise_failures(group, error, doing="preparing the step")
    if mismatch is not None:
        raise mismatch
    active = tuple(rank for rank, (_, _, joined, *_) in enumerate(reports) if not joined)
    if len({reports[rank][3] for rank in active}) > 1:
        require_equal(
            group,
            compared,
            subject="options differ between ranks; set learning rates and schedules alike",
            ranks=active,
        )
    return Intent(
        is_skipped=any(skips for _, skips, *_ in reports),
        joined=tuple(rank for rank in range(group.num_members) if rank not in active),
        active=active,
        updating=ranks_by_flag(
            [unpack_flags(packed, len(updates)) for _, _, _, _, *packed in reports], group.rank_of
        ),
    )
