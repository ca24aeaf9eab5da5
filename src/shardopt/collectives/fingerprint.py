"""What ranks can compare of the options they were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

PARAM_KEYS = ("params", "param_names")
"""The entries of a param group that are no options."""

MAX_COMPARED_NUMEL = 16
"""Tensors above this size are no hyperparameters, and not compared."""


def digest(fingerprint: Sequence[object]) -> int:
    """Return 62 bits that differ, for all practical purposes, where the ``repr`` of the fingerprints does."""
    return int.from_bytes(blake2b(repr(fingerprint).encode(), digest_size=8).digest(), "big") >> 2


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one param group."""
    return {key: value for key, value in group.items() if key not in PARAM_KEYS}


def option_fingerprint(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The options that ranks can compare, as (label, value) pairs.

    Plain values, sequences of them and small tensors on the CPU are compared by value. A tensor on a GPU is not read,
    since that would make the host wait for it, nor is any other object, whose ``repr`` may hold an address.
    """
    return [
        (f"option {key!r} of group {number}", text)
        for number, group in enumerate(groups)
        for key, value in sorted(options_of(group).items())
        for text in _comparable(value)
    ]


def _comparable(value: Any) -> Iterator[str]:
    """The value in words, if it can be compared between ranks."""
    if value is None or isinstance(value, (bool, int, float, str, complex)):
        yield repr(value)
    elif isinstance(value, (tuple, list)):
        yield repr([text for item in value for text in _comparable(item)])
    elif _is_on_cpu(value) and value.numel() <= MAX_COMPARED_NUMEL:
        yield repr(value.tolist())


def _is_on_cpu(value: Any) -> bool:
    return getattr(getattr(value, "device", None), "type", None) == "cpu"
