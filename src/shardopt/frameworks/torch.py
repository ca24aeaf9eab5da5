"""The torch adapter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from shardopt.collectives import Group, LoneRank, RankGroup
from shardopt.frameworks.framework import Framework
from shardopt.join import ShadowStep

_NO_MEMBER = (
    "process_group: global rank {rank} is no member of it; make the optimizer only on the ranks that new_group() was "
    "given"
)


def find_group(process_group: Any) -> Group:
    """Return the sharding group that ``process_group`` stands for.

    Args:
        process_group: None for the default group, a process group, or a 1-D ``DeviceMesh``. Where no default group
            was initialized and no launcher announced other processes, this process is rank 0 of 1, so that a script
            runs on one machine as it is.

    Raises:
        RuntimeError: A launcher announced several processes (``WORLD_SIZE``) but ``init_process_group`` was not called;
            going on alone would train that many unrelated models.
        ValueError: This process is no member of the group, or the mesh has several dimensions.
        TypeError: Neither a process group nor a mesh.
    """
    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise RuntimeError(
                "torch.distributed is not initialized, but "
                f"{'a process_group was given' if process_group is not None else 'WORLD_SIZE is above 1'}; "
                "call torch.distributed.init_process_group() before making the optimizer"
            )
        return LoneRank()
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(
                f"process_group is a DeviceMesh of {process_group.ndim} dimensions, expected 1; "
                "pass one dimension of it, e.g. mesh['data']"
            )
        process_group = process_group.get_group()
    group = dist.group.WORLD if process_group is None else process_group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NO_MEMBER.format(rank=dist.get_rank()))
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"process_group: expected a ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(_NO_MEMBER.format(rank=dist.get_rank()))
    if dist.get_world_size(group) == 1:
        return LoneRank(group)
    return RankGroup(torch, dist, group, control=_control_group(group))


def _control_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself if one of its backends serves the CPU, else a gloo group of the same ranks. Collective."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    twin = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(twin, dist.ProcessGroup)
    return twin


def copy_all(destinations: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy in one kernel per dtype and device where there is one."""
    with torch.no_grad():
        torch._foreach_copy_(list(destinations), list(sources))


def reject_param(param: Any) -> str | None:
    """Sparse tensors and DTensors cannot lie in a flat bucket."""
    if isinstance(param, DTensor):
        return (
            "is a DTensor, which is sharded already; pass plain tensors, e.g. param.to_local(), or leave it to "
            "an optimizer of its own"
        )
    if param.layout is not torch.strided:
        return f"has layout {param.layout}, expected a dense tensor; make it dense with param.to_dense()"
    return None


def reject_optimizer(optimizer_class: Any) -> str | None:
    """L-BFGS does not update parameters one by one."""
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS):
        return (
            "LBFGS takes inner products over all parameters and evaluates the closure repeatedly, so it cannot be "
            "sharded by parameter; use it unsharded, or choose an optimizer that updates each parameter on its own"
        )
    return None


def empty_on_cpu(numel: int, dtype: str) -> torch.Tensor:
    """Make a flat CPU tensor; ``dtype`` is what ``str()`` makes of one."""
    return torch.empty(numel, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")


def fire_step_hooks(optimizer: Any, *, before: bool) -> None:
    """Call step hooks as ``Optimizer.profile_hook_step`` does, for a step that no call of ``step()`` brackets."""
    everyone = (
        torch_optimizer._global_optimizer_pre_hooks
        if before
        else torch_optimizer._global_optimizer_post_hooks
    )
    own = optimizer._optimizer_step_pre_hooks if before else optimizer._optimizer_step_post_hooks
    for hook in (
        [*everyone.values(), *own.values()] if before else [*own.values(), *everyone.values()]
    ):
        hook(optimizer, (optimizer,), {})


class TorchShadowStep(ShadowStep, JoinHook):
    """The hook as torch's ``Join`` expects it."""


TORCH = Framework(
    name="torch",
    is_tensor=torch.is_tensor,
    copy_all=copy_all,
    find_group=find_group,
    reject_param=reject_param,
    reject_optimizer=reject_optimizer,
    enable_grad=torch.enable_grad,
    empty_on_cpu=empty_on_cpu,
    fire_step_hooks=fire_step_hooks,
    notify_join=Join.notify_join_context,
    shadow_step=TorchShadowStep,
)
