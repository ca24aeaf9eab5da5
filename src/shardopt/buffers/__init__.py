"""Flat memory that parameters travel in; the only room that rebinds ``param.data``.

A ``StagedBucket`` leaves parameters where they are and copies through a few reused buffers; a ``ViewedBucket`` makes
parameters views of one flat tensor, from and into which they travel, and can give them their own memory back.
Both stand for one ``Bucket`` of a layout and hand out a flat tensor per section. An ``OwnedSection`` is what the local
optimizer sees of one, master weights included; a ``GradientBucket`` collects gradients in the same layout and keeps the
part that this rank owns. None of them talks to other ranks.
"""

from shardopt.buffers.bucket import OpenBucket, ParamBucket
from shardopt.buffers.checks import find_shared_memory, require_unchanged
from shardopt.buffers.gradients import GradientBucket, ScaleInto
from shardopt.buffers.owned import MakeParam, OwnedSection
from shardopt.buffers.pool import Pool
from shardopt.buffers.staged import CopyAll, StagedBucket
from shardopt.buffers.viewed import OwnStorage, ViewedBucket, view_slot

__all__ = [
    "CopyAll",
    "GradientBucket",
    "MakeParam",
    "OpenBucket",
    "OwnStorage",
    "OwnedSection",
    "ParamBucket",
    "Pool",
    "ScaleInto",
    "StagedBucket",
    "ViewedBucket",
    "find_shared_memory",
    "require_unchanged",
    "view_slot",
]
