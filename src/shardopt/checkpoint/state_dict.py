"""The shape of state dicts: how a local one and a full one are numbered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.structure import map_tensors
from shardopt.partition import ParamSpec, Part

if TYPE_CHECKING:
    from torch import Tensor


def renumber(local: Mapping[str, Any], parts: Sequence[Part]) -> dict[Any, Any]:
    """Return the state of a local state dict, keyed by the part of a parameter it belongs to.

    Args:
        local: The ``state_dict()`` of a local optimizer.
        parts: What of the parameters it updates, in the order of its groups.
    """
    local_ids = [local_id for group in local["param_groups"] for local_id in group["params"]]
    part_of: dict[Any, Any] = dict(zip(local_ids, parts, strict=True))
    return {part_of.get(key, key): entry for key, entry in local["state"].items()}


def assemble(
    state: dict[Any, Any], specs: Sequence[ParamSpec], empty: Callable[[int, str], Tensor]
) -> dict[Any, Any]:
    """Return the state of whole parameters, by index; takes ``state`` apart to free its memory on the way.

    A tensor of a flat part that has one element per element of the part becomes a piece of one with the parameter's
    shape. Any other value, such as a step count, is the same in all parts.

    Args:
        state: By part, or by another key for what belongs to no parameter.
        specs: All parameters.
        empty: Makes a flat CPU tensor from a numel and ``str(dtype)``.
    """
    whole: dict[Any, Any] = {}
    for key in list(state):
        entry = state.pop(key)
        if not isinstance(key, Part):
            whole[key] = entry
        elif key.is_whole:
            whole[key.param] = entry
        else:
            _put(whole.setdefault(key.param, {}), key, entry, specs[key.param], empty)
    return whole


def _put(
    whole: dict[str, Any],
    part: Part,
    entry: dict[str, Any],
    spec: ParamSpec,
    empty: Callable[[int, str], Tensor],
) -> None:
    """Put the state of one part into that of its parameter."""
    for key in list(entry):
        value = entry.pop(key)
        if tuple(getattr(value, "shape", ())) != (part.numel,):
            whole[key] = value
            continue
        if key not in whole:
            whole[key] = shaped_like(empty(spec.numel, str(value.dtype)), spec)
        in_memory_order(whole[key]).narrow(0, part.offset, part.numel).copy_(value)


def shaped_like(flat: Tensor, spec: ParamSpec) -> Tensor:
    """View (spec.numel,) elements in memory order as the parameter lies in memory."""
    if spec.is_dense:
        return flat.as_strided(spec.shape, spec.stride, flat.storage_offset())
    return flat.view(spec.shape)


def in_memory_order(tensor: Tensor) -> Tensor:
    """View a dense tensor as (numel,) in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


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
