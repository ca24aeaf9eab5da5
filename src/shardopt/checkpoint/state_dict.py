"""The shape of state dicts: how a local one and a full one are numbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardopt.checkpoint.skeleton import map_tensors


def renumber(local: Mapping[str, Any], owned: Sequence[int]) -> dict[Any, Any]:
    """Return the state of a local state dict, keyed by the parameters' indices in the whole optimizer.

    Args:
        local: The ``state_dict()`` of a local optimizer.
        owned: Indices of its parameters, in the order of its groups.
    """
    local_ids = [local_id for group in local["param_groups"] for local_id in group["params"]]
    index_of: dict[Any, Any] = dict(zip(local_ids, owned, strict=True))
    return {index_of.get(key, key): entry for key, entry in local["state"].items()}


def full_state_dict(
    local: Mapping[str, Any],
    state: Mapping[Any, Any],
    param_groups: Sequence[Mapping[str, Any]],
    is_tensor: Callable[[Any], bool],
) -> dict[str, Any]:
    """Return what the unsharded optimizer's ``state_dict()`` would be.

    Args:
        local: The local optimizer's state dict, for entries besides state and param groups.
        state: The state of all parameters, by index.
        param_groups: Of the whole optimizer; tensors among their options are copied.
        is_tensor: Whether a value is a tensor.
    """
    packed: list[dict[str, Any]] = []
    start = 0
    for group in param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        copied = map_tensors(options, lambda tensor: tensor.detach().clone(), is_tensor)
        stop = start + len(group["params"])
        packed.append({**copied, "params": list(range(start, stop))})
        start = stop
    indices = [key for key in range(start) if key in state]
    others = [key for key in state if key not in range(start)]
    ordered = {key: state[key] for key in [*indices, *others]}
    return {**local, "state": ordered, "param_groups": packed}


def whole_group(
    local: Mapping[str, Any], current: Mapping[str, Any], saved: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a param group of the whole optimizer after its local twin was loaded.

    Args:
        local: The local group, which holds the loaded options.
        current: The whole group before, which holds the parameters.
        saved: The group of the full state dict, which may hold names.
    """
    names = saved.get("param_names", current.get("param_names"))
    group = {**local, "params": current["params"]}
    if names is not None:
        group["param_names"] = names
    return group
