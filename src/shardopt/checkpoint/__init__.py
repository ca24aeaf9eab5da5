"""Local state <-> the state dict that the unsharded optimizer would have.

``state`` shows, collects and loads the state of one optimizer, in terms of the parameters that users know, and ``full``
sequences the two directions. ``structure`` takes the tensors out of nested state and puts them back,
``consolidate`` brings every rank's tensors to one rank, ``state_dict`` numbers them as the whole optimizer does,
``load`` checks a full state dict and cuts this rank's part out of it.
``contents`` says what a checkpoint in files holds, and ``convert`` turns one kind into another, without an optimizer.
State dicts are plain data, keyed and ordered as the unsharded optimizer does it, so they fit any world size.
"""

from shardopt.checkpoint.access import LocalState, StateAccess
from shardopt.checkpoint.consolidate import consolidate
from shardopt.checkpoint.contents import Contents, Kind, ParamState, open_contents
from shardopt.checkpoint.convert import (
    read_state_dict,
    require_replaceable,
    write_folder,
    write_full_file,
)
from shardopt.checkpoint.full import collect_full, load_full, require_target
from shardopt.checkpoint.load import local_part, state_fingerprint, validate
from shardopt.checkpoint.state import ShardedState, StateOfParams
from shardopt.checkpoint.state_dict import full_state_dict, renumber, whole_group
from shardopt.checkpoint.structure import map_tensors

__all__ = [
    "Contents",
    "Kind",
    "LocalState",
    "ParamState",
    "ShardedState",
    "StateAccess",
    "StateOfParams",
    "collect_full",
    "consolidate",
    "full_state_dict",
    "load_full",
    "local_part",
    "map_tensors",
    "open_contents",
    "read_state_dict",
    "renumber",
    "require_replaceable",
    "require_target",
    "state_fingerprint",
    "validate",
    "whole_group",
    "write_folder",
    "write_full_file",
]
