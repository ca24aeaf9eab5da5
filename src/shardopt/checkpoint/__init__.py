"""Local state <-> the state dict that the unsharded optimizer would have.

``full`` sequences the two directions. ``skeleton`` takes the tensors out of nested state and puts them back,
``consolidate`` brings every rank's tensors to one rank, ``state_dict`` numbers them as the whole optimizer does,
``load`` checks a full state dict and cuts this rank's part out of it.
State dicts are plain data, keyed and ordered as the unsharded optimizer does it, so they fit any world size.
"""

from shardopt.checkpoint.consolidate import consolidate
from shardopt.checkpoint.full import collect_full, load_full, require_target
from shardopt.checkpoint.load import local_part, state_facts, validate
from shardopt.checkpoint.skeleton import map_tensors
from shardopt.checkpoint.state_dict import full_state_dict, renumber, whole_group

__all__ = [
    "collect_full",
    "consolidate",
    "full_state_dict",
    "load_full",
    "local_part",
    "map_tensors",
    "renumber",
    "require_target",
    "state_facts",
    "validate",
    "whole_group",
]
