"""This rank's state as parts of parameters, read from the local optimizer and put back all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardopt.checkpoint.load import MASTER_KEY, require_flat, take_masters
from shardopt.checkpoint.state_dict import renumber, whole_group
from shardopt.collectives import Group, raise_together
from shardopt.partition import ParamSpec, Part

if TYPE_CHECKING:
    from torch import Tensor


def drop_unowned(local_optimizer: Any) -> None:
    """Drop the empty state that merely reading ``state[param]`` makes for parameters of other ranks."""
    owned = {id(param) for group in local_optimizer.param_groups for param in group["params"]}
    state = local_optimizer.state
    for key in [key for key, entry in state.items() if hasattr(key, "data_ptr") and not entry]:
        if id(key) not in owned:
            del state[key]


@dataclass(frozen=True, slots=True)
class LocalState:
    """What one rank holds.

    Attributes:
        entries: The state of each part that has any, master weights included, in the order of parameters.
        others: State that belongs to no parameter, by its key.
        extra: What the local optimizer's state dict holds besides state and param groups.
    """

    entries: dict[Part, dict[str, Any]]
    others: dict[Any, Any]
    extra: dict[str, Any]


VERSION = 1
"""Of what ``index`` returns, and of the headers of files."""


@dataclass(frozen=True, slots=True)
class SavedParam:
    """The facts of a parameter when it was saved."""

    name: str | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, spec: ParamSpec) -> SavedParam:
        """Those of ``spec``."""
        return cls(spec.name, spec.shape, spec.flat_stride, spec.dtype.rpartition(".")[2])


@dataclass(frozen=True, slots=True)
class StateAccess:
    """The pieces of one optimizer that checkpoints are made from, and loaded into.

    Attributes:
        group: The sharding group.
        local_optimizer: The wrapped optimizer of this rank.
        parts: What of the parameters it updates, in its order.
        specs: All parameters.
        masters: The master weights of what it updates, by parameter; an entry of the state like any other.
        parts_of: Returns those of any rank.
        chunk_nbytes: Bytes in flight while state travels.
        make_optimizer: Makes another local optimizer from param groups.
        make_param: Makes a parameter in the memory of a tensor.
        is_trained: Whether a parameter requires gradients.
        empty: Makes a flat CPU tensor from a numel and ``str(dtype)``.
        is_tensor: Whether a value is a tensor.
        strict: Whether what is loaded has to have all options and keys that the optimizer keeps, and no others.
        templates: What was found out about these, by kind of parameter.
    """

    group: Group
    local_optimizer: Any
    parts: Sequence[Part]
    specs: Sequence[ParamSpec]
    masters: Mapping[int, Tensor]
    parts_of: Callable[[int], Sequence[Part]]
    chunk_nbytes: int
    make_optimizer: Callable[[list[dict[str, Any]]], Any]
    make_param: Callable[[Tensor], Tensor]
    is_trained: Callable[[int], bool]
    empty: Callable[[int, str], Tensor]
    is_tensor: Callable[[Any], bool]
    strict: bool = True
    templates: dict[Any, Any] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the local optimizer is one of the framework's own, whose state is known by its keys."""
        return type(self.local_optimizer).__module__.partition(".")[0] in ("torch", "tensorplay")

    def read(self) -> LocalState:
        """This rank's live state, not copied. Local."""
        drop_unowned(self.local_optimizer)
        local = self.local_optimizer.state_dict()
        state = renumber(local, self.parts)
        entries: dict[Part, dict[str, Any]] = {}
        for part in self.parts:
            entry = dict(state.get(part, {}))
            if part.param in self.masters:
                entry[MASTER_KEY] = self.masters[part.param].detach()
            if not part.is_whole:
                for key, value in entry.items():
                    require_flat(self.specs[part.param], key, value)
            if part in state or entry:
                entries[part] = entry
        others = {key: value for key, value in state.items() if not isinstance(key, Part)}
        extra = {key: v for key, v in local.items() if key not in ("state", "param_groups")}
        return LocalState(entries, others, extra)

    def tensor_of(self, part: Part) -> Tensor:
        """What the local optimizer updates for a part."""
        groups = self.local_optimizer.param_groups
        listed = [param for group in groups for param in group["params"]]
        tensor: Tensor = listed[list(self.parts).index(part)]
        return tensor

    def initial(self) -> dict[Part, dict[str, Any]]:
        """What the state of trained parts is after one step with gradients of zero, which touches nothing. Local.

        Takes memory for the tensors that this rank updates, and their gradients, on the way.
        """
        parts = iter(self.parts)
        copies: dict[Part, Tensor] = {}
        groups = []
        for group in self.local_optimizer.param_groups:
            params = []
            for param, part in zip(group["params"], parts, strict=False):
                copy = self.make_param(param.detach().clone())
                if self.is_trained(part.param):
                    copy.grad = param.detach().clone().zero_()
                    copies[part] = copy
                params.append(copy)
            groups.append({**group, "params": params})
        optimizer = self.make_optimizer(groups)
        optimizer.step()
        return {p: dict(optimizer.state[c]) for p, c in copies.items() if c in optimizer.state}

    def index(self, save: str, parts_by_rank: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
        """What a checkpoint of this optimizer holds and where, as plain values.

        Args:
            save: Tells this one from others.
            parts_by_rank: What stands in the file of each rank: parameter, offset, numel, and whether it is whole.
        """
        params = [SavedParam.of(spec) for spec in self.specs]
        return {
            "version": VERSION,
            "save": save,
            "optimizer": type(self.local_optimizer).__name__,
            "world_size": self.group.world_size,
            "params": [
                {"name": p.name, "shape": p.shape, "stride": p.stride, "dtype": p.dtype}
                for p in params
            ],
            "parts": [[rank, *part] for rank, parts in enumerate(parts_by_rank) for part in parts],
        }

    def replace(
        self,
        make_local: Callable[[], dict[str, Any]],
        *,
        param_groups: list[dict[str, Any]],
        saved_groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Load a local state dict into the local optimizer, and the options of all groups; all ranks or none. Collective.

        Args:
            make_local: Returns the state dict, whose tensors are kept; may raise.
            param_groups: Of the whole optimizer; its groups are replaced.
            saved_groups: Those of the full state dict.
        """
        optimizer = self.local_optimizer
        kept = optimizer.state, optimizer.param_groups
        try:
            with raise_together(self.group, doing="load_state_dict() of the local optimizer"):
                local = make_local()
                loaded = take_masters(local["state"])
                optimizer.load_state_dict(local)
        except Exception:
            optimizer.state, optimizer.param_groups = kept
            raise
        for number, values in loaded.items():
            master = self.masters.get(self.parts[number].param)
            if master is not None:
                master.detach().copy_(values.view(master.shape))
        param_groups[:] = [
            whole_group(local_group, current, saved)
            for local_group, current, saved in zip(
                optimizer.param_groups, param_groups, saved_groups, strict=True
            )
        ]
