"""The sharding group: the few operations that the other rooms need of it.

All ranks in this file are ranks within the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Pending:
    """Launched, not yet awaited communication; keeps its tensors alive until then."""

    def __init__(
        self,
        works: Sequence[Any] = (),
        tensors: Sequence[Tensor] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        """Hold what has a ``wait()``, the tensors it reads or writes, and what is left to do after it."""
        self._works = list(works)
        self._tensors = list(tensors)
        self._then = then

    def wait(self) -> None:
        """Wait for all of it. On a GPU the current stream waits, not the host.

        Raises:
            RuntimeError: A peer is gone or the operation timed out; the rest has been awaited all the same.
        """
        works, self._works = self._works, []
        error: Exception | None = None
        for work in works:
            try:
                work.wait()
            except Exception as raised:
                error = error or raised
        self._tensors = []
        then, self._then = self._then, None
        if error is not None:
            raise error
        if then is not None:
            then()


class Group(Protocol):
    """What the rooms may ask of the ranks that shard one optimizer."""

    @property
    def rank(self) -> int:
        """Rank of this process within the group."""

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""

    @property
    def process_group(self) -> Any:
        """The framework's own process group, or None."""

    def broadcast(self, tensor: Tensor, *, src: int) -> Pending:
        """Launch sending ``tensor`` from rank ``src`` to all others. Collective.

        Args:
            tensor: (N,) contiguous, of equal numel and dtype on every rank. Read at ``src``, written elsewhere, until
                the result is awaited.
            src: The sending rank.
        """

    def reduce_scatter(
        self, parts: Sequence[Tensor], *, out: Tensor, scratch: Tensor | None
    ) -> Pending:
        """Launch summing ``parts[r]`` over ranks and leaving the sum in ``out`` on rank ``r``. Collective.

        On the CPU each rank sends the others their part and adds up what it receives in the order of ranks: half the
        bytes of gloo's own reduce-scatter, which is an all-reduce, and equal sums whatever the timing.

        Args:
            parts: One (numel of rank r,) contiguous tensor per rank. Read until the result is awaited.
            out: (numel of this rank,) written when the result is awaited.
            scratch: ((W - 1) * numel of this rank,) on the CPU, where what is received lies until it is added up; None
                with one rank.
        """

    def send(self, tensor: Tensor, *, dst: int) -> Pending:
        """Launch sending ``tensor``, (N,) contiguous on the CPU, to rank ``dst``, which calls ``recv``."""

    def recv(self, tensor: Tensor, *, src: int) -> Pending:
        """Launch receiving into ``tensor``, (N,) contiguous on the CPU, from rank ``src``, which calls ``send``."""

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Replace ``tensor`` by its sum, or maximum, over ranks. Collective; the host does not wait on a GPU."""

    def launch_all_gather_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Launch gathering the values of every rank, each in the range of int64, equally many on each. Collective.

        Returns:
            What waits for them and returns them by rank; to be called once.
        """

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Gather the values of every rank and wait for them. Collective."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return a small picklable value of every rank. Collective."""


def _alive(group: weakref.ref[Any]) -> Any:
    """The group, see Note [Weak groups].

    Raises:
        RuntimeError: It was destroyed.
    """
    found = group()
    if found is None:
        raise RuntimeError(
            "the process group of this optimizer was destroyed; make the optimizer anew after init_process_group()"
        )
    return found


class LoneRank:
    """Rank 0 of 1: every operation is the one that a group of one rank would do."""

    rank = 0
    world_size = 1

    def __init__(self, process_group: Any = None) -> None:
        """Know the framework's group of one rank, if there is one."""
        self._process_group = None if process_group is None else weakref.ref(process_group)

    @property
    def process_group(self) -> Any:
        """The framework's group of one rank, or None."""
        return None if self._process_group is None else _alive(self._process_group)

    def broadcast(self, tensor: Tensor, *, src: int) -> Pending:
        """Leave ``tensor`` as it is."""
        return Pending()

    def reduce_scatter(
        self, parts: Sequence[Tensor], *, out: Tensor, scratch: Tensor | None
    ) -> Pending:
        """Copy this rank's part."""
        out.copy_(parts[0])
        return Pending()

    def send(self, tensor: Tensor, *, dst: int) -> Pending:
        """Not possible: there is no other rank."""
        raise AssertionError("a lone rank has no peer")

    def recv(self, tensor: Tensor, *, src: int) -> Pending:
        """Not possible: there is no other rank."""
        raise AssertionError("a lone rank has no peer")

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Leave ``tensor`` as it is."""

    def launch_all_gather_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Return what returns this rank's values."""
        return lambda: [list(values)]

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Return this rank's values."""
        return [list(values)]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return this rank's value."""
        return [value]


class RankGroup:
    """Two or more ranks over a framework's ``distributed`` module.

    Tensors on the CPU and plain values travel over ``control``, a group whose backend serves the CPU, so that nothing
    here makes the host wait for a GPU. It is ``process_group`` itself where that does.

    Note [Weak groups]: the framework keeps a process group until ``destroy_process_group()``. An optimizer that kept it
    beyond, in a cycle with its LR scheduler, say, would leave gloo's threads running while the interpreter shuts down,
    which aborts the process now and then. So groups are only referred to weakly.
    """

    def __init__(
        self, framework: Any, distributed: Any, process_group: Any, *, control: Any
    ) -> None:
        """Bind the modules, e.g. ``torch`` and ``torch.distributed``, to a group that this process is a member of."""
        self._process_group = weakref.ref(process_group)
        self.rank = int(distributed.get_rank(process_group))
        self.world_size = int(distributed.get_world_size(process_group))
        self._framework = framework
        self._distributed = distributed
        self._control_group = weakref.ref(control)
        self._global_ranks = [
            int(distributed.get_global_rank(process_group, rank)) for rank in range(self.world_size)
        ]

    @property
    def process_group(self) -> Any:
        """The framework's process group."""
        return _alive(self._process_group)

    @property
    def _control(self) -> Any:
        return _alive(self._control_group)

    def broadcast(self, tensor: Tensor, *, src: int) -> Pending:
        """Launch one broadcast of the tensor's bytes, which every backend can send whatever the dtype."""
        wire = self._bytes(tensor)
        group = self._control if tensor.device.type == "cpu" else self.process_group
        work = self._distributed.broadcast(
            wire, src=self._global_ranks[src], group=group, async_op=True
        )
        return Pending([work], [wire])

    def reduce_scatter(
        self, parts: Sequence[Tensor], *, out: Tensor, scratch: Tensor | None
    ) -> Pending:
        """Launch sends and receives on the CPU, the backend's own reduce-scatter elsewhere."""
        if out.device.type != "cpu":
            work = self._distributed.reduce_scatter(
                out, list(parts), group=self.process_group, async_op=True
            )
            return Pending([work], [out, *parts])
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        received = {self.rank: parts[self.rank]}
        works: list[Any] = []
        for place, peer in enumerate(peers):
            assert scratch is not None
            received[peer] = scratch.narrow(0, place * out.numel(), out.numel())
            works.append(self.recv(received[peer], src=peer))
        works += [self.send(parts[peer], dst=peer) for peer in reversed(peers)]

        def add_up() -> None:
            out.copy_(received[0])
            for rank in range(1, self.world_size):
                out.add_(received[rank])

        return Pending(works, [out, *parts], add_up)

    def send(self, tensor: Tensor, *, dst: int) -> Pending:
        """Launch one point-to-point send of the tensor's bytes."""
        wire = self._bytes(tensor)
        work = self._distributed.isend(wire, dst=self._global_ranks[dst], group=self._control)
        return Pending([work], [wire])

    def recv(self, tensor: Tensor, *, src: int) -> Pending:
        """Launch the receive that matches a ``send``."""
        wire = self._bytes(tensor)
        work = self._distributed.irecv(wire, src=self._global_ranks[src], group=self._control)
        return Pending([work], [wire])

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Run one all-reduce."""
        group = self._control if tensor.device.type == "cpu" else self.process_group
        operators = self._distributed.ReduceOp
        operator = operators.MAX if maximum else operators.SUM
        self._distributed.all_reduce(tensor, op=operator, group=group)

    def launch_all_gather_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Launch one all-gather of a small CPU tensor."""
        mine = self._framework.tensor(list(values), dtype=self._framework.int64)
        everyone = [self._framework.empty_like(mine) for _ in range(self.world_size)]
        work = self._distributed.all_gather(everyone, mine, group=self._control, async_op=True)
        pending = Pending([work], [mine, *everyone])

        def wait() -> list[list[int]]:
            pending.wait()
            return [[int(value) for value in theirs.tolist()] for theirs in everyone]

        return wait

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Run one all-gather of a small CPU tensor."""
        return self.launch_all_gather_ints(values)()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Pickle and gather; for small metadata and on the way to an exception only."""
        everyone: list[Any] = [None] * self.world_size
        self._distributed.all_gather_object(everyone, value, group=self._control)
        return everyone

    def _bytes(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._framework.uint8)
