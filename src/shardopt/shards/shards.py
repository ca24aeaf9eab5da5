"""What one optimizer shards: its parameters with their facts, owners and buckets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardopt.buffers import (
    GradientBucket,
    OwnedSection,
    ParamBucket,
    StagedBucket,
    ViewedBucket,
    require_unchanged,
)
from shardopt.collectives import Group
from shardopt.errors import ParameterChangedError
from shardopt.frameworks import Framework
from shardopt.partition import (
    Bucket,
    ParamSpec,
    Part,
    imbalance_of,
    parts_of,
    plan_layout,
    whole_loads,
)
from shardopt.sharding import Sharding
from shardopt.shards.exchange import equalize
from shardopt.shards.plan import ShardPlan, compare_params, plan_shards

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Shards:
    """Parameters, by index, with who owns them and which bucket they travel in.

    ``parts`` is what this rank owns, and ``tensors`` what its local optimizer updates for each of them: the parameter,
    at element granularity a flat parameter in the same memory, or master weights. ``buckets``, ``sections`` (what this
    rank owns of each bucket) and, if they are sharded, ``gradient_buckets`` go side by side. All of it only ever grows, by
    ``admit``; what was admitted keeps its place.
    """

    def __init__(
        self, group: Group, framework: Framework, sharding: Sharding, *, has_views: bool
    ) -> None:
        """Start empty; ``has_views`` makes parameters views of their buckets."""
        self.group = group
        self.params: list[Tensor] = []
        self.specs: list[ParamSpec] = []
        self.owners: list[int] = []
        self.parts: list[Part] = []
        self.tensors: dict[int, Tensor] = {}
        self.bucket_of: dict[int, int] = {}
        self.buckets: list[ParamBucket] = []
        self.sections: list[OwnedSection] = []
        self.gradient_buckets: list[GradientBucket] = []
        self.has_views = has_views
        self._devices: list[Any] = []
        self._framework = framework
        self._sharding = sharding

    def plan(
        self,
        param_groups: Sequence[dict[str, Any]],
        granularities: Sequence[str],
        policy: Sequence[tuple[str, str]],
    ) -> ShardPlan:
        """Compare what every rank was given, then plan for the parameters not yet admitted. Collective.

        Arguments and errors are those of ``compare_params``.
        """
        specs = compare_params(
            self.group,
            self._sharding,
            param_groups,
            granularities,
            policy,
            has_views=self.has_views,
        )
        world_size = self.group.world_size
        return plan_shards(
            specs, self.owners, self._sharding, world_size=world_size, has_views=self.has_views
        )

    def admit(self, param_groups: Sequence[dict[str, Any]], plan: ShardPlan) -> None:
        """Take planned parameters in: from here on they have owners and lie in buckets. Collective.

        With sharded gradients the new parameters become those of the first rank on every rank.
        """
        start = len(self.specs)
        self.params[:] = [param for group in param_groups for param in group["params"]]
        self._devices = [param.device for param in self.params]
        self.specs[:], self.owners[:] = plan.specs, plan.owners
        new = [self._bucket(bucket) for bucket in plan.layout.buckets]
        if self._sharding.gradients:
            self.gradient_buckets += [
                self._gradient_bucket(bucket) for bucket in plan.layout.buckets
            ]
            equalize(self.group, new)
        for number, bucket in enumerate(new, len(self.buckets)):
            self.bucket_of.update(dict.fromkeys(bucket.plan.params, number))
        self.buckets += new
        self.sections += [self._section(bucket) for bucket in new]
        self.parts[:] = self.parts_of(self.group.rank)
        for part in self.parts:
            if part.param >= start:
                self.tensors[part.param] = self._tensor(part.param)
        logger.info("the rank that carries most carries %.3f times the mean", self.imbalance)

    def retract(self, num_params: int) -> None:
        """Undo ``admit``: keep the first ``num_params`` parameters only."""
        while self.buckets and max(self.buckets[-1].plan.params) >= num_params:
            self.buckets.pop().restore()
        for beside in (self.sections, self.gradient_buckets):
            del beside[len(self.buckets) :]
        for facts in (self.params, self.specs, self.owners, self._devices):
            del facts[num_params:]
        self.parts[:] = [part for part in self.parts if part.param < num_params]
        for by_param in (self.tensors, self.bucket_of):
            for param in [param for param in by_param if param >= num_params]:
                del by_param[param]

    def parts_of(self, rank: int) -> list[Part]:
        """What ``rank`` owns, in the order of parameters."""
        return parts_of(self.specs, self.owners, [bucket.plan for bucket in self.buckets], rank)

    @property
    def imbalance(self) -> float:
        """What the rank that carries most carries, over the mean of all ranks."""
        cut = sum(spec.load for spec in self.specs if spec.is_cut)
        share = cut / self.group.world_size
        loads = whole_loads(self.specs, self.owners, self.group.world_size)
        return imbalance_of([load + share for load in loads])

    def local_groups(
        self, param_groups: Sequence[dict[str, Any]], *, start: int = 0
    ) -> list[dict[str, Any]]:
        """The param groups from number ``start`` on, as the local optimizer of this rank gets them."""
        groups = []
        for number, group in enumerate(param_groups[start:], start):
            mine = [part.param for part in self.parts if self.specs[part.param].group == number]
            local = {**group, "params": [self.tensors[param] for param in mine]}
            if "param_names" in group:
                local["param_names"] = [self.specs[param].name for param in mine]
            groups.append(local)
        return groups

    def masters(self) -> dict[int, Tensor]:
        """The master weights of what this rank owns, by parameter."""
        return {
            param: tensor
            for section in self.sections
            if section.masters is not None
            for param, tensor in section.tensors.items()
        }

    def touch(self, number: int, ranks: Sequence[int]) -> None:
        """Tell autograd that sections of a bucket have changed, and master weights that this was no one else."""
        sections = [self.buckets[number].plan.sections[rank] for rank in ranks]
        changed = dict.fromkeys(slot.param for section in sections for slot in section.slots)
        self._framework.touch([self.params[param] for param in changed])
        self.sections[number].note()

    def versions(self) -> list[int]:
        """The version counters of what this rank updates."""
        return [tensor._version for tensor in self.tensors.values()]

    def sections_with(self, used: Sequence[bool]) -> list[list[int]]:
        """For each bucket the ranks whose section holds a parameter for which ``used`` is set."""
        return [
            [s.rank for s in bucket.plan.sections if any(used[slot.param] for slot in s.slots)]
            for bucket in self.buckets
        ]

    def require_listed(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Raise if the param groups were edited by hand.

        Raises:
            ParameterChangedError: They hold other parameters than were admitted.
        """
        listed = [id(param) for group in param_groups for param in group["params"]]
        if listed != [id(param) for param in self.params]:
            raise ParameterChangedError(
                f"param_groups hold {len(listed)} parameters, which are not the {len(self.params)} that were planned for; "
                "add parameters with add_param_group(), and make a new optimizer to remove or reorder some"
            )

    def require_intact(self) -> None:
        """Raise if a parameter no longer fits its bucket; take views back whose ``data`` was replaced."""
        require_unchanged(self.params, self.specs, self._devices)
        for bucket, section in zip(self.buckets, self.sections, strict=True):
            section.follow(bucket.reattach())
        if self._sharding.gradients or any(spec.is_cut for spec in self.specs):
            for param, spec in zip(self.params, self.specs, strict=True):
                if param.grad is not None and param.grad.is_sparse:
                    raise ValueError(
                        f"{spec.label}: its gradient is sparse, which {self._sharding} can neither cut nor reduce; use "
                        "dense gradients (nn.Embedding(sparse=False)), or DDP and the default Sharding()"
                    )

    def buckets_for(self, indices: Sequence[int]) -> list[StagedBucket]:
        """Buckets, one per dtype and device, for whole parameters that are exchanged together."""
        specs = [self.specs[i] for i in indices]
        layout = plan_layout(
            specs,
            [self.owners[i] for i in indices],
            world_size=self.group.world_size,
            bucket_nbytes=self.group.world_size * max(1, sum(spec.nbytes for spec in specs)),
        )
        return [self._staged(bucket) for bucket in layout.buckets]

    def _bucket(self, bucket: Bucket) -> ParamBucket:
        if self.has_views:
            return ViewedBucket(
                bucket, self.params, self.specs, own_storage=self._framework.own_storage
            )
        return self._staged(bucket)

    def _staged(self, bucket: Bucket) -> StagedBucket:
        return StagedBucket(
            bucket, self.params, pool=self.group.pool, copy_all=self._framework.copy_all
        )

    def _gradient_bucket(self, bucket: Bucket) -> GradientBucket:
        return GradientBucket(
            bucket,
            self.params,
            self.specs,
            rank=self.group.rank,
            num_members=self.group.num_members,
            wire_dtype=self._sharding.reduce_dtype,
            sum_dtype=self._sharding.sum_dtype,
            pool=self.group.pool,
            scale_into=self._framework.scale_into,
        )

    def _section(self, bucket: ParamBucket) -> OwnedSection:
        return OwnedSection(
            bucket,
            self.params,
            self.specs,
            rank=self.group.rank,
            master_dtype=self._sharding.master_dtype,
            pool=self.group.pool,
            copy_all=self._framework.copy_all,
            make_param=self._framework.make_param,
        )

    def _tensor(self, param: int) -> Tensor:
        """What the local optimizer updates for a parameter; an empty one lies in no bucket and is updated itself."""
        if param in self.bucket_of:
            return self.sections[self.bucket_of[param]].tensors[param]
        return self.params[param]
