"""Check a full state dict against the optimizer, and cut this rank's part out of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardopt.checkpoint.state_dict import in_memory_order, shaped_like
from shardopt.checkpoint.structure import is_nested, map_tensors
from shardopt.collectives import option_fingerprint
from shardopt.errors import StateMismatchError
from shardopt.partition import ParamSpec, Part

MASTER_KEY = "master_weight"
"""The entry of a parameter's state that holds its master weights."""

PARAM_SHAPED_KEYS = frozenset(
    {
        MASTER_KEY,
        "acc_delta",
        "ax",
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "grad_avg",
        "max_exp_avg_sq",
        "momentum_buffer",
        "prev",
        "square_avg",
        "step_size",
        "sum",
    }
)
"""State that has the shape of its parameter in every optimizer of ``torch.optim`` (read off their ``_init_group``)."""


def require_state_dict(state_dict: Any) -> None:
    """Raise unless it is a state dict of an optimizer.

    Raises:
        TypeError: Not a dict.
        StateMismatchError: Without state or param groups.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state dict: expected a dict, got {type(state_dict).__name__}; every rank needs the full state dict, "
            "e.g. from torch.load(path, mmap=True)"
        )
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise StateMismatchError(
                f"state dict: no {key!r} in it, found {sorted(map(str, state_dict))}; expected what state_dict() of "
                "this or of the unsharded optimizer returned, on every rank"
            )


def validate(
    state_dict: Any,
    specs: Sequence[ParamSpec],
    num_params_by_group: Sequence[int],
    live_state: Mapping[int, Mapping[str, Any]],
    *,
    knows_keys: bool = True,
) -> None:
    """Raise unless ``state_dict`` fits; touches nothing.

    Args:
        state_dict: What the caller wants to load.
        specs: All parameters.
        num_params_by_group: Parameters in each param group.
        live_state: The present state of the parameters this rank owns, by index; shapes must not change.
        knows_keys: Whether state is the framework's own optimizers', in which some keys have the parameter's shape.

    Raises:
        TypeError: Not a dict.
        StateMismatchError: Names what does not fit, what was given and what was expected.
    """
    require_state_dict(state_dict)
    given = [len(group.get("params", ())) for group in state_dict["param_groups"]]
    if given != list(num_params_by_group):
        raise StateMismatchError(
            f"state dict: its param groups hold {given} parameters, but those of the optimizer hold "
            f"{list(num_params_by_group)}"
        )
    for index, saved in enumerate(saved_ids(state_dict)):
        entry = state_dict["state"].get(saved, {})
        if isinstance(entry, Mapping):
            for key, value in entry.items():
                live = live_state.get(index, {}).get(key)
                if knows_keys or live is not None or key == MASTER_KEY:
                    _require_shape(specs[index], key, value, live)


def _require_shape(spec: ParamSpec, key: str, value: Any, live: Any) -> None:
    """Raise if a saved tensor cannot be the state ``key`` of a parameter."""
    shape = tuple(value.shape) if hasattr(value, "shape") else None
    expected: tuple[int, ...] | None = None
    if live is not None and hasattr(live, "shape"):
        expected = tuple(live.shape)
    elif key in PARAM_SHAPED_KEYS and shape:
        expected = spec.shape
    if expected is not None and shape is not None and shape != expected:
        raise StateMismatchError(
            f"{spec.label}: state {key!r} has shape {shape} in the state dict, expected {expected}; it was saved "
            "for another model, or its parameters were in another order"
        )


def saved_ids(state_dict: Mapping[str, Any]) -> list[Any]:
    """The keys that a state dict uses for its parameters, in the order of the param groups."""
    return [saved for group in state_dict["param_groups"] for saved in group["params"]]


def state_fingerprint(
    state_dict: Mapping[str, Any], specs: Sequence[ParamSpec]
) -> list[tuple[str, str]]:
    """What ranks can compare of the state dicts they were given: each parameter's keys and shapes, and all options."""
    entries = [state_dict["state"].get(saved) for saved in saved_ids(state_dict)]
    shapes = [
        (spec.label, repr([(str(k), tuple(getattr(v, "shape", ()))) for k, v in _items(entry)]))
        for spec, entry in zip(specs, entries, strict=True)
    ]
    return shapes + option_fingerprint(state_dict["param_groups"])


def _items(entry: Any) -> list[tuple[Any, Any]]:
    return (
        sorted(entry.items(), key=lambda item: str(item[0])) if isinstance(entry, Mapping) else []
    )


def local_part(
    state_dict: Mapping[str, Any],
    parts: Sequence[Part],
    specs: Sequence[ParamSpec],
    is_tensor: Callable[[Any], bool],
) -> dict[str, Any]:
    """Return the state dict that the local optimizer is to load, with the state copied and parameters renumbered.

    Args:
        state_dict: A full one that fits.
        parts: What of the parameters this rank updates, in the order of the local optimizer's groups.
        specs: All parameters.
        is_tensor: Whether a value is a tensor.
    """
    ids = saved_ids(state_dict)
    number_of = {part.param: number for number, part in enumerate(parts)}
    index_of: dict[Any, int] = {saved: index for index, saved in enumerate(ids)}
    state: dict[Any, Any] = {}
    for saved, entry in state_dict["state"].items():
        if saved not in index_of:
            state[saved] = _copied(entry, is_tensor)  # belongs to no parameter, so to every rank
        elif index_of[saved] in number_of:
            number = number_of[index_of[saved]]
            state[number] = _copied(part_of(entry, parts[number], specs), is_tensor)
    groups = local_groups(state_dict["param_groups"], parts)
    return {**state_dict, "state": state, "param_groups": groups}


def local_groups(
    param_groups: Sequence[Mapping[str, Any]], parts: Sequence[Part]
) -> list[dict[str, Any]]:
    """The param groups of a full state dict as the local optimizer of this rank has them, parameters renumbered."""
    number_of = {part.param: number for number, part in enumerate(parts)}
    found = []
    start = 0
    for group in param_groups:
        places = [i for i in range(len(group["params"])) if start + i in number_of]
        local = {**group, "params": [number_of[start + i] for i in places]}
        if "param_names" in group:
            local["param_names"] = [group["param_names"][i] for i in places]
        found.append(local)
        start += len(group["params"])
    return found


def take_masters(state: dict[Any, Any]) -> dict[Any, Any]:
    """Remove master weights from a local state, whose optimizer does not know them, and return them by key."""
    masters = {}
    for key in list(state):
        if isinstance(state[key], dict) and MASTER_KEY in state[key]:
            masters[key] = state[key].pop(MASTER_KEY)
            if not state[key]:
                del state[key]
    return masters


def _copied(entry: Any, is_tensor: Callable[[Any], bool]) -> Any:
    return map_tensors(entry, lambda tensor: tensor.detach().clone(), is_tensor)


def has_param_shape(key: str, shape: tuple[int, ...], spec: ParamSpec) -> bool:
    """Whether a tensor of a parameter's state has an element for each of the parameter's.

    Beside a parameter without dimensions a step count has its shape, too.
    """
    return shape == spec.shape and (bool(shape) or key in PARAM_SHAPED_KEYS)


def require_flat(spec: ParamSpec, key: str, value: Any) -> None:
    """Raise if state of a part holds tensors in containers: which of them are cut like their parameter is not known.

    Raises:
        StateMismatchError: Names the parameter and the entry.
    """
    if is_nested(value):
        raise StateMismatchError(
            f"{spec.label}: state {key!r} is a {type(value).__name__} of tensors, which cannot be cut and put together by "
            "element; use granularity='parameter'"
        )


def part_of(entry: Any, part: Part, specs: Sequence[ParamSpec]) -> Any:
    """The state of a part: of each tensor that has the parameter's shape the elements of the part."""
    if part.is_whole:
        return entry
    spec = specs[part.param]

    def cut(key: str, value: Any) -> Any:
        require_flat(spec, key, value)
        if not hasattr(value, "shape") or not has_param_shape(key, tuple(value.shape), spec):
            return value
        ordered = shaped_like(value.detach().new_empty((spec.numel,)), spec)
        ordered.copy_(value.detach())
        return in_memory_order(ordered).narrow(0, part.offset, part.numel)

    return {key: cut(key, value) for key, value in entry.items()}
