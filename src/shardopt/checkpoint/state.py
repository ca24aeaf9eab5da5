"""The state of the local optimizer, told in terms of the parameters that users know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardopt.buffers import view_slot
from shardopt.checkpoint.access import StateAccess
from shardopt.checkpoint.by_name import local_of_named, state_by_name
from shardopt.checkpoint.distribute import DictSource, FileSource, FullSource, load_from_one
from shardopt.checkpoint.full import collect_full, load_full, require_target
from shardopt.checkpoint.full_file import save_full_file
from shardopt.checkpoint.local import is_local, load_local, local_state_dict
from shardopt.checkpoint.names import names_of
from shardopt.checkpoint.saved import open_saved
from shardopt.checkpoint.sharded_files import load_saved, save_sharded
from shardopt.checkpoint.structure import map_tensors
from shardopt.collectives import Group, raise_together
from shardopt.errors import NotConsolidatedError
from shardopt.files import is_pickled
from shardopt.frameworks import Framework
from shardopt.partition import Part, Slot
from shardopt.shards import Shards


class StateOfParams(Mapping[Any, Any]):
    """``state`` where the local optimizer updates parts of parameters or master weights; keys are parameters, read only.

    Of a parameter that this rank owns all of, tensors have its shape; of a part, they are (elements of the part,). They are
    the live state, and may be changed in place.
    """

    def __init__(self, shards: Shards, local_optimizer: Any) -> None:
        """Bind both."""
        self._shards = shards
        self._local_optimizer = local_optimizer

    def __getitem__(self, param: Any) -> Mapping[str, Any]:
        for part in self._shards.parts:
            if self._shards.params[part.param] is param:
                entry = self._local_optimizer.state.get(self._shards.tensors[part.param], {})
                return MappingProxyType({key: self._shaped(v, part) for key, v in entry.items()})
        return MappingProxyType({})

    def __contains__(self, param: object) -> bool:
        return any(param is other for other in self)

    def __iter__(self) -> Iterator[Any]:
        for part in self._shards.parts:
            if self._shards.tensors[part.param] in self._local_optimizer.state:
                yield self._shards.params[part.param]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _shaped(self, value: Any, part: Part) -> Any:
        spec = self._shards.specs[part.param]
        if (
            part.is_whole
            or part.numel < spec.numel
            or getattr(value, "shape", None) != (part.numel,)
        ):
            return value
        return view_slot(value, Slot(part.param, 0, part.numel), spec)


class ShardedState:
    """Collects, loads and shows the state of one optimizer."""

    def __init__(
        self,
        group: Group,
        framework: Framework,
        shards: Shards,
        local_optimizer: Any,
        *,
        make_optimizer: Callable[[list[dict[str, Any]]], Any],
        chunk_nbytes: int,
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            framework: The framework.
            shards: What is sharded.
            local_optimizer: The wrapped optimizer of this rank.
            make_optimizer: Makes another one from param groups.
            chunk_nbytes: Bytes in flight while state travels.
        """
        self._group = group
        self._framework = framework
        self._shards = shards
        self._local_optimizer = local_optimizer
        self._make_optimizer = make_optimizer
        self._chunk_nbytes = chunk_nbytes
        self._snapshot: dict[str, Any] | None = None

    @property
    def live(self) -> Any:
        """The state that training uses now, by parameter."""
        shards = self._shards
        if all(shards.tensors[part.param] is shards.params[part.param] for part in shards.parts):
            return self._local_optimizer.state
        return StateOfParams(shards, self._local_optimizer)

    def consolidate(self, param_groups: list[dict[str, Any]], *, to: int) -> None:
        """Collect, on rank ``to``, the state dict of the whole optimizer, in CPU memory. Collective."""
        require_target(self._group, to)
        self._snapshot = None  # before the next one is collected, so that there are never two
        self._snapshot = collect_full(self._access(), param_groups, to=to)

    def snapshot(self) -> dict[str, Any]:
        """Return what was collected last, as dicts that may be changed. Local.

        Raises:
            NotConsolidatedError: Nothing was.
        """
        if self._snapshot is None:
            raise NotConsolidatedError(
                f"rank {self._group.rank} holds no consolidated state; call consolidate_state_dict(to=rank) on all "
                "ranks first, then state_dict() on that rank"
            )
        copied: dict[str, Any] = map_tensors(
            self._snapshot, lambda tensor: tensor, self._framework.is_tensor
        )
        return copied

    def load(
        self, state_dict: Any, param_groups: list[dict[str, Any]], *, strict: bool = True
    ) -> None:
        """Load this rank's part of a full state dict, or what ``local`` returned, and all options. Collective."""
        access = self._access(strict=strict)
        if is_local(access, state_dict):
            load_local(access, state_dict, param_groups)
        else:
            load_full(access, state_dict, param_groups)
        self._snapshot = None

    def save(self, param_groups: list[dict[str, Any]], folder: Path) -> None:
        """Write this rank's state to a file of its own. Collective."""
        save_sharded(self._access(), param_groups, folder)

    def load_saved(self, param_groups: list[dict[str, Any]], path: Path, *, strict: bool) -> None:
        """Read this rank's part of a checkpoint. Collective."""
        load_saved(self._access(strict=strict), param_groups, path)
        self._snapshot = None

    def save_full(self, param_groups: list[dict[str, Any]], path: Path, *, to: int) -> None:
        """Write the state of the whole optimizer on rank ``to``. Collective."""
        require_target(self._group, to)
        save_full_file(self._access(), param_groups, path, to=to)

    def load_full(
        self, param_groups: list[dict[str, Any]], path_or_dict: Any, *, src: int, strict: bool
    ) -> None:
        """Load what rank ``src`` has. Collective."""
        require_target(self._group, src, name="src")
        access = self._access(strict=strict)
        with ExitStack() as opened:

            def open_source() -> FullSource:
                if not isinstance(path_or_dict, (str, PathLike)):
                    return DictSource(path_or_dict, access)
                path = Path(path_or_dict)
                if is_pickled(path):
                    return DictSource(self._framework.load_pickled(path), access)
                return FileSource(opened.enter_context(open_saved(path)), access)

            load_from_one(access, param_groups, open_source, src=src)
        self._snapshot = None

    def by_name(
        self, param_groups: list[dict[str, Any]], module: Any, *, is_fresh: bool
    ) -> dict[str, Any]:
        """This rank's part keyed by names, for DCP. Local.

        ``is_fresh`` makes initial state, to be loaded into, for an optimizer that has none.
        """
        make_tensor = self._framework.saved_tensor
        if make_tensor is None:
            raise RuntimeError(
                f"{self._framework.name} has no distributed checkpoints; use save() and load(), or save_full()"
            )
        access = self._access()
        initial = access.initial() if is_fresh else {}
        return state_by_name(access, param_groups, self._names(module), make_tensor, initial)

    def load_by_name(
        self, param_groups: list[dict[str, Any]], state_dict: Mapping[str, Any], module: Any
    ) -> None:
        """Load what ``by_name`` returned and DCP has loaded. Collective."""
        access = self._access()
        with raise_together(self._group, doing="load_sharded_state_dict()"):
            local, groups = local_of_named(access, state_dict, self._names(module))
        access.replace(lambda: local, param_groups=param_groups, saved_groups=groups)
        self._snapshot = None

    def _names(self, module: Any) -> list[str]:
        """The name of each parameter in a module, or without one those that the optimizer was given.

        Raises:
            ValueError: One has none.
        """
        names = {} if module is None else names_of(module)
        found = [
            names.get(id(param), spec.name if module is None else None)
            for param, spec in zip(self._shards.params, self._shards.specs, strict=True)
        ]
        for name, spec in zip(found, self._shards.specs, strict=True):
            if name is None:
                raise ValueError(
                    f"{spec.label}: is no parameter of the model that was given, so it has no name in the checkpoint; pass "
                    "the model whose parameters the optimizer was made with, or make it from model.named_parameters()"
                )
        return [name for name in found if name is not None]

    def local(self, param_groups: list[dict[str, Any]]) -> dict[str, Any]:
        """This rank's part as a state dict, live and not copied. Local."""
        return local_state_dict(self._access(), param_groups)

    def _access(self, *, strict: bool = True) -> StateAccess:
        return StateAccess(
            self._group,
            self._local_optimizer,
            parts=self._shards.parts,
            specs=self._shards.specs,
            masters=self._shards.masters(),
            parts_of=self._shards.parts_of,
            chunk_nbytes=self._chunk_nbytes,
            make_optimizer=self._make_optimizer,
            make_param=self._framework.make_param,
            is_trained=lambda index: bool(self._shards.params[index].requires_grad),
            empty=self._framework.empty_on_cpu,
            is_tensor=self._framework.is_tensor,
            strict=strict,
        )
