"""What several test folders share: the hypothesis profile, and ranks that are threads of one process."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from shardopt.collectives import Pending, RankGroup

settings.register_profile(
    "shardopt",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.load_profile("shardopt")

PATIENCE_SECONDS = 30.0
"""How long a rank waits for another one before the test fails; no test waits this long unless something is broken."""


@dataclass(frozen=True)
class Message:
    """One tensor that went from one rank to another, or to all (``dst`` None)."""

    src: int
    dst: int | None
    numel: int
    nbytes: int


class ThreadWorld:
    """What the ranks of one run share."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=PATIENCE_SECONDS)
        self.table: list[Any] = [None] * world_size
        self.boxes: dict[tuple[int, int], queue.Queue] = {
            (src, dst): queue.Queue() for src in range(world_size) for dst in range(world_size)
        }
        self.messages: list[Message] = []
        self.num_gathers_by_rank = [{"ints": 0, "object": 0} for _ in range(world_size)]


class Departure:
    """A work that is done once the peer has read the tensor, which it does as late as it can."""

    def __init__(self, box: queue.Queue, tensor: Any) -> None:
        self.tensor = tensor
        self.is_read = threading.Event()
        box.put(self)

    def wait(self) -> None:
        assert self.is_read.wait(PATIENCE_SECONDS)


class Arrival:
    """A work that copies what the peer sent when it is awaited, and not before."""

    def __init__(self, box: queue.Queue, tensor: Any) -> None:
        self._box = box
        self._tensor = tensor

    def wait(self) -> None:
        departure = self._box.get(timeout=PATIENCE_SECONDS)
        assert departure.tensor.shape == self._tensor.shape
        assert departure.tensor.dtype == self._tensor.dtype
        self._tensor.copy_(departure.tensor)
        departure.is_read.set()


class ThreadGroup:
    """A ``Group`` whose ranks are threads; records every message."""

    process_group = None

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size

    def broadcast(self, tensor: Any, *, src: int) -> Pending:
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        if self.rank != src:
            return Pending([Arrival(self.world.boxes[src, self.rank], tensor)], [tensor])
        nbytes = tensor.numel() * tensor.element_size()
        self.world.messages.append(Message(src, None, tensor.numel(), nbytes))
        others = [dst for dst in range(self.world_size) if dst != src]
        return Pending([Departure(self.world.boxes[src, dst], tensor) for dst in others], [tensor])

    def reduce_scatter(self, parts: Any, *, out: Any, scratch: Any) -> Pending:
        """Over this group's own ``send`` and ``recv``; what receives fits into ``scratch`` exactly or with room."""
        assert len(parts) == self.world_size
        assert all(part.dim() == 1 and part.is_contiguous() for part in [*parts, out])
        assert parts[self.rank].shape == out.shape
        if self.world_size == 1:
            assert scratch is None
        return RankGroup.reduce_scatter(self, parts, out=out, scratch=scratch)  # type: ignore[arg-type]

    def send(self, tensor: Any, *, dst: int) -> Pending:
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        assert dst != self.rank
        nbytes = tensor.numel() * tensor.element_size()
        self.world.messages.append(Message(self.rank, dst, tensor.numel(), nbytes))
        return Pending([Departure(self.world.boxes[self.rank, dst], tensor)], [tensor])

    def recv(self, tensor: Any, *, src: int) -> Pending:
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        return Pending([Arrival(self.world.boxes[src, self.rank], tensor)], [tensor])

    def all_reduce(self, tensor: Any, *, maximum: bool = False) -> None:
        everyone = self._gather(tensor.clone())
        tensor.copy_(everyone[0])
        for theirs in everyone[1:]:
            tensor.copy_(tensor.maximum(theirs) if maximum else tensor + theirs)

    def launch_all_gather_ints(self, values: Any) -> Any:
        assert all(type(value) is int and -(2**63) <= value < 2**63 for value in values)
        self.world.num_gathers_by_rank[self.rank]["ints"] += 1
        kept = list(values)

        def wait() -> list[list[int]]:
            gathered = self._gather(kept)
            assert len({len(theirs) for theirs in gathered}) == 1
            return gathered

        return wait

    def all_gather_ints(self, values: Any) -> list[list[int]]:
        return self.launch_all_gather_ints(values)()

    def all_gather_object(self, value: Any) -> list[Any]:
        self.world.num_gathers_by_rank[self.rank]["object"] += 1
        return self._gather(value)

    def _gather(self, value: Any) -> list[Any]:
        self.world.table[self.rank] = value
        self.world.barrier.wait()
        gathered = list(self.world.table)
        self.world.barrier.wait()
        return gathered


@dataclass
class Run:
    """What came of a function that ran on every rank."""

    world: ThreadWorld
    results: list[Any] = field(default_factory=list)
    errors: list[Exception | None] = field(default_factory=list)

    @property
    def texts(self) -> list[str]:
        """Type and text of what each rank raised."""
        return ["" if e is None else f"{type(e).__name__}: {e}" for e in self.errors]

    @property
    def num_left_over(self) -> int:
        """Messages that were sent and never received."""
        return sum(box.qsize() for box in self.world.boxes.values())


@pytest.fixture
def run_threads() -> Callable[[int, Callable[[ThreadGroup], Any]], Run]:
    """Call a function with the ``Group`` of each rank, a thread per rank; errors are kept, not raised."""

    def run(world_size: int, function: Callable[[ThreadGroup], Any]) -> Run:
        world = ThreadWorld(world_size)
        outcome = Run(world, [None] * world_size, [None] * world_size)

        def serve(rank: int) -> None:
            try:
                outcome.results[rank] = function(ThreadGroup(world, rank))
            except Exception as raised:
                outcome.errors[rank] = raised

        threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcome

    return run
