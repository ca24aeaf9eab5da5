"""What one optimizer shards: its parameters with their facts, owners and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardopt.buffers import (
    ParamBucket,
    StagedBucket,
    StagingPool,
    ViewedBucket,
    find_shared_memory,
    require_unchanged,
)
from shardopt.collectives import Group, raise_together, require_equal
from shardopt.frameworks import Framework
from shardopt.param_groups import local_group, read_specs
from shardopt.partition import Bucket, Layout, ParamSpec, loads_of, plan_layout, plan_owners
from shardopt.sharding import Sharding
from shardopt.step import option_facts

if TYPE_CHECKING:
    from torch import Tensor

VIEW_ALIGNMENT_NBYTES = 64
"""Where parameters may start in a flat bucket: torch's own CPU allocator aligns to 64 bytes, and matrix kernels may
choose other instructions, hence other roundings, below that."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to become of the parameters of some param groups; equal on every rank.

    Attributes:
        specs: The facts of all parameters, those admitted before included.
        owners: The owner of each.
        layout: The buckets of those that are new.
    """

    specs: tuple[ParamSpec, ...]
    owners: tuple[int, ...]
    layout: Layout


class Shards:
    """Parameters, by index, with who owns them and which bucket they travel in.

    ``params``, ``specs``, ``owners`` and ``buckets`` only ever grow, by ``admit``; what was admitted keeps its place.
    """

    def __init__(
        self, group: Group, framework: Framework, sharding: Sharding, *, has_views: bool
    ) -> None:
        """Start empty; ``has_views`` makes parameters views of their buckets."""
        self.group = group
        self.params: list[Tensor] = []
        self.specs: list[ParamSpec] = []
        self.owners: list[int] = []
        self.buckets: list[ParamBucket] = []
        self._devices: list[Any] = []
        self._framework = framework
        self._bucket_nbytes = sharding.bucket_nbytes
        self._has_views = has_views
        self._pool = StagingPool()

    def plan(
        self, param_groups: Sequence[dict[str, Any]], policy: Sequence[tuple[str, str]]
    ) -> Plan:
        """Compare what every rank was given, then give the parameters not yet admitted owners and buckets. Collective.

        Args:
            param_groups: Those admitted, followed by new ones.
            policy: Further (label, value) facts that ranks must share.

        Raises:
            RankMismatchError: Ranks were given different things; names the first difference.
            ValueError: Two parameters share memory, here; ``RemoteRankError`` on other ranks.
        """
        specs = read_specs(param_groups)
        facts = [(f"param {s.index}", s.facts(with_stride=self._has_views)) for s in specs]
        require_equal(
            self.group,
            [*policy, *facts, *option_facts(param_groups)],
            subject="every rank must make the same optimizer",
        )
        with raise_together(self.group, doing="checking parameters"):
            if pair := find_shared_memory([p for g in param_groups for p in g["params"]]):
                first, second = (specs[i].label for i in pair)
                raise ValueError(
                    f"{first} and {second} overlap in memory, so two ranks would overwrite each other's updates; "
                    "pass one parameter for each piece of memory"
                )
        new = specs[len(self.specs) :]
        loads = loads_of([s.numel for s in self.specs], self.owners, self.group.world_size)
        owners = plan_owners([spec.numel for spec in new], loads)
        layout = plan_layout(
            new,
            owners,
            world_size=self.group.world_size,
            bucket_nbytes=self._bucket_nbytes,
            alignment_nbytes=VIEW_ALIGNMENT_NBYTES if self._has_views else 1,
        )
        return Plan(tuple(specs), (*self.owners, *owners), layout)

    def local_groups(
        self, param_groups: Sequence[dict[str, Any]], plan: Plan, *, start: int = 0
    ) -> list[dict[str, Any]]:
        """The param groups from number ``start`` on, with the parameters of this rank only."""
        everyone = [param for group in param_groups for param in group["params"]]
        mine = {
            id(p)
            for p, owner in zip(everyone, plan.owners, strict=True)
            if owner == self.group.rank
        }
        return [local_group(group, mine) for group in param_groups[start:]]

    def admit(self, param_groups: Sequence[dict[str, Any]], plan: Plan) -> None:
        """Take planned parameters in: from here on they have owners and lie in buckets."""
        self.specs[:], self.owners[:] = plan.specs, plan.owners
        self.params[:] = [param for group in param_groups for param in group["params"]]
        self._devices = [param.device for param in self.params]
        for bucket in plan.layout.buckets:
            if self._has_views:
                self.buckets.append(ViewedBucket(bucket, self.params, self.specs))
            else:
                self.buckets.append(self._staged(bucket))

    @property
    def owned(self) -> list[int]:
        """Indices of this rank's parameters, in the order of the local optimizer's groups."""
        return [index for index, owner in enumerate(self.owners) if owner == self.group.rank]

    def versions(self) -> list[int]:
        """The version counters of this rank's parameters."""
        return [self.params[index]._version for index in self.owned]

    def require_intact(self) -> None:
        """Raise if a parameter no longer fits its bucket; take views back whose ``data`` was replaced."""
        require_unchanged(self.params, self.specs, self._devices)
        for bucket in self.buckets:
            bucket.reattach()

    def buckets_for(self, indices: Sequence[int]) -> list[StagedBucket]:
        """Buckets, one per dtype and device, for parameters that are exchanged together."""
        specs = [self.specs[i] for i in indices]
        layout = plan_layout(
            specs,
            [self.owners[i] for i in indices],
            world_size=self.group.world_size,
            bucket_nbytes=self.group.world_size * max(1, sum(spec.nbytes for spec in specs)),
        )
        return [self._staged(bucket) for bucket in layout.buckets]

    def _staged(self, bucket: Bucket) -> StagedBucket:
        return StagedBucket(bucket, self.params, pool=self._pool, copy_all=self._framework.copy_all)
