"""A checkpoint in files, opened for reading: what it holds, where, and any range of it.

A folder of one file per rank, or one full file: either way an index says which part of which parameter lies in which
file, and the header of that file says what belongs to the part. Parts that were cut hold flat tensors, in the memory order
of their parameter; whole ones hold tensors in row-major order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.access import VERSION, SavedParam
from shardopt.checkpoint.load import has_param_shape, require_flat
from shardopt.checkpoint.state_dict import in_memory_order, shaped_like
from shardopt.errors import CheckpointError
from shardopt.files import TensorEntry, TensorFile, decode, read_manifest
from shardopt.partition import ParamSpec, Part, Range, memory_order, plan_transfers, row_major

if TYPE_CHECKING:
    from torch import Tensor

Empty = Callable[[int, str], Any]
"""Makes a flat CPU tensor from a numel and the name of a dtype."""


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part of a parameter, in the file of ``rank``."""

    rank: int
    part: Part


class SavedState:
    """A checkpoint that is open for reading."""

    def __init__(self, path: Path, index: Mapping[str, Any], files: Mapping[int, Path]) -> None:
        """Read the index; files are opened when they are needed.

        Raises:
            CheckpointError: It is of another version, or damaged.
        """
        self.path = path
        if index.get("version") != VERSION:
            raise CheckpointError(
                f"{path}: version {index.get('version')!r}, expected {VERSION}; it was written by another version of "
                "shardopt, or by something else"
            )
        try:
            self.world_size = int(index["world_size"])
            self.optimizer = str(index["optimizer"])
            self.params = [
                SavedParam(p["name"], tuple(p["shape"]), tuple(p["stride"]), p["dtype"])
                for p in index["params"]
            ]
            self.parts: dict[int, list[SavedPart]] = {}
            for rank, param, offset, numel, is_whole in index["parts"]:
                saved = SavedPart(rank, Part(param, offset, numel, is_whole))
                self.parts.setdefault(param, []).append(saved)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: its index is damaged: {error!r}") from error
        self.identity = str(index.get("save", ""))
        self._paths = files
        self._files: dict[int, TensorFile] = {}

    def file(self, rank: int) -> TensorFile:
        """The file of one rank."""
        if rank not in self._files:
            self._files[rank] = TensorFile(self._paths[rank])
        return self._files[rank]

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a file."""
        return list(self._paths)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def entry_of(self, saved: SavedPart) -> dict[str, Any]:
        """The state of a part, encoded, with the names of its tensors."""
        metadata = self.file(saved.rank).metadata
        try:
            entry: dict[str, Any] = metadata["state"][str(saved.part.param)]
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.file(saved.rank).path}: no state of param {saved.part.param}, which the index says is there"
            ) from error
        return entry

    def described(self, param: int) -> dict[str, Any]:
        """The state of a whole parameter, with a ``TensorEntry`` of its shape for each tensor; empty if it has none."""
        if param not in self.parts:
            return {}
        saved = self.parts[param][0]
        file = self.file(saved.rank)
        found = self._decode(saved.rank, self.entry_of(saved), lambda name: file.entries[name])
        shape = self.params[param].shape
        return {
            key: TensorEntry(value.name, value.dtype, shape)
            if isinstance(value, TensorEntry)
            and not saved.part.is_whole
            and is_cut(value, saved.part)
            else value
            for key, value in found.items()
        }

    def read_common(self, what: str, empty: Empty) -> Any:
        """Decode ``"param_groups"``, ``"others"`` or ``"extra"``, which every file or the first one holds."""
        first = min(self._paths)
        return self._decoded(first, self.file(first).metadata[what], empty)

    def read_entry(self, spec: ParamSpec, part: Part, empty: Empty) -> dict[str, Any]:
        """Read the state of a part of a parameter, whichever parts it was saved in.

        Args:
            spec: The parameter as it is now; may lie in memory in another order.
            part: What is needed: of tensors that have the parameter's shape, its elements, in that shape if it is whole.
            empty: Makes tensors.

        Returns:
            The entry; tensors are new.

        Raises:
            CheckpointError: Something is damaged or missing; names file and parameter.
        """
        held = self.parts.get(part.param, [])
        if not held:
            return {}
        first = held[0]
        found: dict[str, Any] = {}
        described = self.described(part.param)
        for key, value in self.entry_of(first).items():
            if not part.is_whole:
                require_flat(spec, key, described[key])
            entry = self._tensor_entry(first, value)
            if entry is not None and self._has_param_shape(key, entry, first, spec):
                found[key] = self._read_elements(key, entry.dtype, held, spec, part, empty)
            else:
                found[key] = self._decoded(first.rank, value, empty)
        return found

    def _tensor_entry(self, saved: SavedPart, value: Any) -> TensorEntry | None:
        """That of an encoded value that is a tensor."""
        entries = self.file(saved.rank).entries
        decoded = self._decode(saved.rank, value, lambda name: entries[name])
        return decoded if isinstance(decoded, TensorEntry) else None

    def _has_param_shape(
        self, key: str, entry: TensorEntry, saved: SavedPart, spec: ParamSpec
    ) -> bool:
        if not saved.part.is_whole:
            return is_cut(entry, saved.part)
        return has_param_shape(key, entry.shape, spec)

    def _read_elements(
        self,
        key: str,
        dtype: str,
        held: list[SavedPart],
        spec: ParamSpec,
        part: Part,
        empty: Empty,
    ) -> Tensor:
        """The elements of a part, in the memory order of ``spec``, of one tensor that has the parameter's shape."""
        stored = row_major(spec.shape) if held[0].part.is_whole else self.params[part.param].stride
        is_ordered = _lies_like(spec.shape, stored, spec.flat_stride)
        start, stop = (part.offset, part.offset + part.numel) if is_ordered else (0, spec.numel)
        flat = empty(stop - start, dtype)
        ranges = [Range(n, s.part.offset, s.part.offset + s.part.numel) for n, s in enumerate(held)]
        try:
            transfers = plan_transfers(ranges, start, stop)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {spec.label}: state {key!r}: {error}") from error
        for move in transfers:
            saved = held[move.source]
            entry = self._tensor_entry(saved, self.entry_of(saved).get(key))
            if entry is None or entry.dtype != dtype:
                raise CheckpointError(
                    f"{self.file(saved.rank).path}: {spec.label}: state {key!r} is not what it is in other files"
                )
            target = flat.narrow(0, move.target_start, move.numel)
            self.file(saved.rank).read(entry.name, move.source_start, target)
        if not is_ordered:
            whole = shaped_like(empty(spec.numel, dtype), spec)
            whole.copy_(flat.as_strided(spec.shape, stored, 0))
            flat = in_memory_order(whole).narrow(0, part.offset, part.numel)
            if not part.is_whole:
                flat = flat.clone()
        return shaped_like(flat, spec) if part.is_whole else flat

    def _decoded(self, rank: int, value: Any, empty: Empty) -> Any:
        """A value with its tensors read."""
        file = self.file(rank)

        def read(name: str) -> Any:
            entry = file.entries[name]
            flat = empty(entry.numel, entry.dtype)
            file.read(name, 0, flat)
            return flat.view(entry.shape)

        return self._decode(rank, value, read)

    def _decode(self, rank: int, value: Any, tensor: Callable[[str], Any]) -> Any:
        try:
            return decode(value, tensor)
        except ValueError as error:
            raise CheckpointError(
                f"{self.file(rank).path}: its header is damaged: {error}"
            ) from error


def is_cut(entry: TensorEntry, part: Part) -> bool:
    """Whether a tensor of a flat part has an element for each of its part."""
    return entry.shape == (part.numel,)


def _lies_like(shape: tuple[int, ...], stride: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether elements have the same order in memory."""
    dims = [dim for dim, length in enumerate(shape) if length != 1]
    orders = [[d for d in memory_order(shape, s) if d in dims] for s in (stride, other)]
    return orders[0] == orders[1]


@contextmanager
def open_saved(path: Path) -> Iterator[SavedState]:
    """Open a folder that was written by all ranks, or a full file.

    Raises:
        CheckpointError: It is neither.
    """
    if path.is_dir():
        index = read_manifest(path)
        names = index.get("files", {})
        files = {int(rank): path / name for rank, name in names.items()}
    else:
        with TensorFile(path) as file:
            metadata = file.metadata
        if not isinstance(metadata, dict) or "index" not in metadata:
            raise CheckpointError(
                f"{path}: a file of tensors, but not of an optimizer's state; expected what save_full() has written, or a "
                "folder that save() has"
            )
        index, files = metadata["index"], {0: path}
    saved = SavedState(path, index, files)
    try:
        yield saved
    finally:
        saved.close()
