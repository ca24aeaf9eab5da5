"""Save and load: state dicts of the unsharded optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from shardopt.collectives import raise_together
from shardopt.optimizer.base import OptimizerBase


class StateDictMethods(OptimizerBase):
    """Collect and load the whole state."""

    _optimizer_state_dict_pre_hooks: Any
    _optimizer_state_dict_post_hooks: Any
    _optimizer_load_state_dict_pre_hooks: Any
    _optimizer_load_state_dict_post_hooks: Any

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collect the whole state on rank ``to`` of the group, in CPU memory, for ``state_dict()``. Collective.

        Tensors travel in chunks; ranks other than ``to`` hold ``Sharding.bucket_mb`` of them beyond their own state.
        What an earlier call collected is dropped on every rank; rank ``to`` keeps this until then, or ``load_state_dict()``.

        Raises:
            ValueError: ``to`` is no rank of the group, or not equal on all ranks.
        """
        self.wait()
        self._pieces.state.consolidate(self.param_groups, to=to)

    def state_dict(self) -> dict[str, Any]:
        """Return the last consolidated state, as the unsharded optimizer's ``state_dict()`` would be then. Local.

        With ``Sharding(state_dict="sharded")`` it is this rank's part, live as that of any optimizer, which
        ``load_state_dict()`` takes back on the same rank, and ``copy.deepcopy()`` keeps.

        Raises:
            NotConsolidatedError: This rank holds none; a ``RuntimeError``. Never with ``Sharding(state_dict="sharded")``.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        is_sharded = self._sharding.state_dict == "sharded"
        state = self._pieces.state
        result = state.local(self.param_groups) if is_sharded else state.snapshot()
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def load_state_dict(self, state_dict: dict[str, Any], *, strict: bool = True) -> None:
        """Load the state of an unsharded optimizer, or a consolidated one from any world size. Collective.

        Every rank passes the full state dict and copies its own part out of it; the dict stays as it is. Or every rank
        passes its own part, as ``state_dict()`` returns with ``Sharding(state_dict="sharded")``.

        Args:
            state_dict: The state.
            strict: Refuse a state dict that lacks options or state that the optimizer keeps, or has state that it does
                not; it is that of another optimizer, as a rule.

        Raises:
            StateMismatchError: It does not fit. As with every failure here, on all ranks, with nothing loaded.
            RankMismatchError: Ranks passed different ones.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        with raise_together(self._group, doing="load_state_dict() hooks"):
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before(self, state_dict) or state_dict
        self._pieces.state.load(state_dict, self.param_groups, strict=strict)
        self._loaded()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # --- Files ------------------------------------------------------------------------------------------------

    def save(self, folder: str | PathLike[str]) -> None:
        """Save the state in one file per rank, in a folder that all ranks share. Collective.

        What was saved there before stays whole until all of this is on the disk, and is replaced in one move: whenever a
        process dies, ``load()`` finds one or the other. Files are safetensors with checksums; nothing is pickled.

        Raises:
            TypeError: The state holds something that cannot be written; names it.
            OSError, CheckpointError: The folder cannot be written, or is not one folder for all ranks. As with every
                failure, on all ranks.
        """
        self.wait()
        self._pieces.state.save(self.param_groups, Path(folder))

    def load(self, path: str | PathLike[str], *, strict: bool = True) -> None:
        """Load what ``save()`` or ``save_full()`` has written, at any world size, granularity and stage. Collective.

        Every rank reads just its part. Parameters are the model's to load.

        Args:
            path: The folder or file.
            strict: As in ``load_state_dict()``.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged; names the file and what is damaged in it.
            StateMismatchError: It does not fit. As with every failure, on all ranks, with nothing loaded.
            RankMismatchError: Ranks see different ones.
        """
        self._pieces.state.load_saved(self.param_groups, Path(path), strict=strict)
        self._loaded()

    def save_full(self, path: str | PathLike[str], to: int = 0) -> None:
        """Write the state of the whole optimizer to one file on rank ``to``, streamed. Collective.

        No rank holds more of it than its own and ``Sharding.bucket_mb``. The file is safetensors with checksums, and
        replaces what was at ``path`` in one move.

        Raises:
            TypeError: The state holds something that cannot be written; names it.
            ValueError: ``to`` is no rank of the group, or not equal on all ranks.
            OSError: The file cannot be written. As with every failure, on all ranks.
        """
        self.wait()
        self._pieces.state.save_full(self.param_groups, Path(path), to=to)

    def load_full(self, path_or_dict: Any, src: int = 0, *, strict: bool = True) -> None:
        """Load a full state that only rank ``src`` has, and sends to the others part by part. Collective.

        Args:
            path_or_dict: On rank ``src``, elsewhere ignored: a file of ``save_full()``; one that ``torch.save`` has written
                of the state dict of an unsharded optimizer, or of a consolidated one (torch's, FairScale's or ours), of
                which nothing but tensors and plain values is read; or such a state dict.
            src: The rank that has it.
            strict: As in ``load_state_dict()``.

        Raises:
            CheckpointError, StateMismatchError: It cannot be read, or does not fit. As with every failure, on all ranks,
                with nothing loaded.
        """
        self._pieces.state.load_full(self.param_groups, path_or_dict, src=src, strict=strict)
        self._loaded()

    # --- torch.distributed.checkpoint -------------------------------------------------------------------------

    def sharded_state_dict(self, model: Any = None) -> dict[str, Any]:
        """Return this rank's part of the state, for ``torch.distributed.checkpoint`` (DCP) to save or load into. Local.

        In the layout of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, so files go between this
        optimizer, an unsharded one and one under FSDP2, at any world size. Tensors are the live ones, not copied; what DCP
        loads goes beside them, and takes effect with ``load_sharded_state_dict()``. An optimizer that has not stepped
        gets initial state to be loaded into.

        Args:
            model: Names the parameters. May be left out if the optimizer was made from ``named_parameters()``.

        Raises:
            ValueError: A parameter of the optimizer is not in ``model``.
        """
        self.wait()
        return self._pieces.state.by_name(self.param_groups, model, is_fresh=self._is_fresh)

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any], model: Any = None) -> None:
        """Take what DCP has loaded into the result of ``sharded_state_dict()``. Collective.

        Raises:
            StateMismatchError: It is of other parameters. As with every failure, on all ranks, with nothing loaded.
        """
        self._pieces.state.load_by_name(self.param_groups, state_dict, model)
        self._loaded()

    def as_stateful(self, model: Any = None) -> Stateful:
        """Return an object that DCP saves and loads as part of a state dict: ``{"optim": optimizer.as_stateful(model)}``."""
        return Stateful(self, model)

    def _loaded(self) -> None:
        self.state = self._pieces.state.live
        self._is_fresh = False


class Stateful:
    """The protocol of DCP for objects that have state: it asks for a state dict, and hands it back once loaded."""

    def __init__(self, optimizer: StateDictMethods, model: Any) -> None:
        """Bind the optimizer to the model that names its parameters."""
        self._optimizer = optimizer
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        """As ``sharded_state_dict()``."""
        return self._optimizer.sharded_state_dict(self._model)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As ``load_sharded_state_dict()``."""
        self._optimizer.load_sharded_state_dict(state_dict, self._model)
