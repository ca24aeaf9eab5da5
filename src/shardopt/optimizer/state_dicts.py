"""Save and load: state dicts of the unsharded optimizer."""

from __future__ import annotations

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

        Raises:
            NotConsolidatedError: This rank holds none; a ``RuntimeError``.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._pieces.state.snapshot()
        for after in self._optimizer_state_dict_post_hooks.values():
            result = after(self, result) or result
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an unsharded optimizer, or a consolidated one from any world size. Collective.

        Every rank passes the full state dict and copies its own part out of it; the dict stays as it is.

        Raises:
            StateMismatchError: It does not fit. As with every failure here, on all ranks, with nothing loaded.
            RankMismatchError: Ranks passed different ones.
        """
        state_dict = dict(state_dict) if isinstance(state_dict, dict) else state_dict
        with raise_together(self._group, doing="load_state_dict() hooks"):
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = before(self, state_dict) or state_dict
        self._pieces.state.load(state_dict, self.param_groups)
        self.state = self._pieces.state.live
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

    def load(self, path: str | PathLike[str]) -> None:
        """Load what ``save()`` or ``save_full()`` has written, at any world size, granularity and stage. Collective.

        Every rank reads just its part. Parameters are the model's to load.

        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged; names the file and what is damaged in it.
            StateMismatchError: It does not fit. As with every failure, on all ranks, with nothing loaded.
            RankMismatchError: Ranks see different ones.
        """
        self._pieces.state.load_saved(self.param_groups, Path(path))
        self.state = self._pieces.state.live

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

    def load_full(self, path_or_dict: Any, src: int = 0) -> None:
        """Load a full state that only rank ``src`` has, and sends to the others part by part. Collective.

        Args:
            path_or_dict: On rank ``src``, elsewhere ignored: a file of ``save_full()``; one that ``torch.save`` has written
                of the state dict of an unsharded optimizer, or of a consolidated one (torch's, FairScale's or ours), of
                which nothing but tensors and plain values is read; or such a state dict.
            src: The rank that has it.

        Raises:
            CheckpointError, StateMismatchError: It cannot be read, or does not fit. As with every failure, on all ranks,
                with nothing loaded.
        """
        self._pieces.state.load_full(self.param_groups, path_or_dict, src=src)
        self.state = self._pieces.state.live
