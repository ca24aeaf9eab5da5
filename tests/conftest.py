"""What several test folders share: the hypothesis profile, and ranks that are threads of one process."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from shardopt.collectives import HybridGroup, Pending, RankGroup, StagingPool

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
    """What the ranks of one run share.

    A tensor travels while its receiver waits for something, and not before: so late that memory which is used again too
    early, or read too early, shows. What is posted matches in order, per kind of operation and pair of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.messages: list[Message] = []
        self.launches_by_rank: list[list[Any]] = [[] for _ in range(world_size)]
        self.num_gathers_by_rank = [{"ints": 0, "object": 0} for _ in range(world_size)]
        self._changed = threading.Condition()
        self._departures: dict[Any, deque[Departure]] = defaultdict(deque)
        self._arrivals: dict[Any, deque[Arrival]] = defaultdict(deque)
        self._gathers: dict[Any, dict[int, Any]] = defaultdict(dict)
        self._num_changes = 0
        self._waiting_since: dict[int, int] = {}
        self._ended: set[int] = set()
        self._is_stuck = False

    @property
    def num_left_over(self) -> int:
        """Tensors that were sent and never received, and the other way round."""
        queues = [*self._departures.values(), *self._arrivals.values()]
        return sum(map(len, queues))

    def depart(self, departure: "Departure") -> None:
        with self._changed:
            self._departures[departure.route].append(departure)
            self._note_change()

    def arrive(self, arrival: "Arrival") -> None:
        with self._changed:
            self._arrivals[arrival.route].append(arrival)
            self._note_change()

    @property
    def gathered_values(self) -> list[Any]:
        """Everything that was ever given to a gather."""
        return [value for values in self._gathers.values() for value in values.values()]

    def post(self, key: Any, rank: int, value: Any) -> None:
        """Give the value of one rank to a gather."""
        with self._changed:
            self._gathers[key][rank] = value
            self._note_change()

    def gathered(self, key: Any, rank: int, ranks: Sequence[int]) -> list[Any]:
        """The values that all of ``ranks`` gave to a gather."""
        values = self._gathers[key]
        self.wait(rank, lambda: len(values) == len(ranks))
        return [values[member] for member in ranks]

    def end(self, rank: int) -> None:
        """Note that a rank will do nothing any more."""
        with self._changed:
            self._ended.add(rank)
            self._note_change()

    def wait(self, rank: int, is_done: Callable[[], bool]) -> None:
        """Let what has been sent to ``rank`` arrive until something is done; fail where it never will be."""
        with self._changed:
            while True:
                self._receive(rank)
                if is_done():
                    self._waiting_since.pop(rank, None)
                    return
                self._waiting_since[rank] = self._num_changes
                if self._nobody_can_go_on():
                    self._is_stuck = True
                    self._changed.notify_all()
                assert not self._is_stuck, f"rank {rank} waits in vain"
                assert self._changed.wait(PATIENCE_SECONDS), f"rank {rank} waits too long"

    def _receive(self, rank: int) -> None:
        for route, arrivals in list(self._arrivals.items()):
            while route[-1] == rank and arrivals and self._departures[route]:
                arrivals.popleft().take(self._departures[route].popleft())
                self._note_change()

    def _nobody_can_go_on(self) -> bool:
        """Whether every rank that is left has looked at all there is, and waits."""
        return all(
            rank in self._ended or self._waiting_since.get(rank) == self._num_changes
            for rank in range(self.world_size)
        )

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed.notify_all()


class Departure:
    """A work that is done once the peer has read the tensor."""

    def __init__(self, world: ThreadWorld, route: Any, tensor: Any) -> None:
        self.route = route
        self.tensor = tensor
        self.is_read = False
        self._world = world
        world.depart(self)

    def wait(self) -> None:
        self._world.wait(self.route[-2], lambda: self.is_read)


class Arrival:
    """A work that is done once the tensor holds what the peer sent."""

    def __init__(self, world: ThreadWorld, route: Any, tensor: Any) -> None:
        self.route = route
        self.is_written = False
        self._world = world
        self._tensor = tensor
        world.arrive(self)

    def take(self, departure: Departure) -> None:
        assert departure.tensor.shape == self._tensor.shape
        assert departure.tensor.dtype == self._tensor.dtype
        self._tensor.detach().copy_(departure.tensor.detach())
        departure.is_read = self.is_written = True

    def wait(self) -> None:
        self._world.wait(self.route[-1], lambda: self.is_written)


class ThreadGroup:
    """A ``Group`` whose ranks are threads; records every message and launch.

    ``all_gather`` and ``reduce_scatter`` are those of ``RankGroup`` on the CPU, over this group's own sends. Within the
    world, and in what is recorded, a rank is the number of its thread.
    """

    process_group = None
    is_first_replica = True
    _host = None
    num_scratch = RankGroup.num_scratch
    shares_memory = False
    reduce_over_replicas = RankGroup.reduce_over_replicas
    broadcast_to_replicas = RankGroup.broadcast_to_replicas
    _peers = RankGroup._peers

    def __init__(
        self, world: ThreadWorld, rank: int, *, threads: Sequence[int] | None = None
    ) -> None:
        """Be a rank of the group of some threads, by default of all."""
        self.world = world
        self.rank = rank
        self.threads = tuple(range(world.world_size)) if threads is None else tuple(threads)
        self.thread = self.threads[rank]
        self.world_size = self.num_members = len(self.threads)
        self.is_first = rank == 0
        self.pool = StagingPool()
        self._num_gathers = 0

    def rank_of(self, member: int) -> int:
        return member

    @property
    def launches(self) -> list[Any]:
        return self.world.launches_by_rank[self.thread]

    def _route(self, kind: str, src: int, dst: int) -> Any:
        return (kind, self.threads, self.threads[src], self.threads[dst])

    def broadcast(self, tensor: Any) -> Pending:
        require_flat(tensor)
        self.launches.append(("broadcast", tensor.numel()))
        if not self.is_first:
            return Pending(
                [Arrival(self.world, self._route("all", 0, self.rank), tensor)], [tensor]
            )
        self._record(tensor, None)
        departures = [
            Departure(self.world, self._route("all", 0, dst), tensor)
            for dst in range(1, self.world_size)
        ]
        return Pending(departures, [tensor])

    def all_gather(self, sections: Any) -> Pending:
        assert sections
        for tensor in sections.values():
            require_flat(tensor)
            assert tensor.numel()
        self.launches.append(("all_gather", {r: t.numel() for r, t in sections.items()}))
        return RankGroup.all_gather(self, sections)  # type: ignore[arg-type]

    def reduce_scatter(
        self, parts: Any, *, out: Any, scratch: Any, scale: float = 1.0, adds: bool = False
    ) -> Pending:
        assert len(parts) == self.world_size
        for tensor in [*parts, out]:
            require_flat(tensor)
        assert parts[self.rank].shape == out.shape
        casts = out.dtype != parts[0].dtype
        assert len(scratch) == self.num_scratch("cpu", adds=adds, casts=casts)
        if out.numel():
            assert all(s.shape == out.shape and s.dtype == parts[0].dtype for s in scratch)
        self.launches.append(("reduce_scatter", [part.numel() for part in parts]))
        return RankGroup.reduce_scatter(  # type: ignore[arg-type]
            self, parts, out=out, scratch=scratch, scale=scale, adds=adds
        )

    def send(self, tensor: Any, *, dst: int) -> Pending:
        require_flat(tensor)
        assert dst != self.rank
        self._record(tensor, self.threads[dst])
        return Pending(
            [Departure(self.world, self._route("one", self.rank, dst), tensor)], [tensor]
        )

    def recv(self, tensor: Any, *, src: int) -> Pending:
        require_flat(tensor)
        assert src != self.rank
        return Pending([Arrival(self.world, self._route("one", src, self.rank), tensor)], [tensor])

    def all_reduce(self, tensor: Any, *, maximum: bool = False) -> None:
        everyone = self._gather(tensor.clone())
        tensor.copy_(everyone[0])
        for theirs in everyone[1:]:
            tensor.copy_(tensor.maximum(theirs) if maximum else tensor + theirs)

    def launch_all_gather_ints(self, values: Any) -> Callable[[], list[list[int]]]:
        assert all(type(value) is int and -(2**63) <= value < 2**63 for value in values)
        self.world.num_gathers_by_rank[self.thread]["ints"] += 1
        self.launches.append(("all_gather_ints", len(values)))
        wait = self._launch_gather(list(values))

        def wait_for_ints() -> list[list[int]]:
            gathered = wait()
            assert len({len(theirs) for theirs in gathered}) == 1
            return gathered

        return wait_for_ints

    def all_gather_ints(self, values: Any) -> list[list[int]]:
        return self.launch_all_gather_ints(values)()

    def all_gather_object(self, value: Any) -> list[Any]:
        self.world.num_gathers_by_rank[self.thread]["object"] += 1
        return self._gather(value)

    def _gather(self, value: Any) -> list[Any]:
        return self._launch_gather(value)()

    def _launch_gather(self, value: Any) -> Callable[[], list[Any]]:
        key = (self.threads, self._num_gathers)
        self._num_gathers += 1
        self.world.post(key, self.thread, value)
        return lambda: self.world.gathered(key, self.thread, self.threads)

    def _record(self, tensor: Any, dst: int | None) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        self.world.messages.append(Message(self.thread, dst, tensor.numel(), nbytes))


def require_flat(tensor: Any) -> None:
    """What travels is one gapless range of CPU memory."""
    assert tensor.dim() == 1
    assert tensor.is_contiguous()
    assert tensor.device.type == "cpu"


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
        """Messages that were sent and never received, and the other way round."""
        return self.world.num_left_over


def run_on(groups: Sequence[Any], world: ThreadWorld, function: Callable[[Any], Any]) -> Run:
    """Call a function with each group, a thread per group; errors are kept, not raised."""
    outcome = Run(world, [None] * len(groups), [None] * len(groups))

    def serve(number: int) -> None:
        try:
            outcome.results[number] = function(groups[number])
        except Exception as raised:
            outcome.errors[number] = raised
        finally:
            world.end(number)

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


@pytest.fixture
def run_threads() -> Callable[[int, Callable[[ThreadGroup], Any]], Run]:
    """Call a function with the ``Group`` of each rank, a thread per rank; errors are kept, not raised."""

    def run(world_size: int, function: Callable[[ThreadGroup], Any]) -> Run:
        world = ThreadWorld(world_size)
        return run_on([ThreadGroup(world, rank) for rank in range(world_size)], world, function)

    return run


@pytest.fixture
def run_hybrid() -> Callable[[int, int, Callable[[HybridGroup], Any]], Run]:
    """Call a function with the grid of each member, a thread per member, row by row; errors are kept, not raised."""

    def run(num_rows: int, num_columns: int, function: Callable[[HybridGroup], Any]) -> Run:
        world = ThreadWorld(num_rows * num_columns)
        grids = []
        for member in range(num_rows * num_columns):
            row, column = divmod(member, num_columns)
            of_row = [row * num_columns + rank for rank in range(num_columns)]
            of_column = [rank * num_columns + column for rank in range(num_rows)]
            groups = [
                ThreadGroup(world, column, threads=of_row),
                ThreadGroup(world, row, threads=of_column),
            ]
            grids.append(HybridGroup(*groups))
        return run_on(grids, world, function)

    return run
