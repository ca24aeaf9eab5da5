"""Whether a state dict is one of this optimizer: its own keys and options, found by asking the optimizer itself.

One step of another local optimizer over tiny parameters, with the options of the state dict, shows which options it needs
and which state it keeps. So any class is checked, third-party ones too, before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from shardopt.checkpoint.access import StateAccess
from shardopt.checkpoint.load import MASTER_KEY, saved_ids, validate
from shardopt.errors import StateMismatchError
from shardopt.partition import Part

logger = logging.getLogger(__name__)

TINY = 2
"""Elements along each dimension of a tiny parameter."""


def require_fitting(
    state_dict: Any, access: StateAccess, param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise unless a state dict fits the optimizer; touches nothing. Local.

    What can only be seen on the rank that owns a parameter is checked there.

    Args:
        state_dict: A full one; tensors may be anything that has their ``shape``.
        access: To the state of this rank.
        param_groups: Of the whole optimizer.

    Raises:
        StateMismatchError: Names the parameter, what was found and what was expected.
    """
    require_shapes(state_dict, access, param_groups)
    require_keys(state_dict, access)


def require_shapes(
    state_dict: Any, access: StateAccess, param_groups: Sequence[Mapping[str, Any]]
) -> None:
    """The part of ``require_fitting`` that is about numbers and shapes."""
    live = {part.param: e for part, e in access.read().entries.items() if part.is_whole}
    counts = [len(group["params"]) for group in param_groups]
    validate(state_dict, access.specs, counts, live, knows_keys=access.is_known)


def require_keys(state_dict: Mapping[str, Any], access: StateAccess) -> None:
    """The part of ``require_fitting`` that is about options and keys; nothing unless ``access.strict``."""
    if access.strict:
        _require_known_params(state_dict)
        for part in access.parts:
            _require_keys(state_dict, part, access)


def _require_known_params(state_dict: Mapping[str, Any]) -> None:
    """Raise if there is state of a parameter that is in no group."""
    listed = set(saved_ids(state_dict))
    for key in state_dict["state"]:
        if isinstance(key, int) and key not in listed:
            raise StateMismatchError(
                f"state dict: holds state of parameter {key}, which is in none of its param groups; pass what "
                "state_dict() returned, or strict=False to leave that out"
            )


def _require_keys(state_dict: Mapping[str, Any], part: Part, access: StateAccess) -> None:
    """Raise unless the state of a parameter has the keys that the optimizer keeps."""
    spec = access.specs[part.param]
    saved = state_dict["param_groups"][spec.group]
    template = _template(saved, part, access)
    if template is None:
        return
    options, keys = template
    if options:
        raise StateMismatchError(
            f"state dict: param group {spec.group} has no option {sorted(options)[0]!r}, which "
            f"{type(access.local_optimizer).__name__} needs; it is the state of another optimizer. Pass that of this "
            "one, or strict=False"
        )
    entry = state_dict["state"].get(saved_ids(state_dict)[part.param])
    if not isinstance(entry, Mapping) or not entry:
        return  # a parameter that has had no gradient has none
    found = {str(key) for key in entry} - {MASTER_KEY}
    if not found and not keys:
        return
    wrong = keys - found if not access.is_known else keys ^ found
    if wrong and found:
        raise StateMismatchError(
            f"{spec.label}: the state dict holds {sorted(found)}, but {type(access.local_optimizer).__name__} keeps "
            f"{sorted(keys)}; it is the state of another optimizer, or incomplete. Pass that of this one, or strict=False "
            "to load it all the same"
        )


def _template(
    saved: Mapping[str, Any], part: Part, access: StateAccess
) -> tuple[set[str], set[str]] | None:
    """The options that the saved ones lack, and the keys of state after a step with them; None if it cannot be known."""
    spec = access.specs[part.param]
    kind = (spec.group, len(spec.shape) if part.is_whole else 1, spec.dtype)
    if kind not in access.templates:
        access.templates[kind] = _try_template(saved, part, access)
    found: tuple[set[str], set[str]] | None = access.templates[kind]
    return found


def _try_template(
    saved: Mapping[str, Any], part: Part, access: StateAccess
) -> tuple[set[str], set[str]] | None:
    spec = access.specs[part.param]
    live = access.local_optimizer.param_groups[spec.group]
    tensor = access.tensor_of(part)
    shape = (TINY,) * (len(spec.shape) if part.is_whole else 1)
    param = access.make_param(tensor.detach().new_zeros(shape))
    others = ("params", "param_names")
    try:
        options = {key: value for key, value in live.items() if key not in others}
        optimizer = access.make_optimizer([{**options, "params": [param]}])
        needed = {str(key) for key in optimizer.defaults}  # before loading, which may add some
        given = {key: value for key, value in saved.items() if key not in others}
        optimizer.load_state_dict({"state": {}, "param_groups": [{**given, "params": [0]}]})
        missing = needed - optimizer.param_groups[0].keys()
        if missing:
            return missing, set()
        param.grad = tensor.detach().new_zeros(shape) + 1
        optimizer.step()
        return set(), {str(key) for key in optimizer.state.get(param, {})}
    except Exception as error:
        logger.info("what state the optimizer keeps could not be found out: %s", error)
        return None
