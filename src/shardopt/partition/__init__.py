"""WHO owns WHAT, and WHERE it lies: integers and frozen dataclasses, no tensor, no process group.

``spec`` states the facts of a parameter, ``owners`` packs parameters onto ranks, ``layout`` lays whole parameters into
buckets by owner, ``elements`` lays them back to back and cuts, ``parts`` lists what a rank owns by either, ``chunks``
cuts tensors into pieces of bounded size, ``costs`` says what updating a parameter costs, ``boxes`` turns flat ranges into n-dimensional
ones, ``transfer`` says which ranges go where between two ways of cutting.
Every rank plans for itself, so planning is deterministic: same arguments, same plan.
This room imports nothing of the package; all sizes, offsets, owners and padding are computed here, once.
"""

from shardopt.partition.boxes import Box, boxes_of, memory_order, row_major
from shardopt.partition.chunks import Chunk, Piece, num_blocks_of, plan_chunks
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
from shardopt.partition.transfer import Range, Transfer, plan_transfers

__all__ = [
    "Box",
    "Bucket",
    "Chunk",
    "Layout",
    "ParamSpec",
    "Part",
    "Piece",
    "Range",
    "Section",
    "Slot",
    "Transfer",
    "backward_order",
    "boxes_of",
    "imbalance_of",
    "is_dense",
    "loads_of",
    "memory_order",
    "newton_schulz_work",
    "num_blocks_of",
    "parts_of",
    "plan_chunks",
    "plan_element_layout",
    "plan_layout",
    "plan_owners",
    "plan_transfers",
    "row_major",
    "whole_loads",
]
