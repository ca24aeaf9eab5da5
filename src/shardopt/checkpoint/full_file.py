"""Write the whole state to one file, streamed: no rank ever holds more of it than its own and two chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.access import StateAccess
from shardopt.checkpoint.consolidate import pieces_of, send_chunk, split_chunk
from shardopt.checkpoint.encoded import EncodedState, encode_state, packed_groups
from shardopt.checkpoint.saved import is_cut
from shardopt.checkpoint.state_dict import shaped_like
from shardopt.collectives import Finish, StagingPool, raise_together, run_in_flight
from shardopt.errors import StateMismatchError
from shardopt.files import TensorEntry, TensorFileWriter, in_file_order, sync_folder
from shardopt.partition import Chunk, ParamSpec, Part, plan_chunks

if TYPE_CHECKING:
    from torch import Tensor

DEPTH = 2
"""Chunks in flight: one being written while another travels."""


@dataclass(frozen=True, slots=True)
class Source:
    """A rank's piece of a tensor of the file: all of what the rank calls ``name``."""

    rank: int
    name: str
    numel: int


@dataclass(frozen=True, slots=True)
class FullTensor:
    """One tensor of the file, from the pieces of the ranks, in order.

    Attributes:
        entry: As it stands in the file.
        sources: Where it comes from.
        spec: The parameter it has the shape of, if pieces come in its memory order; None for row-major order.
    """

    entry: TensorEntry
    sources: tuple[Source, ...]
    spec: ParamSpec | None


def save_full_file(
    access: StateAccess, param_groups: Sequence[Mapping[str, Any]], path: Path, *, to: int
) -> None:
    """Write the state of the whole optimizer on rank ``to``. Collective.

    Args:
        access: To the state of this rank.
        param_groups: Of the whole optimizer.
        path: The file, on rank ``to``; what is there is replaced in one move once the new one is whole.
        to: The writing rank.

    Raises:
        TypeError: Something in the state cannot be written.
        OSError: The file cannot be written. As with every failure, on all ranks; what was at ``path`` stays.
    """
    group = access.group
    with raise_together(group, doing="save_full()"):
        local = access.read()
        groups = packed_groups(param_groups)
        mine, tensors = encode_state(local, groups, access)
    everyone = group.all_gather_object(mine)[: group.world_size]
    with raise_together(group, doing="save_full()"):
        plan = plan_full(everyone, access.specs, to=to)
    temporary = path.with_name(f".{path.name}.new")
    error: Exception | None = None
    writer: TensorFileWriter | None = None
    is_writer = group.rank == to and group.is_first_replica
    if is_writer:
        try:
            temporary.unlink(missing_ok=True)
            metadata = full_metadata(everyone, access, to=to)
            writer = TensorFileWriter(temporary, [one.entry for one in plan], metadata)
        except Exception as raised:
            error = raised
    if group.is_first_replica:
        sink = _Sink(writer, plan, access, error)
        pool = StagingPool()
        run_in_flight(_launches(plan, tensors, access, sink, pool, to=to), depth=DEPTH)
        error = sink.error
    with raise_together(group, doing=f"save_full({str(path)!r})"):
        if error is not None:
            raise error
        if writer is not None:
            writer.close()
            os.replace(temporary, path)
            sync_folder(path.parent)


def plan_full(
    everyone: Sequence[EncodedState], specs: Sequence[ParamSpec], *, to: int
) -> list[FullTensor]:
    """Say which tensors the file has, in its order, and where each comes from. Pure.

    Raises:
        StateMismatchError: A part of a parameter has no state, while others have.
    """
    found: dict[str, FullTensor] = {}
    holders: dict[int, list[tuple[int, Part]]] = {}
    for rank, theirs in enumerate(everyone):
        for part in theirs.parts:
            holders.setdefault(part.param, []).append((rank, part))
    for param, held in sorted(holders.items()):
        held.sort(key=lambda holder: holder[1].offset)
        first_rank, first = held[0]
        for entry in everyone[first_rank].tensors_of(param):
            one = FullTensor(entry, (Source(first_rank, entry.name, entry.numel),), None)
            if not first.is_whole and is_cut(entry, first):
                sources = tuple(Source(rank, entry.name, part.numel) for rank, part in held)
                spec = specs[param]
                if sum(source.numel for source in sources) != spec.numel:
                    raise StateMismatchError(
                        f"{spec.label}: parts of it have no state {entry.name!r}"
                    )
                whole = replace(entry, shape=spec.shape)
                one = FullTensor(whole, sources, None if spec.is_contiguous else spec)
            found[entry.name] = one
    for entry in everyone[to].common_tensors:
        found[entry.name] = FullTensor(entry, (Source(to, entry.name, entry.numel),), None)
    in_order = in_file_order(one.entry for one in found.values())
    by_name = [found[entry.name] for entry in in_order]
    return sorted(by_name, key=lambda one: (-one.entry.itemsize, one.sources[0].rank))


def full_metadata(
    everyone: Sequence[EncodedState], access: StateAccess, *, to: int
) -> dict[str, Any]:
    """What the header of the file says besides its tensors."""
    state: dict[str, Any] = {}
    for theirs in everyone:
        for part in theirs.parts:
            state.setdefault(str(part.param), theirs.state[str(part.param)])
    params = sorted(map(int, state))
    numels = [access.specs[param].numel for param in params]
    whole = [[param, 0, numel, True] for param, numel in zip(params, numels, strict=True)]
    ordered = {str(param): state[str(param)] for param in params}
    index = access.index(save="", parts_by_rank=[whole])
    return {**everyone[to].header, "state": ordered, "index": index}


class _Sink:
    """Writes pieces as they come, in the order of the file; after an exception, nothing more."""

    def __init__(
        self,
        writer: TensorFileWriter | None,
        plan: Sequence[FullTensor],
        access: StateAccess,
        error: Exception | None,
    ) -> None:
        self._writer = writer
        self._access = access
        self._left = [(one, one.entry.numel) for one in reversed(plan) if one.entry.numel]
        self._gathered: list[Tensor] = []
        self.error = error

    def put(self, flat: Tensor) -> None:
        """Take the next elements, (n,) on the CPU, of one tensor."""
        if self._writer is None or self.error is not None:
            return
        try:
            self._put(self._writer, flat)
        except Exception as raised:
            self._writer.abandon()
            self.error = raised

    def _put(self, writer: TensorFileWriter, flat: Tensor) -> None:
        one, left = self._left.pop()
        if left > flat.numel():
            self._left.append((one, left - flat.numel()))
        if one.spec is None:
            writer.append(flat)
            return
        self._gathered.append(
            flat.clone()
        )  # in another order than that of the file: one tensor is put together
        if left == flat.numel():
            whole = self._access.empty(one.spec.numel, str(flat.dtype))
            at = 0
            for piece in self._gathered:
                whole.narrow(0, at, piece.numel()).copy_(piece)
                at += piece.numel()
            self._gathered.clear()
            writer.append(shaped_like(whole, one.spec).contiguous().view(-1))


def _launches(
    plan: Sequence[FullTensor],
    tensors: Mapping[str, Tensor],
    access: StateAccess,
    sink: _Sink,
    pool: StagingPool,
    *,
    to: int,
) -> Iterator[Any]:
    """What launches each message, in the order of the file; on ranks other than ``to`` those that they send."""
    group = access.group
    pieces = [(one.entry.dtype, s) for one in plan for s in one.sources if s.numel]
    itemsizes = {one.entry.dtype: one.entry.itemsize for one in plan}
    for (dtype, rank), grouped in groupby(pieces, key=lambda piece: (piece[0], piece[1].rank)):
        run = [source for _, source in grouped]
        if group.rank not in (rank, to):
            continue
        chunks = plan_chunks(
            [source.numel for source in run],
            chunk_nbytes=access.chunk_nbytes,
            itemsize=itemsizes[dtype],
            in_flight=DEPTH,
        )
        flats = _RowMajor(tensors, [source.name for source in run])
        for chunk in chunks:
            if rank != group.rank:
                yield partial(_receive, chunk, dtype, rank, access, pool, sink)
            elif rank == to:
                yield partial(_keep, chunk, flats, sink)
            else:
                yield partial(send_chunk, group, chunk, flats, to, pool, access.empty)


class _RowMajor(Sequence["Tensor"]):
    """This rank's tensors as (numel,) in row-major order; one that is not is copied when it is asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self._tensors = tensors
        self._names = names
        self._last: tuple[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: Any) -> Any:
        name = self._names[number]
        if self._last is None or self._last[0] != name:
            self._last = name, self._tensors[name].detach().contiguous().view(-1)
        return self._last[1]


def _keep(chunk: Chunk, flats: Sequence[Tensor], sink: _Sink) -> Finish:
    """Write pieces of this rank."""

    def finish() -> None:
        for piece in pieces_of(chunk, flats):
            sink.put(piece.cpu())

    return finish


def _receive(
    chunk: Chunk, dtype: str, src: int, access: StateAccess, pool: StagingPool, sink: _Sink
) -> Finish:
    """Launch receiving one chunk; its pieces are written when it is there."""
    memory = pool.take(chunk.numel, like=access.empty(0, dtype))
    message = memory.narrow(0, 0, chunk.numel)
    pending = access.group.recv(message, src=src)

    def finish() -> None:
        pending.wait()
        for piece in split_chunk(message, chunk):
            sink.put(piece)
        pool.give_back(memory)

    return finish
