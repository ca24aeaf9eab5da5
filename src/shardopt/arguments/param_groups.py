"""Read what a user passes as ``params`` once, whatever iterables it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from shardopt.frameworks import Framework
from shardopt.partition import ParamSpec


def read_param_groups(params: Any, framework: Framework) -> list[dict[str, Any]]:
    """Return param groups with their parameters in lists; generators are consumed, the caller's dicts left alone.

    Args:
        params: An iterable of tensors, of (name, tensor) pairs, or of dicts with such an iterable under ``"params"``.
        framework: Tells tensors.

    Raises:
        TypeError: Not an iterable, or a bare tensor.
        ValueError: Empty, or a parameter that cannot be sharded.
    """
    if framework.is_tensor(params) or not isinstance(params, Iterable):
        raise TypeError(
            f"params: expected an iterable of tensors, (name, tensor) pairs or dicts, got {type(params).__name__}"
        )
    _reject_set(params)
    entries = list(params)
    if not entries:
        raise ValueError("params: got an empty parameter list; was a generator used up before?")
    groups = entries if isinstance(entries[0], dict) else [{"params": entries}]
    return [read_param_group(group, framework) for group in groups]


def read_param_group(group: Any, framework: Framework) -> dict[str, Any]:
    """Return one param group as a new dict with its parameters in a list.

    Raises:
        TypeError: Not a dict, or its params are an unordered set.
        ValueError: A parameter is given twice, or cannot be sharded.
    """
    if not isinstance(group, dict) or "params" not in group:
        raise TypeError(f"param group: expected a dict with 'params', got {type(group).__name__}")
    params = group["params"]
    _reject_set(params)
    params = [params] if framework.is_tensor(params) else list(params)
    seen: set[int] = set()
    for position, entry in enumerate(params):
        param = entry[1] if isinstance(entry, tuple) else entry
        if not framework.is_tensor(param):
            continue  # the framework's own optimizer has the words for that
        if reason := framework.reject_param(param):
            raise ValueError(f"param {position} of its group {reason}")
        if id(param) in seen:
            raise ValueError(
                f"param {position} of its group, {tuple(param.shape)}, is given twice; it would be updated twice. "
                "model.parameters() names each tied parameter once"
            )
        seen.add(id(param))
    return {**group, "params": params}


def _reject_set(params: Any) -> None:
    if isinstance(params, (set, frozenset)):
        raise TypeError("params: got a set, whose order differs between ranks; pass a list")


def read_specs(
    groups: Sequence[dict[str, Any]],
    granularities: Sequence[str] | None = None,
    cost: Callable[[ParamSpec], float] | None = None,
) -> list[ParamSpec]:
    """State the facts of all parameters, in the order of the groups.

    Args:
        groups: The param groups.
        granularities: Of each group; by parameter if not given.
        cost: What updating a parameter costs.

    Raises:
        ValueError: ``cost`` returned something else than a finite number from 0 on.
    """
    specs: list[ParamSpec] = []
    devices: dict[str, str] = {}
    for number, group in enumerate(groups):
        is_cut = granularities is not None and granularities[number] == "element"
        names = group.get("param_names") or [None] * len(group["params"])
        for name, param in zip(names, group["params"], strict=True):
            device = devices.setdefault(str(param.device), f"{param.device.type}#{len(devices)}")
            spec = ParamSpec(
                index=len(specs),
                name=name,
                group=number,
                shape=tuple(param.shape),
                stride=tuple(param.stride()),
                dtype=str(param.dtype),
                itemsize=int(param.element_size()),
                device=device,
                requires_grad=bool(param.requires_grad),
                is_cut=is_cut,
            )
            specs.append(spec if cost is None else replace(spec, cost=_checked(cost(spec), spec)))
    return specs


def _checked(cost: Any, spec: ParamSpec) -> float:
    if not isinstance(cost, (int, float)) or not 0 <= cost < float("inf"):
        raise ValueError(
            f"{spec.label}: cost() returned {cost!r}, expected a finite number from 0 on"
        )
    return float(cost)
