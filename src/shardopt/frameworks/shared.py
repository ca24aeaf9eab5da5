"""What the adapters have in common, given a framework's modules."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardopt.collectives import Group, HybridGroup, LoneRank, RankGroup


def find_group(
    process_group: Any,
    *,
    framework: Any,
    distributed: Any,
    mesh_class: type,
    control_of: Callable[[Any], Any],
    shares_memory: bool,
    timeout_of: Callable[[Any], float],
) -> Group:
    """Return the sharding group that ``process_group`` stands for.

    Args:
        process_group: None for the default group, a process group, a device mesh of 1 dimension, or of 2 for a grid that
            shards along the second and replicates along the first, or the pair of both groups of a grid. Where no default group was
            initialized and no launcher announced other processes, this process is rank 0 of 1, so that a script runs
            on one machine as it is.
        framework: The module of the framework.
        distributed: Its ``distributed`` module.
        mesh_class: Its ``DeviceMesh``.
        control_of: Returns a group of the same ranks that serves the CPU. Collective.
        timeout_of: Returns the seconds after which an operation of such a group fails.
        shares_memory: Whether ranks of one host are to pass data through shared memory.

    Raises:
        RuntimeError: A launcher announced several processes (``WORLD_SIZE``) but ``init_process_group`` was not called;
            going on alone would train that many unrelated models.
        ValueError: This process is no member of the group, or the mesh has more than two dimensions.
        TypeError: Neither a process group nor a mesh.
    """
    if not distributed.is_initialized():
        if process_group is not None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            reason = (
                "WORLD_SIZE is above 1" if process_group is None else "a process_group was given"
            )
            raise RuntimeError(
                f"{distributed.__name__} is not initialized, but {reason}; "
                "call init_process_group() before making the optimizer"
            )
        return LoneRank()
    row, column = _row_and_column(process_group, mesh_class)
    groups = [_checked_group(group, distributed) for group in (row, column) if group is not _ABSENT]
    made = [
        _make(
            group,
            framework,
            distributed,
            control_of,
            timeout_of,
            shares_memory=shares_memory and number == 0,
        )
        for number, group in enumerate(groups)
    ]
    return made[0] if len(made) == 1 else HybridGroup(*made)


_ABSENT = object()


def _row_and_column(process_group: Any, mesh_class: type) -> tuple[Any, Any]:
    """The group that shards, and that of replicas if there is one."""
    if isinstance(process_group, tuple) and len(process_group) == 2:
        return process_group
    if not isinstance(process_group, mesh_class):
        return process_group, _ABSENT
    num_dims = process_group.ndim  # type: ignore[attr-defined]
    if num_dims == 1:
        return process_group.get_group(), _ABSENT  # type: ignore[attr-defined]
    if num_dims == 2:
        return process_group.get_group(1), process_group.get_group(0)  # type: ignore[attr-defined]
    raise ValueError(
        f"process_group is a DeviceMesh of {num_dims} dimensions, expected 1, or 2 to shard along the second and "
        "replicate along the first; pass one or two dimensions of it, e.g. mesh['data']"
    )


def _checked_group(process_group: Any, distributed: Any) -> Any:
    group = distributed.group.WORLD if process_group is None else process_group
    is_group = isinstance(group, distributed.ProcessGroup)
    if not is_group and group != distributed.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            "process_group: expected a ProcessGroup, a DeviceMesh, a pair of groups (that shards, that replicates) or "
            f"None, got {type(group).__name__}"
        )
    if not is_group or distributed.get_rank(group) < 0:
        raise ValueError(
            f"process_group: global rank {distributed.get_rank()} is no member of it; "
            "make the optimizer only on the ranks that new_group() was given"
        )
    return group


def _make(
    group: Any,
    framework: Any,
    distributed: Any,
    control_of: Callable[[Any], Any],
    timeout_of: Callable[[Any], float],
    *,
    shares_memory: bool,
) -> Group:
    if distributed.get_world_size(group) == 1:
        return LoneRank(group)
    control = control_of(group)
    made = RankGroup(framework, distributed, group, control=control)
    made.meet(shares_memory=shares_memory, timeout_s=timeout_of(control))
    return made


ELEMENTWISE = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Optimizers of ``optim`` whose update of an element reads that element of parameter, gradient and state only."""


SEPARABLE = ("Adafactor", "Muon")
"""Optimizers of ``optim`` beyond these that update every parameter on its own."""


def is_elementwise(optimizer_class: Any, *, optim: Any) -> bool:
    """Whether ``optimizer_class`` is one of ``ELEMENTWISE`` itself; a subclass may do other things."""
    return any(optimizer_class is getattr(optim, name) for name in ELEMENTWISE)


def is_separable(optimizer_class: Any, *, optim: Any) -> bool:
    """Whether ``optimizer_class`` is one of ``ELEMENTWISE`` or ``SEPARABLE`` itself."""
    separable = [getattr(optim, name, None) for name in SEPARABLE]
    return optimizer_class in separable or is_elementwise(optimizer_class, optim=optim)


def fire_step_hooks(
    optimizer: Any, *, before: bool, global_before: dict[int, Any], global_after: dict[int, Any]
) -> None:
    """Call step hooks in the order of ``Optimizer.profile_hook_step``, for a step that no call of ``step()`` brackets."""
    if before:
        hooks = [*global_before.values(), *optimizer._optimizer_step_pre_hooks.values()]
    else:
        hooks = [*optimizer._optimizer_step_post_hooks.values(), *global_after.values()]
    for hook in hooks:
        hook(optimizer, (optimizer,), {})
