"""The two directions, as all ranks take them together: collect the full state dict, load a full state dict."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from shardopt.checkpoint.access import StateAccess
from shardopt.checkpoint.consolidate import consolidate
from shardopt.checkpoint.fitting import require_keys, require_shapes
from shardopt.checkpoint.load import local_part, state_fingerprint
from shardopt.checkpoint.state_dict import assemble, full_state_dict
from shardopt.checkpoint.structure import take_tensors
from shardopt.collectives import Group, raise_together, require_equal


def require_target(group: Group, rank: int, *, name: str = "to") -> None:
    """Raise on all ranks unless they name the same rank of the group. Collective.

    Args:
        group: The sharding group.
        rank: What this rank was given.
        name: Of the argument, for messages.

    Raises:
        RankMismatchError: They name different ones.
        ValueError: It is no rank of the group.
    """
    subject = "consolidate_state_dict()" if name == "to" else "load_full()"
    require_equal(group, [(name, repr(rank))], subject=subject)
    if rank not in range(group.world_size):
        raise ValueError(f"{name}: expected a rank in [0, {group.world_size}), got {rank!r}")


def collect_full(
    access: StateAccess, param_groups: Sequence[dict[str, Any]], *, to: int
) -> dict[str, Any] | None:
    """Return, on rank ``to``, what the unsharded optimizer's ``state_dict()`` would be; elsewhere None. Collective.

    Args:
        access: To the state of this rank.
        param_groups: Of the whole optimizer.
        to: The receiving rank.
    """
    group, is_tensor = access.group, access.is_tensor
    with raise_together(group, doing="state_dict() of the local optimizer"):
        local = access.read()
        mine: dict[Any, Any] = {**local.entries, **local.others}
        pickle.dumps(take_tensors(mine, is_tensor)[0])  # what cannot travel is to fail here
    state = consolidate(
        group,
        mine,
        to=to,
        chunk_nbytes=access.chunk_nbytes,
        empty=access.empty,
        is_tensor=is_tensor,
    )
    if state is None:
        return None
    whole = assemble(state, access.specs, access.empty)
    return full_state_dict(local.extra, whole, param_groups, is_tensor)


def load_full(access: StateAccess, state_dict: Any, param_groups: list[dict[str, Any]]) -> None:
    """Load this rank's part of a full state dict into the local optimizer, and the options of all. Collective.

    Args:
        access: To the state of this rank.
        state_dict: The full state dict; left as it is, and no memory of it is kept.
        param_groups: Of the whole optimizer; its groups are replaced.

    Raises:
        StateMismatchError: It does not fit. As with every failure, on all ranks, with nothing loaded.
        RankMismatchError: Ranks passed different ones.
    """
    specs = access.specs
    with raise_together(access.group, doing="load_state_dict()"):
        require_shapes(state_dict, access, param_groups)
    fingerprint = state_fingerprint(state_dict, specs)
    require_equal(access.group, fingerprint, subject="every rank must load the same state dict")
    with raise_together(access.group, doing="load_state_dict()"):
        require_keys(state_dict, access)
    access.replace(
        lambda: local_part(state_dict, access.parts, specs, access.is_tensor),
        param_groups=param_groups,
        saved_groups=state_dict["param_groups"],
    )
