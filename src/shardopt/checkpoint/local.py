"""This rank's part as a state dict of its own, for callers who ask at any moment and hand it back on the same rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardopt.checkpoint.access import StateAccess
from shardopt.checkpoint.encoded import packed_groups
from shardopt.checkpoint.load import local_groups
from shardopt.checkpoint.structure import map_tensors
from shardopt.collectives import raise_together
from shardopt.errors import StateMismatchError

SHARD = "shard"
"""The entry that tells such a state dict from a full one: which rank it is of, and which parts it holds."""


def local_state_dict(access: StateAccess, param_groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of what this rank owns, keyed by parameter, and all param groups; tensors are live. Local."""
    local = access.read()
    state = {part.param: entry for part, entry in local.entries.items()}
    return {
        **local.extra,
        "state": {**state, **local.others},
        "param_groups": packed_groups(param_groups),
        SHARD: _shard(access),
    }


def _shard(access: StateAccess) -> dict[str, Any]:
    return {
        "rank": access.group.rank,
        "world_size": access.group.world_size,
        "parts": [[part.param, part.offset, part.numel, part.is_whole] for part in access.parts],
    }


def is_local(access: StateAccess, state_dict: Any) -> bool:
    """Whether a state dict is one rank's part, on any rank. Collective."""
    mine = isinstance(state_dict, Mapping) and SHARD in state_dict
    return any(theirs for (theirs,) in access.group.all_gather_ints([int(mine)]))


def load_local(access: StateAccess, state_dict: Any, param_groups: list[dict[str, Any]]) -> None:
    """Take back what ``local_state_dict`` returned, on the rank it is of. Collective.

    Raises:
        StateMismatchError: It is of another rank, or of an optimizer that was sharded in another way. As with every
            failure, on all ranks, with nothing loaded.
    """
    with raise_together(access.group, doing="load_state_dict()"):
        shard = state_dict.get(SHARD) if isinstance(state_dict, Mapping) else None
        expected = _shard(access)
        if shard != expected:
            found = (
                "a full state dict, while other ranks pass their parts"
                if not isinstance(shard, Mapping)
                else f"the part of rank {shard.get('rank')} of {shard.get('world_size')}"
            )
            raise StateMismatchError(
                f"state dict: {found}; expected that of rank {expected['rank']} of {expected['world_size']}, sharded in "
                "the same way. To load at another world size use save() and load(), or torch.distributed.checkpoint with "
                "sharded_state_dict()"
            )
        counts = [len(group["params"]) for group in param_groups]
        if [len(group["params"]) for group in state_dict["param_groups"]] != counts:
            raise StateMismatchError(
                f"state dict: its param groups do not hold {counts} parameters"
            )
    number_of = {part.param: number for number, part in enumerate(access.parts)}

    def make() -> dict[str, Any]:
        state = {
            number_of.get(key, key): map_tensors(
                entry, lambda tensor: tensor.detach().clone(), access.is_tensor
            )
            for key, entry in state_dict["state"].items()
        }
        groups = local_groups(state_dict["param_groups"], access.parts)
        rest = {key: value for key, value in state_dict.items() if key != SHARD}
        return {**rest, "state": state, "param_groups": groups}

    access.replace(make, param_groups=param_groups, saved_groups=state_dict["param_groups"])
