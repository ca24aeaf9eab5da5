"""WHO owns WHAT, and WHERE it lies: integers and frozen dataclasses, no tensor, no process group.

``spec`` states the facts of a parameter, ``owners`` packs parameters onto ranks, ``layout`` lays whole parameters into
buckets by owner, ``elements`` lays them back to back and cuts, ``parts`` lists what a rank owns by either, ``chunks``
cuts tensors into pieces of bounded size, ``costs`` says what updating a parameter costs.
Every rank plans for itself, so planning is deterministic: same arguments, same plan.
This room imports nothing of the package; all sizes, offsets, owners and padding are computed here, once.
"""

from shardopt.partition.chunks import Chunk, Piece, plan_chunks
from shardopt.partition.costs import newton_schulz_work
from shardopt.partition.elements import plan_element_layout
from shardopt.partition.layout import (
    Bucket,
    Layout,
    Section,
    Slot,
    backward_order,
    plan_layout,
)
from shardopt.partition.owners import imbalance_of, loads_of, plan_owners, whole_loads
from shardopt.partition.parts import Part, parts_of
from shardopt.partition.spec import ParamSpec, is_dense

__all__ = [
    "Bucket",
    "Chunk",
    "Layout",
    "ParamSpec",
    "Part",
    "Piece",
    "Section",
    "Slot",
    "backward_order",
    "imbalance_of",
    "is_dense",
    "loads_of",
    "newton_schulz_work",
    "parts_of",
    "plan_chunks",
    "plan_element_layout",
    "plan_layout",
    "plan_owners",
    "whole_loads",
]
