"""Hyperparameters: the param groups of the whole optimizer are the truth, the local optimizer's follow.

Between steps users and schedulers write to the whole optimizer's groups; during a step the local optimizer may write
to its own (schedule-free keeps its counters there). So options flow to the local groups before it runs and back after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PARAM_KEYS = ("params", "param_names")
"""The entries of a param group that are no options."""


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one param group."""
    return {key: value for key, value in group.items() if key not in PARAM_KEYS}


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Make the options in ``target`` those in ``source``, group by group; values are shared, not copied."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))


def option_facts(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The options that ranks can compare, as (label, value) pairs.

    Plain values and tensors on the CPU are compared by value. A tensor on a GPU is not read, since that would make the
    host wait for it, nor is any other object, whose ``repr`` may hold an address.
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
    elif (
        hasattr(value, "tolist")
        and getattr(value.device, "type", "") == "cpu"
        and value.numel() <= 16
    ):
        yield repr(value.tolist())
