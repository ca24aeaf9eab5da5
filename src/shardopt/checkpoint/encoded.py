"""One rank's state without its tensors: what the header of a file says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardopt.checkpoint.access import LocalState, StateAccess
from shardopt.files import TensorEntry, dtype_name, encode
from shardopt.partition import Part


@dataclass(frozen=True, slots=True)
class EncodedState:
    """What one rank holds, in words.

    Attributes:
        parts: The parts that have state.
        state: The entry of each, by the number of its parameter as a string.
        header: State that belongs to no parameter, and the param groups.
        tensors: All tensors that the above name.
    """

    parts: tuple[Part, ...]
    state: dict[str, Any]
    header: dict[str, Any]
    tensors: tuple[TensorEntry, ...]

    def tensors_of(self, param: int) -> list[TensorEntry]:
        """Those of the state of one parameter."""
        starts = (f"state.{param}.", f"state.{param}[")
        return [one for one in self.tensors if one.name.startswith(starts)]

    @property
    def common_tensors(self) -> list[TensorEntry]:
        """Those of the header."""
        return [one for one in self.tensors if not one.name.startswith("state.")]


def encode_state(
    local: LocalState, groups: Sequence[Mapping[str, Any]] | None, access: StateAccess
) -> tuple[EncodedState, dict[str, Any]]:
    """Return what a rank holds without its tensors, and these by name.

    Args:
        local: What it holds.
        groups: Param groups, with the numbers of their parameters; None to leave them out.
        access: Knows tensors and parameters.

    Raises:
        TypeError: Something cannot be written; names the parameter and the entry.
    """
    tensors: dict[str, Any] = {}
    entries: list[TensorEntry] = []

    def take(value: Any, where: str) -> str | None:
        if not access.is_tensor(value):
            return None
        try:
            entries.append(TensorEntry(where, dtype_name(value), tuple(value.shape)))
        except TypeError as error:
            raise TypeError(f"{where}: {error}") from error
        tensors[where] = value
        return where

    state = {}
    for part, entry in local.entries.items():
        try:
            state[str(part.param)] = encode(entry, f"state.{part.param}", take)
        except TypeError as error:
            raise TypeError(f"{access.specs[part.param].label}: {error}") from error
    header = {
        "others": encode(local.others, "others", take),
        "extra": encode(local.extra, "extra", take),
        "param_groups": None if groups is None else encode(list(groups), "param_groups", take),
    }
    return EncodedState(tuple(local.entries), state, header, tuple(entries)), tensors


def packed_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups with the numbers of their parameters, as in a state dict."""
    packed: list[dict[str, Any]] = []
    start = 0
    for group in param_groups:
        stop = start + len(group["params"])
        packed.append({**group, "params": list(range(start, stop))})
        start = stop
    return packed
