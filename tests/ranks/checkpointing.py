"""What the tests of checkpoints share: models, ways of sharding, and training that does not depend on the world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardopt import Sharding, ZeroRedundancyOptimizer


@dataclass(frozen=True)
class Way:
    """How an optimizer is sharded."""

    granularity: str
    gradients: bool
    has_masters: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.has_masters else torch.float32

    def __str__(self) -> str:
        stage = 2 if self.gradients else 1
        return f"{self.granularity}, stage {stage}" + (", masters" if self.has_masters else "")


WAYS = [
    Way(g, s, m) for m in (False, True) for g in ("parameter", "element") for s in (False, True)
]


def make_model(dtype: torch.dtype = torch.float32, seed: int = 7) -> nn.Module:
    """A channels-last convolution, matrices, vectors, and a parameter that is not trained."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.Flatten(), nn.Linear(20, 11), nn.Tanh(), nn.Linear(11, 3)
    )
    model[0].to(memory_format=torch.channels_last)
    model[4].bias.requires_grad_(False)
    return model.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 2, 4, 4, generator=generator).to(dtype)


def make(model: nn.Module, way: Way, group: Any = None, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        group,
        parameters_as_bucket_view=way.granularity == "element",
        sharding=Sharding(
            granularity=way.granularity,
            gradients=way.gradients,
            master_dtype=torch.float32 if way.has_masters else None,
            bucket_mb=0.0005,
            **options,
        ),
        lr=0.01,
    )


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        model(batch(step, dtype)).float().square().mean().backward()
        optimizer.step()


def full_state(zero: Any) -> dict[str, Any]:
    """The consolidated state, on every rank of the optimizer's group."""
    group = zero.join_process_group
    zero.consolidate_state_dict()
    if dist.get_world_size(group) == 1:
        return zero.state_dict()
    found = [zero.state_dict() if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    return found[0]


def groups_of(sizes: list[int]) -> dict[int, Any]:
    """A group of the first ranks for each size; this process's own view of it, which may be of a non-member."""
    return {size: dist.new_group(list(range(size))) for size in sizes}


def is_member(group: Any) -> bool:
    return group is not dist.GroupMember.NON_GROUP_MEMBER


def shared_folder(tmp: Any, name: str) -> Any:
    """A folder below pytest's ``tmp_path``, which all ranks were given."""
    return tmp / name
