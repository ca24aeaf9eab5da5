"""What every rank says before a step, and what follows from it for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.collectives import Group, digest, option_facts, raise_as_settled, require_equal


@dataclass(frozen=True, slots=True)
class Intent:
    """What the group is about to do, known on every rank.

    Attributes:
        is_skipped: A rank found an inf or NaN in its gradients, so no rank updates.
        joined: Ranks that ran out of inputs and take part only for their shards.
        active: The other ranks; never empty.
    """

    is_skipped: bool
    joined: tuple[int, ...]
    active: tuple[int, ...]


def agree(
    group: Group,
    param_groups: Sequence[Mapping[str, Any]],
    *,
    error: Exception | None = None,
    skip: bool = False,
    is_joined: bool = False,
) -> Intent:
    """Compare options and settle errors before anything is updated. Collective.

    Args:
        group: The sharding group.
        param_groups: The whole optimizer's param groups. Those of joined ranks are not compared: they are stale.
        error: Why this rank cannot step, or None.
        skip: Whether this rank wants the update skipped.
        is_joined: Whether this rank ran out of inputs.

    Raises:
        Exception: As ``settle``, where ``error`` is set on any rank.
        RankMismatchError: Options differ; without this every shard would be trained with its owner's options.
    """
    mine = digest(option_facts(param_groups))
    flags = group.all_gather_ints([int(error is not None), int(skip), int(is_joined), mine])
    if any(failed for failed, _, _, _ in flags):
        raise_as_settled(group, error, doing="preparing the step")
    active = tuple(rank for rank, (_, _, joined, _) in enumerate(flags) if not joined)
    if len({flags[rank][3] for rank in active}) > 1:
        facts = [] if is_joined else option_facts(param_groups)
        require_equal(
            group,
            facts,
            subject="options differ between ranks; set learning rates and schedules alike",
            ranks=active,
        )
    return Intent(
        is_skipped=any(skips for _, skips, _, _ in flags),
        joined=tuple(rank for rank in range(group.world_size) if rank not in active),
        active=active,
    )
