"""Compare what every rank was given, and plan who owns what of it and where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.arguments import read_specs
from shardopt.buffers import find_shared_memory
from shardopt.collectives import Group, option_fingerprint, raise_together, require_equal
from shardopt.partition import (
    Layout,
    ParamSpec,
    plan_element_layout,
    plan_layout,
    plan_owners,
    whole_loads,
)
from shardopt.sharding import Sharding

VIEW_ALIGNMENT_NBYTES = 64
"""Where parameters may start in a flat bucket: torch's own CPU allocator aligns to 64 bytes, and matrix kernels may
choose other instructions, hence other roundings, below that."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What is to become of the parameters of some param groups; equal on every rank.

    Attributes:
        specs: The facts of all parameters, those admitted before included.
        owners: The owner of each; of no meaning for one that is cut by element, unless it is empty.
        layout: The buckets of those that are new.
    """

    specs: tuple[ParamSpec, ...]
    owners: tuple[int, ...]
    layout: Layout


def compare_params(
    group: Group,
    sharding: Sharding,
    param_groups: Sequence[dict[str, Any]],
    granularities: Sequence[str],
    policy: Sequence[tuple[str, str]],
    *,
    has_views: bool,
) -> list[ParamSpec]:
    """Return the facts of all parameters, once all ranks are known to have been given the same. Collective.

    Args:
        group: The sharding group.
        sharding: The policy.
        param_groups: Those admitted, followed by new ones.
        granularities: Of each group.
        policy: Further (label, value) pairs that ranks must share.
        has_views: Whether parameters become views of their buckets.

    Raises:
        RankMismatchError: Ranks were given different things; names the first difference.
        ValueError: Two parameters share memory, here; ``RemoteRankError`` on other ranks.
    """
    with raise_together(group, doing="checking parameters"):
        specs = read_specs(param_groups, granularities, sharding.cost)
        if pair := find_shared_memory([p for g in param_groups for p in g["params"]]):
            first, second = (specs[i].label for i in pair)
            raise ValueError(
                f"{first} and {second} overlap in memory, so two ranks would overwrite each other's updates; "
                "pass one parameter for each piece of memory"
            )
    params = [(f"param {s.index}", s.fingerprint(with_stride=has_views)) for s in specs]
    require_equal(
        group,
        [*policy, *params, *option_fingerprint(param_groups)],
        subject="every rank must make the same optimizer",
    )
    return specs


def plan_shards(
    specs: Sequence[ParamSpec],
    owners: Sequence[int],
    sharding: Sharding,
    *,
    world_size: int,
    has_views: bool,
) -> ShardPlan:
    """Give parameters that have none an owner, and a place in new buckets.

    Args:
        specs: The facts of all parameters.
        owners: The owners of the first of them, which were admitted before.
        sharding: The policy.
        world_size: Number of ranks.
        has_views: Whether parameters become views of their buckets.
    """
    new = specs[len(owners) :]
    whole = [spec for spec in new if not spec.is_cut]
    new_owners = dict.fromkeys((spec.index for spec in new), 0)
    loads = whole_loads(specs[: len(owners)], owners, world_size)
    planned = plan_owners([spec.load for spec in whole], loads)
    new_owners.update(zip([spec.index for spec in whole], planned, strict=True))
    options: dict[str, Any] = {
        "world_size": world_size,
        "bucket_nbytes": sharding.bucket_nbytes,
        "alignment_nbytes": VIEW_ALIGNMENT_NBYTES if has_views else 1,
    }
    layouts = [
        plan_layout(whole, planned, **options),
        plan_element_layout([spec for spec in new if spec.is_cut], **options),
    ]
    buckets = tuple(bucket for layout in layouts for bucket in layout.buckets)
    return ShardPlan(tuple(specs), (*owners, *new_owners.values()), Layout(world_size, buckets))
