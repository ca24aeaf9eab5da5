"""Bring the state of all ranks to one rank, in CPU memory, a bounded chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.structure import (
    TensorSlot,
    flatten,
    map_tensors,
    put_tensors,
    slots_of,
    take_tensors,
)
from shardopt.collectives import Finish, Group, StagingPool, run_in_flight
from shardopt.partition import Chunk, plan_chunks

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 2
"""Chunks in flight: one being packed or unpacked while another travels."""


def consolidate(
    group: Group,
    state: dict[Any, Any],
    *,
    to: int,
    chunk_nbytes: int,
    empty: Callable[[int, str], Tensor],
    is_tensor: Callable[[Any], bool],
) -> dict[Any, Any] | None:
    """Collect the states of all ranks on rank ``to``. Collective.

    Tensors travel as they are, point to point and in chunks; only their shapes, and values that are no tensors, are
    pickled. A rank other than ``to`` needs ``chunk_nbytes`` of memory beyond its own state.

    Args:
        group: The sharding group.
        state: This rank's state; keys of different ranks differ.
        to: The receiving rank.
        chunk_nbytes: Bytes of all messages in flight together.
        empty: Makes a flat CPU tensor from a numel and ``str(dtype)``.
        is_tensor: Whether a value is a tensor.

    Returns:
        On rank ``to`` the union of all states, every tensor a copy in CPU memory; elsewhere None.
    """
    structure, tensors = take_tensors(state, is_tensor)
    structures = group.all_gather_object(structure)[: group.world_size]  # replicas have the same
    merged: dict[Any, Any] = {}
    for rank, theirs in enumerate(structures):
        slots = slots_of(theirs)
        if rank == to:
            continue
        if rank == group.rank:
            flats = [flatten(tensor) for tensor in tensors]
            send_tensors(group, slots, flats, dst=to, chunk_nbytes=chunk_nbytes, empty=empty)
        elif to == group.rank:
            flats = [empty(prod(slot.shape), slot.dtype) for slot in slots]
            receive_tensors(group, slots, flats, src=rank, chunk_nbytes=chunk_nbytes, empty=empty)
            shaped = [slot.shape_flat(flat) for slot, flat in zip(slots, flats, strict=True)]
            merged.update(put_tensors(theirs, shaped))
    if to != group.rank:
        return None
    # last, so that of state that belongs to no parameter this rank's own is kept
    return {**merged, **map_tensors(state, lambda t: _copy_to_cpu(t, empty), is_tensor)}


def send_tensors(
    group: Group,
    slots: Sequence[TensorSlot],
    flats: Sequence[Tensor],
    *,
    dst: int,
    chunk_nbytes: int,
    empty: Callable[[int, str], Tensor],
) -> None:
    """Send tensors, (numel,) each, to rank ``dst``, which calls ``receive_tensors`` with the same slots."""
    pool = StagingPool()
    plan = _plan(slots, flats, chunk_nbytes)
    launches = (partial(send_chunk, group, chunk, kind, dst, pool, empty) for chunk, kind in plan)
    run_in_flight(launches, depth=DEPTH)


def receive_tensors(
    group: Group,
    slots: Sequence[TensorSlot],
    flats: Sequence[Tensor],
    *,
    src: int,
    chunk_nbytes: int,
    empty: Callable[[int, str], Tensor],
) -> None:
    """Receive what rank ``src`` sends with ``send_tensors``."""
    pool = StagingPool()
    plan = _plan(slots, flats, chunk_nbytes)
    launches = (partial(_receive, group, chunk, kind, src, pool, empty) for chunk, kind in plan)
    run_in_flight(launches, depth=DEPTH)


def _plan(
    slots: Sequence[TensorSlot], flats: Sequence[Tensor], chunk_nbytes: int
) -> Iterator[tuple[Chunk, list[Tensor]]]:
    """The chunks of one rank's tensors, dtype by dtype, each with the flat tensors that its pieces count in."""
    kinds: dict[str, list[Tensor]] = {}
    for slot, flat in zip(slots, flats, strict=True):
        kinds.setdefault(slot.dtype, []).append(flat)
    for kind in kinds.values():
        numels = [flat.numel() for flat in kind]
        itemsize = int(kind[0].element_size())
        for chunk in plan_chunks(
            numels, chunk_nbytes=chunk_nbytes, itemsize=itemsize, in_flight=DEPTH
        ):
            yield chunk, kind


def pieces_of(chunk: Chunk, flats: Sequence[Tensor]) -> list[Tensor]:
    """The pieces of a chunk, where they lie."""
    return [flats[piece.tensor].narrow(0, piece.start, piece.numel) for piece in chunk.pieces]


def split_chunk(message: Tensor, chunk: Chunk) -> list[Tensor]:
    """The pieces of a message."""
    return list(message.split([piece.numel for piece in chunk.pieces]))  # type: ignore[no-untyped-call]


def _staging(
    chunk: Chunk, pieces: Sequence[Tensor], pool: StagingPool, empty: Callable[[int, str], Tensor]
) -> Tensor:
    """CPU memory for a chunk, of the dtype of its pieces."""
    return pool.take(chunk.numel, like=empty(0, str(pieces[0].dtype)))


def send_chunk(
    group: Group,
    chunk: Chunk,
    flats: Sequence[Tensor],
    dst: int,
    pool: StagingPool,
    empty: Callable[[int, str], Tensor],
) -> Finish:
    """Launch sending one chunk; one piece on the CPU is sent from where it lies."""
    pieces = pieces_of(chunk, flats)
    if len(pieces) == 1 and pieces[0].device.type == "cpu":
        return group.send(pieces[0], dst=dst).wait
    memory = _staging(chunk, pieces, pool, empty)
    message = memory.narrow(0, 0, chunk.numel)
    for part, piece in zip(split_chunk(message, chunk), pieces, strict=True):
        part.copy_(piece)
    pending = group.send(message, dst=dst)

    def finish() -> None:
        pending.wait()
        pool.give_back(memory)

    return finish


def _receive(
    group: Group,
    chunk: Chunk,
    flats: Sequence[Tensor],
    src: int,
    pool: StagingPool,
    empty: Callable[[int, str], Tensor],
) -> Finish:
    """Launch receiving one chunk; one piece is received into its place."""
    pieces = pieces_of(chunk, flats)
    if len(pieces) == 1:
        return group.recv(pieces[0], src=src).wait
    memory = _staging(chunk, pieces, pool, empty)
    message = memory.narrow(0, 0, chunk.numel)
    pending = group.recv(message, src=src)

    def finish() -> None:
        pending.wait()
        for part, piece in zip(split_chunk(message, chunk), pieces, strict=True):
            piece.copy_(part)
        pool.give_back(memory)

    return finish


def _copy_to_cpu(tensor: Tensor, empty: Callable[[int, str], Tensor]) -> Tensor:
    """A copy in CPU memory, with the strides of a dense tensor."""
    slot, _ = take_tensors(tensor, lambda value: value is tensor)
    copy = empty(tensor.numel(), slot.dtype)
    copy.copy_(flatten(tensor))
    shaped: Tensor = slot.shape_flat(copy)
    return shaped
