"""What one optimizer shards: its parameters with their facts, owners and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardopt.buffers import (
    GradientBucket,
    ParamBucket,
    StagedBucket,
    StagingPool,
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
    element_parts,
    loads_of,
    plan_element_layout,
    plan_layout,
    plan_owners,
    whole_parts,
)
from shardopt.sharding import Sharding
from shardopt.step import equalize

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

    ``parts`` is what this rank owns, and ``tensors`` what its local optimizer updates for each of them: the parameter, or
    at element granularity a flat parameter in the same memory. All of it only ever grows, by ``admit``; what was
    admitted keeps its place.
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
        self.buckets: list[ParamBucket] = []
        self.gradient_buckets: list[GradientBucket] = []
        self._devices: list[Any] = []
        self._framework = framework
        self._sharding = sharding
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
        world_size, bucket_nbytes = self.group.world_size, self._sharding.bucket_nbytes
        if self._sharding.granularity == "element":
            owners = [0] * len(new)  # of no meaning, but for empty parameters
            layout = plan_element_layout(
                new,
                world_size=world_size,
                bucket_nbytes=bucket_nbytes,
                alignment_nbytes=VIEW_ALIGNMENT_NBYTES,
            )
        else:
            loads = loads_of([s.numel for s in self.specs], self.owners, world_size)
            owners = plan_owners([spec.numel for spec in new], loads)
            layout = plan_layout(
                new,
                owners,
                world_size=world_size,
                bucket_nbytes=bucket_nbytes,
                alignment_nbytes=VIEW_ALIGNMENT_NBYTES if self._has_views else 1,
            )
        return Plan(tuple(specs), (*self.owners, *owners), layout)

    def admit(self, param_groups: Sequence[dict[str, Any]], plan: Plan) -> None:
        """Take planned parameters in: from here on they have owners and lie in buckets. Collective.

        With sharded gradients the new parameters become those of rank 0 on every rank.
        """
        start = len(self.specs)
        self.params[:] = [param for group in param_groups for param in group["params"]]
        self._devices = [param.device for param in self.params]
        self.specs[:], self.owners[:] = plan.specs, plan.owners
        new = [self._bucket(bucket) for bucket in plan.layout.buckets]
        self.buckets += new
        if self._sharding.gradients:
            self.gradient_buckets += [self._gradient_bucket(b) for b in plan.layout.buckets]
            equalize(self.group, new)
        self.parts[:] = self.parts_of(self.group.rank)
        for part in self.parts:
            if part.param >= start:
                self.tensors[part.param] = self._tensor(part)

    def retract(self, num_params: int) -> None:
        """Undo ``admit``: keep the first ``num_params`` parameters only."""
        while self.buckets and max(self.buckets[-1].plan.params) >= num_params:
            self.buckets.pop().restore()
        del self.gradient_buckets[len(self.buckets) if self._sharding.gradients else 0 :]
        for facts in (self.params, self.specs, self.owners, self._devices):
            del facts[num_params:]
        self.parts[:] = [part for part in self.parts if part.param < num_params]
        for param in [param for param in self.tensors if param >= num_params]:
            del self.tensors[param]

    def parts_of(self, rank: int) -> list[Part]:
        """What ``rank`` owns, in the order of parameters."""
        if self._sharding.granularity == "parameter":
            return whole_parts(self.specs, self.owners, rank)
        layout = Layout(self.group.world_size, tuple(bucket.plan for bucket in self.buckets))
        return element_parts(self.specs, layout, rank)

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

    def versions(self) -> list[int]:
        """The version counters of what this rank updates."""
        return [tensor._version for tensor in self.tensors.values()]

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

    def pass_gradients(self) -> None:
        """Let each part of a parameter see its part of the gradient; a whole parameter has it already."""
        for part in self.parts:
            if not part.is_whole:
                gradient = self.params[part.param].grad
                self.tensors[part.param].grad = (
                    None if gradient is None else self._gradient_part(gradient, part)
                )

    def drop_part_gradients(self) -> None:
        """Let go of the gradients that ``pass_gradients`` cut parts of."""
        for part in self.parts:
            if not part.is_whole:
                self.tensors[part.param].grad = None

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

    def drop_gradients(self) -> None:
        """Forget all gradients, and those of what this rank updates."""
        for tensor in [*self.params, *self.tensors.values()]:
            tensor.grad = None

    def require_intact(self) -> None:
        """Raise if a parameter no longer fits its bucket; take views back whose ``data`` was replaced."""
        require_unchanged(self.params, self.specs, self._devices)
        for bucket in self.buckets:
            bucket.reattach()
        if self._sharding.gradients or self._sharding.granularity == "element":
            for param, spec in zip(self.params, self.specs, strict=True):
                if param.grad is not None and param.grad.is_sparse:
                    raise ValueError(
                        f"{spec.label}: its gradient is sparse, which {self._sharding} can neither cut nor reduce; use "
                        "dense gradients (nn.Embedding(sparse=False)), or DDP and the default Sharding()"
                    )

    def require_reduced_only(self) -> None:
        """Raise if a backward added gradients after the reduction.

        Raises:
            RuntimeError: What to do instead.
        """
        for param, spec in zip(self.params, self.specs, strict=True):
            if (
                param.numel()
                and param.grad is not None
                and self.tensors.get(spec.index) is not param
            ):
                raise RuntimeError(
                    f"{spec.label}: a backward added to its gradient after clip_grad_norm_() had reduced all of them; "
                    "call clip_grad_norm_() once, after the last backward before step()"
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
        if self._has_views:
            return ViewedBucket(bucket, self.params, self.specs)
        return self._staged(bucket)

    def _staged(self, bucket: Bucket) -> StagedBucket:
        return StagedBucket(bucket, self.params, pool=self._pool, copy_all=self._framework.copy_all)

    def _gradient_bucket(self, bucket: Bucket) -> GradientBucket:
        return GradientBucket(
            bucket,
            self.params,
            self.specs,
            rank=self.group.rank,
            pool=self._pool,
            copy_all=self._framework.copy_all,
        )

    def _tensor(self, part: Part) -> Tensor:
        """What the local optimizer updates for a part: the parameter, or a flat parameter in its memory."""
        if part.is_whole:
            return self.params[part.param]
        for bucket in self.buckets:
            for slot in bucket.plan.sections[self.group.rank].slots:
                if slot.param == part.param and isinstance(bucket, ViewedBucket):
                    made: Tensor = self._framework.make_param(bucket.flat_part(slot))
                    return made
        raise AssertionError(f"no bucket holds {part}")

    def _gradient_part(self, gradient: Tensor, part: Part) -> Tensor:
        """(part.numel,) of a gradient, in the memory order of its parameter."""
        param = self.params[part.param]
        if gradient.stride() != param.stride():
            ordered = param.detach().clone()
            ordered.copy_(gradient.detach())
            gradient = ordered
        flat = gradient.detach().as_strided((param.numel(),), (1,), gradient.storage_offset())
        return flat.narrow(0, part.offset, part.numel)
