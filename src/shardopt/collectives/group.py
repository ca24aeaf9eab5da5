"""The sharding group: the few operations that the other rooms need of it.

All ranks in this file are ranks within the group. A group is alone, or one of several that hold replicas (``HybridGroup``);
what ranks agree on is agreed on by all members of all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shardopt.collectives.staging import StagingPool

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

    @property
    def pool(self) -> StagingPool:
        """Memory to send from, to be given back to it once what was sent is awaited, and not written to after that.

        It may still be read then, by ranks that are behind, and is not lent again before all have.
        """

    @property
    def shares_memory(self) -> bool:
        """Whether what is sent from the CPU, and does not lie in memory of ``pool``, is copied there."""

    @property
    def num_members(self) -> int:
        """Ranks that hold a replica of the parameters: ``world_size``, times the number of such groups in a grid."""

    @property
    def is_first(self) -> bool:
        """Whether this process is member 0, whose parameters all start from."""

    @property
    def is_first_replica(self) -> bool:
        """Whether this process is in the first of the groups that hold replicas."""

    def rank_of(self, member: int) -> int:
        """The rank, within its group, of a member; members are numbered group by group."""

    def broadcast(self, tensor: Tensor) -> Pending:
        """Launch sending ``tensor`` from member 0 to all others. Collective.

        Args:
            tensor: (N,) contiguous, of equal numel and dtype everywhere. Read at member 0, written elsewhere, until the
                result is awaited.
        """

    def all_gather(self, sections: Mapping[int, Tensor]) -> Pending:
        """Launch sending each listed rank's section from that rank to the others. Collective.

        Args:
            sections: By rank, (numel of that rank,) contiguous, of one dtype. This rank's own is read, the others are
                written, until the result is awaited.
        """

    def reduce_scatter(
        self,
        parts: Sequence[Tensor],
        *,
        out: Tensor,
        scratch: Sequence[Tensor],
        scale: float = 1.0,
        adds: bool = False,
    ) -> Pending:
        """Launch summing ``parts[r]`` over ranks and leaving ``scale`` times the sum in ``out`` on rank ``r``. Collective.

        On the CPU the sum is taken in the order of ranks, so it does not depend on timing.

        Args:
            parts: One (numel of rank r,) contiguous tensor per rank. Read until the result is awaited, and used as
                scratch memory.
            out: (numel of this rank,) written when the result is awaited; sums are taken in its dtype.
            scratch: ``num_scratch()`` tensors like this rank's part, of no defined content afterwards.
            scale: Multiplied into the sum.
            adds: Add to what ``out`` holds instead of replacing it.
        """

    def reduce_over_replicas(self, tensor: Tensor) -> None:
        """Sum what this rank holds of a sum over its group with what the same rank of other groups holds. Collective."""

    def broadcast_to_replicas(self, tensor: Tensor) -> None:
        """Make ``tensor``, (N,) contiguous, what it is on the same rank of the first of the groups. Collective."""

    def num_scratch(self, device_type: str, *, adds: bool, casts: bool) -> int:
        """How many tensors of scratch memory ``reduce_scatter`` needs.

        Args:
            device_type: Of the tensors, ``"cpu"`` or another.
            adds: As there.
            casts: Whether ``out`` has another dtype than the parts.
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


def alive(group: weakref.ref[Any]) -> Any:
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


def add_up(
    parts: Sequence[Tensor],
    *,
    out: Tensor,
    scale: float,
    adds: bool,
    total: Tensor | None = None,
    add: Callable[..., Any] | None = None,
) -> None:
    """Leave ``scale`` times the sum of ``parts``, taken in their order, in ``out``, or add it to what is there.

    Args:
        parts: (N,) each; only read, but for ``out`` and ``total``, which may be the first or second of them.
        out: (N,) of their dtype or another.
        scale: Multiplied into the sum.
        adds: Add to what ``out`` holds.
        total: (N,) where the sum is taken before it is added; by default in the first part.
        add: Adds two tensors into a third, ``out``, in one pass, if the framework can.
    """
    if adds and parts[0].dtype != out.dtype:
        for part in parts:
            out.add_(part, alpha=scale)
        return
    ordered = list(parts)
    if not adds:
        total = out
    elif total is None:
        total = ordered[0]
    if len(ordered) > 1 and ordered[1] is total:
        ordered[:2] = [total, ordered[0]]  # a + b is b + a to the bit
    num_added = 1
    if ordered[0] is not total and len(ordered) > 1 and add and ordered[0].dtype == total.dtype:
        add(ordered[0], ordered[1], out=total)
        num_added = 2
    elif ordered[0] is not total:
        total.copy_(ordered[0])
    for other in ordered[num_added:]:
        total.add_(other)
    if scale != 1.0:
        total.mul_(scale)
    if adds:
        out.add_(total)


class LoneRank:
    """Rank 0 of 1: every operation is the one that a group of one rank would do."""

    rank = 0
    world_size = 1
    num_members = 1
    is_first = True
    is_first_replica = True
    shares_memory = False

    def __init__(self, process_group: Any = None) -> None:
        """Know the framework's group of one rank, if there is one."""
        self._process_group = None if process_group is None else weakref.ref(process_group)
        self.pool = StagingPool()

    @property
    def process_group(self) -> Any:
        """The framework's group of one rank, or None."""
        return None if self._process_group is None else alive(self._process_group)

    def rank_of(self, member: int) -> int:
        """Rank 0."""
        return 0

    def broadcast(self, tensor: Tensor) -> Pending:
        """Leave ``tensor`` as it is."""
        return Pending()

    def all_gather(self, sections: Mapping[int, Tensor]) -> Pending:
        """Leave the section as it is."""
        return Pending()

    def reduce_scatter(
        self,
        parts: Sequence[Tensor],
        *,
        out: Tensor,
        scratch: Sequence[Tensor],
        scale: float = 1.0,
        adds: bool = False,
    ) -> Pending:
        """Take this rank's part, when it is awaited."""
        return Pending(then=lambda: add_up(parts, out=out, scale=scale, adds=adds))

    def reduce_over_replicas(self, tensor: Tensor) -> None:
        """Leave ``tensor`` as it is."""

    def broadcast_to_replicas(self, tensor: Tensor) -> None:
        """Leave ``tensor`` as it is."""

    def num_scratch(self, device_type: str, *, adds: bool, casts: bool) -> int:
        """None: nothing is received."""
        return 0

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
