"""What one optimizer shards: its parameters with their facts, owners and buckets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardopt.buffers import (
    GradientBucket,
    OwnedSection,
    ParamBucket,
    StagedBucket,
    ViewedBucket,
    find_shared_memory,
    require_unchanged,
)
from shardopt.collectives import Group, option_facts, raise_together, require_equal
from shardopt.errors import ParameterChangedError
from shardopt.frameworks import Framework
from shardopt.param_groups import read_specs
from shardopt.partition import (
    Bucket,
    Layout,
    ParamSpec,
    Part,
    imbalance_of,
    loads_of,
    parts_of,
    plan_element_layout,
    plan_layout,
    plan_owners,
)
from shardopt.sharding import Sharding
from shardopt.step import equalize

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

VIEW_ALIGNMENT_NBYTES = 64
"""Where parameters may start in a flat bucket: torch's own CPU allocator aligns to 64 bytes, and matrix kernels may
choose other instructions, hence other roundings, below that."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to become of the parameters of some param groups; equal on every rank.

    Attributes:
        specs: The facts of all parameters, those admitted before included.
        owners: The owner of each; of no meaning for one that is cut by element, unless it is empty.
        layout: The buckets of those that are new.
    """

    specs: tuple[ParamSpec, ...]
    owners: tuple[int, ...]
    layout: Layout


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
    ) -> Plan:
        """Compare what every rank was given, then give the parameters not yet admitted owners and buckets. Collective.

        Args:
            param_groups: Those admitted, followed by new ones.
            granularities: Of each group.
            policy: Further (label, value) facts that ranks must share.

        Raises:
            RankMismatchError: Ranks were given different things; names the first difference.
            ValueError: Two parameters share memory, here; ``RemoteRankError`` on other ranks.
        """
        with raise_together(self.group, doing="checking parameters"):
            specs = read_specs(param_groups, granularities, self._sharding.cost)
            if pair := find_shared_memory([p for g in param_groups for p in g["params"]]):
                first, second = (specs[i].label for i in pair)
                raise ValueError(
                    f"{first} and {second} overlap in memory, so two ranks would overwrite each other's updates; "
                    "pass one parameter for each piece of memory"
                )
        facts = [(f"param {s.index}", s.facts(with_stride=self.has_views)) for s in specs]
        require_equal(
            self.group,
            [*policy, *facts, *option_facts(param_groups)],
            subject="every rank must make the same optimizer",
        )
        new = specs[len(self.specs) :]
        whole = [spec for spec in new if not spec.is_cut]
        owners = dict.fromkeys(range(len(self.specs), len(specs)), 0)
        planned = plan_owners([spec.load for spec in whole], self._whole_loads())
        owners.update(zip([spec.index for spec in whole], planned, strict=True))
        options: dict[str, Any] = {
            "world_size": self.group.world_size,
            "bucket_nbytes": self._sharding.bucket_nbytes,
            "alignment_nbytes": VIEW_ALIGNMENT_NBYTES if self.has_views else 1,
        }
        layouts = [
            plan_layout(whole, planned, **options),
            plan_element_layout([spec for spec in new if spec.is_cut], **options),
        ]
        buckets = tuple(bucket for layout in layouts for bucket in layout.buckets)
        return Plan(
            tuple(specs),
            (*self.owners, *owners.values()),
            Layout(self.group.world_size, buckets),
        )

    def admit(self, param_groups: Sequence[dict[str, Any]], plan: Plan) -> None:
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
        return imbalance_of([load + share for load in self._whole_loads()])

    def _whole_loads(self) -> list[float]:
        """What each rank carries of parameters that are not cut."""
        loads = [0.0 if spec.is_cut else spec.load for spec in self.specs]
        return loads_of(loads, self.owners, self.group.world_size)

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

    def gradients_of(self, number: int) -> dict[int, Tensor]:
        """The gradients in ``param.grad`` of what this rank owns in a bucket, parts as flat tensors."""
        bucket = self.buckets[number].plan
        gradients: dict[int, Tensor] = {}
        for slot in bucket.sections[self.group.rank].slots:
            gradient = self.params[slot.param].grad
            if gradient is not None and bucket.is_cut:
                part = Part(slot.param, slot.offset, slot.numel, False)
                gradients[slot.param] = self._gradient_part(gradient, part)
            elif gradient is not None:
                gradients[slot.param] = gradient
        return gradients

    def reduced_gradients_of(self, number: int, used: Sequence[bool]) -> dict[int, Tensor]:
        """The averages that this rank holds of what it owns in a bucket, as views of the memory they are kept in."""
        plan = self.buckets[number].plan
        owned = [slot.param for slot in plan.sections[self.group.rank].slots if used[slot.param]]
        return {param: self._reduced(param, is_whole=not plan.is_cut) for param in owned}

    def reduced_gradient(self, param: int) -> Tensor | None:
        """The average that this rank holds of its part of a parameter's gradient; None where it owns nothing of it."""
        plan = self.buckets[self.bucket_of[param]].plan
        if any(slot.param == param for slot in plan.sections[self.group.rank].slots):
            return self._reduced(param, is_whole=not plan.is_cut)
        return None

    def _reduced(self, param: int, *, is_whole: bool) -> Tensor:
        bucket = self.gradient_buckets[self.bucket_of[param]]
        return bucket.reduced(param, is_whole=is_whole)

    def updating_sections(self) -> list[bool]:
        """For each bucket whether a parameter in this rank's section has a gradient."""
        return [
            any(
                self.params[slot.param].grad is not None for slot in sections[self.group.rank].slots
            )
            for sections in (bucket.plan.sections for bucket in self.buckets)
        ]

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
            return ViewedBucket(bucket, self.params, self.specs)
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

    def _gradient_part(self, gradient: Tensor, part: Part) -> Tensor:
        """(part.numel,) of a gradient, in the memory order of its parameter."""
        param = self.params[part.param]
        if gradient.stride() != param.stride():
            ordered = param.detach().clone()
            ordered.copy_(gradient.detach())
            gradient = ordered
        flat = gradient.detach().as_strided((param.numel(),), (1,), gradient.storage_offset())
        return flat.narrow(0, part.offset, part.numel)
