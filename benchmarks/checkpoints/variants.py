"""The variants: ways to save, which start from state in memory, and ways to load, which start from what one has saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from benchmarks.checkpoints.meter import Meter
from benchmarks.checkpoints.systems import Subject

FULL, SHARDED, ASYNC, LOAD = "full save", "sharded save", "async save", "load"
SAVE_RANKS, LOAD_RANKS = 2, 3

SAVED = "save"
RETURNED = "load"
TOUCHED = "touched"
CALLED = ("1st call", "2nd call")
STAGED = ("1st staged", "2nd staged")
WRITTEN = ("1st written", "2nd written")
"""What is reported of a variant: the names of its phases."""

Save = Callable[[Subject, Path], object]
Load = Callable[[Subject, Path], object]
Run = Callable[[Any, Path, Meter], None]


@dataclass(frozen=True)
class Variant:
    """One way.

    Attributes:
        name: As it is asked for and reported.
        kind: The table that it belongs to.
        system: A name of ``systems.SYSTEMS``; None for one that just reads.
        run: Does it, with the subject, the folder to write to or read from, and the meter. Collective.
        source: The variant whose files it loads.
    """

    name: str
    kind: str
    system: str | None
    run: Run
    source: str | None = None

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return LOAD_RANKS if self.source else SAVE_RANKS


VARIANTS: dict[str, Variant] = {}


def saves(name: str, kind: str, *, system: str) -> Callable[[Save], Save]:
    """Register a function that saves to a folder."""

    def register(save: Save) -> Save:
        def run(subject: Subject, folder: Path, meter: Meter) -> None:
            with meter(SAVED):
                save(subject, folder)

        VARIANTS[name] = Variant(name, kind, system, run)
        return save

    return register


def loads(name: str, *, system: str, source: str) -> Callable[[Load], Load]:
    """Register a function that loads from a folder.

    A load may have put off the work until somebody looks; so all of the state is looked at, and changed, as a step does.
    """

    def register(load: Load) -> Load:
        def run(subject: Subject, folder: Path, meter: Meter) -> None:
            with meter(TOUCHED) as mark:
                load(subject, folder)
                mark(RETURNED)
                for tensor in subject.tensors():
                    tensor.mul_(1)

        VARIANTS[name] = Variant(name, LOAD, system, run, source)
        return load

    return register


# --- Full save ------------------------------------------------------------------------------------------------------


@saves("shardopt save_full", FULL, system="shardopt")
def save_full(subject: Subject, folder: Path) -> None:
    subject.optimizer.save_full(folder / "full.safetensors")


def consolidate_and_save(subject: Subject, folder: Path) -> None:
    subject.optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        with (folder / "full.pt").open("wb") as file:
            torch.save(subject.optimizer.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())


saves("shardopt consolidate + torch.save", FULL, system="shardopt")(consolidate_and_save)
saves("torch zero consolidate + torch.save", FULL, system="torch zero")(consolidate_and_save)


# --- Sharded save ---------------------------------------------------------------------------------------------------


@saves("shardopt save", SHARDED, system="shardopt")
def save(subject: Subject, folder: Path) -> None:
    subject.optimizer.save(folder)


def named(subject: Subject) -> dict[str, Any]:
    """What DCP saves of the optimizer of ours."""
    return {"optim": subject.optimizer.as_stateful(subject.model)}


def named_fsdp2(subject: Subject) -> dict[str, Any]:
    """What DCP saves of an optimizer under FSDP2."""
    return {"optim": get_optimizer_state_dict(subject.model, subject.optimizer)}


@saves("shardopt dcp.save", SHARDED, system="shardopt")
def dcp_save(subject: Subject, folder: Path) -> None:
    dcp.save(named(subject), checkpoint_id=folder)


@saves("fsdp2 dcp.save", SHARDED, system="fsdp2")
def dcp_save_fsdp2(subject: Subject, folder: Path) -> None:
    dcp.save(named_fsdp2(subject), checkpoint_id=folder)


@saves("raw write", SHARDED, system="shardopt")
def raw_write(subject: Subject, folder: Path) -> None:
    """The disk's speed: the bytes of each rank's state, to one file, and onto the disk."""
    with (folder / f"{dist.get_rank()}.bin").open("wb") as file:
        for tensor in subject.tensors():
            file.write(memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy()))
        file.flush()
        os.fsync(file.fileno())


# --- Async save -----------------------------------------------------------------------------------------------------


def async_saves(
    name: str,
    *,
    system: str,
    state_dict: Callable[[Subject], dict[str, Any]],
    in_background: bool = False,
) -> None:
    """Register ``dcp.async_save``, twice with one stager, whose memory the second call finds.

    ``in_background`` copies the state on a thread, while forward and backward would run; the next step waits for that.
    """

    def run(subject: Subject, folder: Path, meter: Meter) -> None:
        group = dist.new_group(backend="gloo")
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=in_background,
                use_non_blocking_copy=False,
            )
        )
        for number, (called, staged, written) in enumerate(
            zip(CALLED, STAGED, WRITTEN, strict=True)
        ):
            with meter(written) as mark:
                saving: Any = dcp.async_save(
                    state_dict(subject),
                    checkpoint_id=folder / str(number),
                    process_group=group,
                    async_stager=stager,
                )
                mark(called)
                if in_background:
                    saving.staging_completion.result()
                    mark(staged)
                    saving = saving.upload_completion
                saving.result()
            os.sync()
        stager.close()

    VARIANTS[name] = Variant(name, ASYNC, system, run)


async_saves("shardopt dcp.async_save", system="shardopt", state_dict=named)
async_saves(
    "shardopt dcp.async_save staged behind",
    system="shardopt",
    state_dict=named,
    in_background=True,
)
async_saves("fsdp2 dcp.async_save", system="fsdp2", state_dict=named_fsdp2)

SYNCHRONOUS = {"shardopt": "shardopt dcp.save", "fsdp2": "fsdp2 dcp.save"}
"""What an async save is compared with, by system."""


# --- Load -----------------------------------------------------------------------------------------------------------


@loads("shardopt load", system="shardopt", source="shardopt save")
def load(subject: Subject, folder: Path) -> None:
    subject.optimizer.load(folder)


@loads("shardopt load_full", system="shardopt", source="shardopt save_full")
def load_full(subject: Subject, folder: Path) -> None:
    subject.optimizer.load_full(folder / "full.safetensors")


@loads("shardopt dcp.load", system="shardopt", source="shardopt dcp.save")
def dcp_load(subject: Subject, folder: Path) -> None:
    dcp.load(named(subject), checkpoint_id=folder)


@loads(
    "torch zero load_state_dict",
    system="torch zero",
    source="torch zero consolidate + torch.save",
)
def torch_load(subject: Subject, folder: Path) -> None:
    subject.optimizer.load_state_dict(torch.load(folder / "full.pt", mmap=True))


@loads("fsdp2 dcp.load", system="fsdp2", source="fsdp2 dcp.save")
def dcp_load_fsdp2(subject: Subject, folder: Path) -> None:
    state = named_fsdp2(subject)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(subject.model, subject.optimizer, optim_state_dict=state["optim"])


def raw_read(_: None, folder: Path, meter: Meter) -> None:
    """The disk's speed: each rank reads as many bytes as the others, of the files one after another."""
    paths = sorted(folder.glob("*.bin"))
    total = sum(path.stat().st_size for path in paths)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    start, stop = total * rank // world_size, total * (rank + 1) // world_size
    with meter(TOUCHED) as mark:
        target = torch.empty(stop - start, dtype=torch.uint8)
        view, at, done = memoryview(target.numpy()), 0, 0
        for path in paths:
            numel = path.stat().st_size
            first, last = max(start - at, 0), min(stop - at, numel)
            if first < last:
                with path.open("rb", buffering=0) as file:
                    file.seek(first)
                    wanted = view[done : done + last - first]
                    while wanted:
                        wanted = wanted[file.readinto(wanted) :]
                done += last - first
            at += numel
        mark(RETURNED)
        target.mul_(1)


VARIANTS["raw read"] = Variant("raw read", LOAD, None, raw_read, source="raw write")
