"""Plain values as JSON, and back to what they were: nothing that is read can run code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

TAG = "$"
"""The key that marks a JSON object as something else than a dict with strings as keys."""


def encode(value: Any, where: str, take: Callable[[Any, str], str | None]) -> Any:
    """Return ``value`` as what ``json`` can write.

    Args:
        value: None, bools, numbers and strings, in dicts, lists, tuples and deques.
        where: What messages call the value; the path of its tensors.
        take: Called with every value and its path; returns the name under which a tensor is kept, None for anything else.

    Raises:
        TypeError: Something else is in it; names where.
    """
    name = take(value, where)
    if name is not None:
        return {TAG: "tensor", "name": name}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if abs(value) < float("inf") else {TAG: "float", "value": repr(value)}
    if type(value) is complex:
        return {TAG: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, Mapping):
        items = [(key, encode(item, where + _step(key), take)) for key, item in value.items()]
        if all(type(key) is str for key, _ in items) and TAG not in value:
            return dict(items)
        return {TAG: "dict", "items": [[encode(k, where, _nothing), v] for k, v in items]}
    if type(value) in (list, tuple, deque):
        listed = [encode(item, f"{where}[{n}]", take) for n, item in enumerate(value)]
        if isinstance(value, deque):
            return {TAG: "deque", "items": listed, "maxlen": value.maxlen}
        return listed if type(value) is list else {TAG: "tuple", "items": listed}
    raise TypeError(
        f"{where}: {type(value).__name__} cannot be written to a checkpoint, which holds tensors, numbers, strings, None "
        "and containers of them; save consolidate_state_dict() + state_dict() with torch.save() instead"
    )


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Undo ``encode``; ``tensor`` returns what was kept under a name.

    Raises:
        ValueError: It was not written by ``encode``.
    """
    try:
        return _decode(value, tensor)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no value that was encoded: {error!r}") from error


def _decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensor) for key, item in value.items()}
    kind = value[TAG]
    if kind == "tensor":
        return tensor(value["name"])
    if kind == "float":
        return float(value["value"])
    if kind == "complex":
        return complex(*map(float, value["value"]))
    if kind == "dict":
        return {_decode(key, tensor): _decode(item, tensor) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(_decode(item, tensor) for item in value["items"])
    if kind == "deque":
        return deque([_decode(item, tensor) for item in value["items"]], value["maxlen"])
    raise ValueError(f"unknown kind of value {kind!r}")


def _step(key: Any) -> str:
    """One step of a path; different keys make different steps."""
    if type(key) is not str:
        return f"[{key!r}]"
    return "." + key.replace("\\", "\\\\").replace(".", "\\.").replace("[", "\\[")


def _nothing(value: Any, where: str) -> None:
    """Take no tensor."""
