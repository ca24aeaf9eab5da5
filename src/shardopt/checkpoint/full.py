"""The two directions, as all ranks take them together: collect the full state dict, load a full state dict."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.consolidate import consolidate
from shardopt.checkpoint.load import (
    MASTER_KEY,
    local_part,
    state_fingerprint,
    take_masters,
    validate,
)
from shardopt.checkpoint.state_dict import assemble, full_state_dict, renumber, whole_group
from shardopt.checkpoint.structure import take_tensors
from shardopt.collectives import Group, raise_together, require_equal
from shardopt.partition import ParamSpec, Part

if TYPE_CHECKING:
    from torch import Tensor


def drop_unowned(local_optimizer: Any) -> None:
    """Drop the empty state that merely reading ``state[param]`` makes for parameters of other ranks."""
    owned = {id(param) for group in local_optimizer.param_groups for param in group["params"]}
    state = local_optimizer.state
    for key in [key for key, entry in state.items() if hasattr(key, "data_ptr") and not entry]:
        if id(key) not in owned:
            del state[key]


def require_target(group: Group, to: int) -> None:
    """Raise on all ranks unless they name the same rank of the group. Collective.

    Raises:
        RankMismatchError: They name different ones.
        ValueError: It is no rank of the group.
    """
    require_equal(group, [("to", repr(to))], subject="consolidate_state_dict()")
    if to not in range(group.world_size):
        raise ValueError(f"to: expected a rank in [0, {group.world_size}), got {to!r}")


def collect_full(
    group: Group,
    local_optimizer: Any,
    *,
    parts: Sequence[Part],
    specs: Sequence[ParamSpec],
    masters: Mapping[int, Tensor],
    param_groups: Sequence[dict[str, Any]],
    to: int,
    chunk_nbytes: int,
    empty: Callable[[int, str], Tensor],
    is_tensor: Callable[[Any], bool],
) -> dict[str, Any] | None:
    """Return, on rank ``to``, what the unsharded optimizer's ``state_dict()`` would be; elsewhere None. Collective.

    Args:
        group: The sharding group.
        local_optimizer: The wrapped optimizer of this rank.
        parts: What of the parameters it updates, in its order.
        specs: All parameters.
        masters: The master weights of what it updates, by parameter; kept as an entry of the state.
        param_groups: Of the whole optimizer.
        to: The receiving rank.
        chunk_nbytes: Bytes of all messages in flight together.
        empty: Makes a flat CPU tensor from a numel and ``str(dtype)``.
        is_tensor: Whether a value is a tensor.

    """
    with raise_together(group, doing="state_dict() of the local optimizer"):
        drop_unowned(local_optimizer)
        local = local_optimizer.state_dict()
        mine = renumber(local, parts)
        for part in parts:
            if part.param in masters:
                mine[part] = {**mine.get(part, {}), MASTER_KEY: masters[part.param].detach()}
        pickle.dumps(take_tensors(mine, is_tensor)[0])  # what cannot travel is to fail here
    state = consolidate(
        group, mine, to=to, chunk_nbytes=chunk_nbytes, empty=empty, is_tensor=is_tensor
    )
    if state is None:
        return None
    return full_state_dict(local, assemble(state, specs, empty), param_groups, is_tensor)


def load_full(
    group: Group,
    local_optimizer: Any,
    state_dict: Any,
    *,
    parts: Sequence[Part],
    specs: Sequence[ParamSpec],
    masters: Mapping[int, Tensor],
    param_groups: list[dict[str, Any]],
    is_tensor: Callable[[Any], bool],
) -> None:
    """Load this rank's part of a full state dict into the local optimizer, and the options of all. Collective.

    Args:
        group: The sharding group.
        local_optimizer: The wrapped optimizer of this rank.
        state_dict: The full state dict; left as it is, and no memory of it is kept.
        parts: What of the parameters the local optimizer updates, in its order.
        specs: All parameters.
        masters: The master weights of what it updates, by parameter; set to those of the state dict, where it has any.
        param_groups: Of the whole optimizer; its groups are replaced.
        is_tensor: Whether a value is a tensor.

    Raises:
        StateMismatchError: It does not fit. As with every failure, on all ranks, with nothing loaded.
        RankMismatchError: Ranks passed different ones.
    """
    with raise_together(group, doing="load_state_dict()"):
        drop_unowned(local_optimizer)
        live = renumber(local_optimizer.state_dict(), parts)
        whole = {
            part.param: entry
            for part, entry in live.items()
            if isinstance(part, Part) and part.is_whole
        }
        is_known = type(local_optimizer).__module__.partition(".")[0] in ("torch", "tensorplay")
        num_params_by_group = [len(group["params"]) for group in param_groups]
        validate(state_dict, specs, num_params_by_group, whole, knows_keys=is_known)
    fingerprint = state_fingerprint(state_dict, specs)
    require_equal(group, fingerprint, subject="every rank must load the same state dict")
    kept = local_optimizer.state, local_optimizer.param_groups
    try:
        with raise_together(group, doing="load_state_dict() of the local optimizer"):
            local = local_part(state_dict, parts, specs, is_tensor)
            loaded = take_masters(local["state"])
            local_optimizer.load_state_dict(local)
    except Exception:
        local_optimizer.state, local_optimizer.param_groups = kept
        raise
    for number, values in loaded.items():
        master = masters.get(parts[number].param)
        if master is not None:
            master.detach().copy_(values.view(master.shape))
    param_groups[:] = [
        whole_group(local, current, saved)
        for local, current, saved in zip(
            local_optimizer.param_groups, param_groups, state_dict["param_groups"], strict=True
        )
    ]
