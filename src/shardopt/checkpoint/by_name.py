"""This rank's part of the state keyed by names, as ``torch.distributed.checkpoint`` (DCP) saves and loads it.

The layout is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, which unsharded and FSDP2
optimizers have, so files go between all of them, at any world size. Building it takes no communication:

    {"state": {"head.weight": {"step": ..., "exp_avg": ..., "exp_avg_sq": ...}, ...},
     "param_groups": [{"params": ["head.weight", ...], "lr": ..., ...}]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardopt.checkpoint.access import StateAccess
from shardopt.checkpoint.load import local_groups
from shardopt.errors import StateMismatchError
from shardopt.partition import Box, Part, boxes_of, is_dense, memory_order, row_major

MakeTensor = Callable[[Any, Sequence[int], Sequence[int], Sequence[Box], bool], Any]
"""(local, shape, stride, boxes, is_live): what DCP saves; its ``local`` is what was loaded into it, in the shape of ``local``."""


def state_by_name(
    access: StateAccess,
    param_groups: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    make_tensor: MakeTensor,
    initial: Mapping[Part, Mapping[str, Any]],
) -> dict[str, Any]:
    """Return this rank's part. Local.

    Args:
        access: To the state of this rank.
        param_groups: Of the whole optimizer.
        names: Of all parameters.
        make_tensor: Makes what DCP saves.
        initial: The state of parts that have none yet, to be loaded into.
    """
    live = access.read().entries
    state: dict[str, Any] = {}
    for part in sorted({**initial, **live}, key=lambda part: part.param):
        state[names[part.param]] = {
            key: _tensor(value, part, access, make_tensor, is_live=key in live.get(part, {}))
            if access.is_tensor(value)
            else value
            for key, value in {**initial.get(part, {}), **live.get(part, {})}.items()
        }
    packed = []
    start = 0
    for group in param_groups:
        stop = start + len(group["params"])
        packed.append({**group, "params": list(names[start:stop])})
        start = stop
    return {"state": state, "param_groups": packed}


def _tensor(
    value: Any, part: Part, access: StateAccess, make_tensor: MakeTensor, *, is_live: bool
) -> Any:
    """A tensor of the state of a part, as boxes of that of the whole parameter."""
    spec = access.specs[part.param]
    shape, stride = tuple(value.shape), tuple(value.stride())
    if not part.is_whole and shape == (part.numel,):
        shape, start = spec.shape, part.offset
        stride = spec.flat_stride
    else:
        start = 0
        stride = stride if is_dense(shape, stride) else row_major(shape)
    ordered = [shape[dim] for dim in memory_order(shape, stride)]
    boxes = boxes_of(ordered, start, start + value.numel())
    dense = (
        value.detach()
        if is_dense(tuple(value.shape), tuple(value.stride()))
        else value.detach().contiguous()
    )
    return make_tensor(dense, shape, stride, boxes, is_live)


def local_of_named(
    access: StateAccess, state_dict: Mapping[str, Any], names: Sequence[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the state dict that the local optimizer is to load, and the param groups of the whole one. Local.

    Args:
        access: To the state of this rank.
        state_dict: What ``state_by_name`` returned, loaded since.
        names: Of all parameters.

    Raises:
        StateMismatchError: It is of other parameters.
    """
    groups = [dict(group) for group in state_dict["param_groups"]]
    found = [name for group in groups for name in group["params"]]
    if found != list(names):
        other = next((n for n, name in enumerate(names) if [name] != found[n : n + 1]), len(names))
        raise StateMismatchError(
            f"param_groups: {len(found)} parameters, expected {len(names)}; the first that differs is number {other}: "
            f"found {found[other : other + 1]}, expected {list(names[other : other + 1])}"
        )
    start = 0
    for group in groups:
        stop = start + len(group["params"])
        group["params"] = list(range(start, stop))
        start = stop
    state = {}
    for number, part in enumerate(access.parts):
        entry = state_dict["state"].get(names[part.param])
        if entry is not None:
            state[number] = {key: _loaded(value, access) for key, value in entry.items()}
    local = {
        **access.read().extra,
        "state": state,
        "param_groups": local_groups(groups, access.parts),
    }
    return local, groups


def _loaded(value: Any, access: StateAccess) -> Any:
    """A value after loading, in memory of its own."""
    local = getattr(value, "local", value)
    is_live = getattr(value, "is_live", True)
    return local.detach().clone() if is_live and access.is_tensor(local) else local
