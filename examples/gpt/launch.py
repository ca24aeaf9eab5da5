"""From one command to N processes that know each other, started here or by torchrun."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

T = TypeVar("T")


@dataclass(frozen=True)
class Rank:
    """Which of the processes this one is.

    Attributes:
        rank: In [0, world_size).
        world_size: Number of processes on all machines.
        device: Where this process computes.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process prints and saves."""
        return self.rank == 0


def num_launched_ranks() -> int | None:
    """Return how many processes torchrun started, this one among them; None if it did not start this one."""
    return int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None


def is_first_process() -> bool:
    """Return whether this process speaks for all: the one that starts the others, or torchrun's first."""
    return os.environ.get("RANK", "0") == "0"


def launch(function: Callable[[Rank, T], None], argument: T, *, num_ranks: int) -> None:
    """Run ``function(rank, argument)`` on every rank: as one of torchrun's processes, or in new ones.

    Args:
        function: At the top of a module, since new processes import it.
        argument: What every rank is given; can be pickled.
        num_ranks: How many processes to start here; those of torchrun are counted by torchrun.

    Raises:
        SystemExit: A rank that was started here failed; all others were ended, and the message says why.
    """
    if num_launched_ranks() is not None:
        local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        with _joined(*local, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) as rank:
            function(rank, argument)
        return
    print(f"Starting {num_ranks} process{'es' if num_ranks > 1 else ''} ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = Path(folder, "rendezvous").as_uri()  # a file, so no port can be taken
        _start(_run_rank, (num_ranks, meeting_point, function, argument), num_ranks)


def _start(function: Callable[..., None], arguments: tuple[object, ...], num_ranks: int) -> None:
    context = spawn(function, args=arguments, nprocs=num_ranks, join=False)
    try:
        while not context.join():
            pass
    except ProcessRaisedException as error:
        sys.exit(f"Rank {error.error_index} failed, and all were stopped.{error}")
    except ProcessExitedException as error:
        sys.exit(f"Rank {error.error_index} died, and all were stopped: {error}")
    finally:  # also on Ctrl-C
        for process in context.processes:
            process.terminate()
            process.join()


def _run_rank(
    rank: int, num_ranks: int, meeting_point: str, function: Callable[[Rank, T], None], argument: T
) -> None:
    with _joined(rank, num_ranks, rank, num_ranks, meeting_point) as joined:
        function(joined, argument)


@contextmanager
def _joined(
    local_rank: int, num_local: int, rank: int, world_size: int, meeting_point: str = "env://"
) -> Iterator[Rank]:
    """Join the process group: NCCL where each process has a GPU of its own, else gloo with one thread each."""
    has_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= num_local
    device = torch.device("cuda", local_rank) if has_gpu else torch.device("cpu")
    _make_deterministic(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        init_method=meeting_point,
        rank=rank,
        world_size=world_size,
    )
    yield Rank(rank, world_size, device)
    # Not after an error: the other ranks may wait in a collective. First free what still refers to the group, such as an
    # optimizer and its scheduler, which refer to each other: else its threads live on into the interpreter's exit, and
    # one that drops its last tensor there aborts the process ("terminate called without an active exception").
    gc.collect()
    dist.destroy_process_group()


def _make_deterministic(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    else:
        torch.set_num_threads(
            1
        )  # N processes share the cores; more threads would only fight for them
    torch.use_deterministic_algorithms(True)
