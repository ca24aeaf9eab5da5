"""Local state <-> checkpoints: state dicts, files, and what ``torch.distributed.checkpoint`` saves.

``state`` is what the facade holds: it shows, collects, saves and loads the state of one optimizer. ``access`` reads a rank's
state as parts of parameters and puts other state in its place, all ranks or none; ``fitting`` says whether that fits.

State dicts: ``full`` sequences collecting and loading a whole one. ``structure`` takes tensors out of nested state and
puts them back, ``consolidate`` brings every rank's to one rank, ``state_dict`` numbers them as the whole optimizer does,
``load`` cuts a rank's part out. ``distribute`` sends it from one rank that has it, ``local`` is a rank's own part.

Files: ``sharded_files`` has one for each rank, ``full_file`` streams one, ``encoded`` is what their headers say, ``saved``
reads any range of either. ``contents`` and ``convert`` are for looking at them and for turning one into another.

DCP: ``by_name`` keys a rank's part by ``names``.
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
