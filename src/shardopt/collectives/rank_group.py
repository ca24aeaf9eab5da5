"""Two or more ranks over a framework's ``distributed`` module.

Which primitive carries what is chosen here and nowhere else, by where the tensors lie. On the CPU everything large goes
through shared memory (``Host``) if all ranks run on one host. Else, since gloo runs a reduce-scatter as an all-reduce and
a broadcast on one of two threads, it goes point to point: a rank sends each of the others what it is owed,
``S * (N - 1) / N`` bytes, straight from and into the memory where it is needed.
Elsewhere the backend's own collectives run, in place on flat tensors where sections are equal and lie side by side.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.collectives.group import Pending, add_up, alive
from shardopt.collectives.host import Host
from shardopt.collectives.staging import StagingPool

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

NUM_TAG_BYTES = 3
"""Of a random number: groups that messages could be mixed up between are few."""


class RankGroup:
    """A process group of a framework.

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
        self._host: Host | None = None
        self.pool = StagingPool()
        self._tag = 0
        self._global_ranks = [
            int(distributed.get_global_rank(process_group, rank)) for rank in range(self.world_size)
        ]

    def meet(self, *, shares_memory: bool, timeout_s: float) -> None:
        """Agree on a tag for messages of this object, and find out whether its ranks can share memory. Collective.

        Args:
            shares_memory: Pass data through shared memory, if all ranks ask for it and run on one host.
            timeout_s: Seconds to wait for another rank there.
        """
        tag = int.from_bytes(os.urandom(NUM_TAG_BYTES), "little")
        host = self._make_host(timeout_s) if shares_memory else None
        introductions = self.all_gather_object((tag, None if host is None else host.card))
        self._tag = introductions[0][0]
        cards = [card for _, card in introductions]
        if host is None or None in cards or not host.open(cards):
            host = None
        can_share = self.all_gather_ints([int(host is not None)])
        if host is not None and all(can for (can,) in can_share):
            host.begin()
            self._host, self.pool = host, host.pool

    def _make_host(self, timeout_s: float) -> Host | None:
        try:
            return Host(self._framework, self.rank, self._peers, timeout_s=timeout_s)
        except (OSError, AttributeError) as error:
            logger.info("this system shares no memory: %s", error)
            return None

    @property
    def process_group(self) -> Any:
        """The framework's process group."""
        return alive(self._process_group)

    @property
    def _control(self) -> Any:
        return alive(self._control_group)

    is_first_replica = True

    @property
    def num_members(self) -> int:
        """The ranks of the group."""
        return self.world_size

    @property
    def shares_memory(self) -> bool:
        """If all ranks are on one host, and were asked to."""
        return self._host is not None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def rank_of(self, member: int) -> int:
        """The member's number is its rank."""
        return member

    @property
    def _peers(self) -> list[int]:
        """The other ranks, each rank starting with the one after it, so that they do not all turn to the same one."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def broadcast(self, tensor: Tensor) -> Pending:
        """Launch one broadcast of the tensor's bytes, which every backend can send whatever the dtype."""
        group = self._control if tensor.device.type == "cpu" else self.process_group
        return self._launch_broadcast(tensor, src=0, group=group)

    def all_gather(self, sections: Mapping[int, Tensor]) -> Pending:
        """Launch sends and receives on the CPU; elsewhere one all-gather in place, or a broadcast per section."""
        tensors = list(sections.values())
        if all(tensor.device.type == "cpu" for tensor in tensors):
            if self._host is not None:
                return self._host.all_gather(sections)
            mine = [sections[self.rank]] if self.rank in sections else []
            sends = [self.send(tensor, dst=peer) for tensor in mine for peer in self._peers]
            receives = [self.recv(sections[r], src=r) for r in self._peers if r in sections]
            return Pending([*sends, *receives])
        flat = _joined([sections[rank] for rank in sorted(sections)])
        if len(sections) == self.world_size and flat is not None:
            work = self._distributed.all_gather_into_tensor(
                self._bytes(flat),
                self._bytes(sections[self.rank]),
                group=self.process_group,
                async_op=True,
            )
            return Pending([work], [flat])
        return Pending(
            [
                self._launch_broadcast(tensor, src=rank, group=self.process_group)
                for rank, tensor in sorted(sections.items())
            ]
        )

    def reduce_scatter(
        self,
        parts: Sequence[Tensor],
        *,
        out: Tensor,
        scratch: Sequence[Tensor],
        scale: float = 1.0,
        adds: bool = False,
    ) -> Pending:
        """Launch sends and receives on the CPU, the backend's own collectives elsewhere."""
        if out.device.type != "cpu":
            return self._reduce_scatter_natively(
                parts, out=out, scratch=scratch, scale=scale, adds=adds
            )
        if self._host is not None:
            return self._host.reduce_scatter(
                parts, out=out, scratch=scratch, scale=scale, adds=adds
            )
        spare = list(scratch)
        is_direct = not adds and out.dtype == parts[0].dtype
        received = {self.rank: parts[self.rank]}
        if is_direct:
            received[min(self._peers)] = out
        for peer in self._peers:
            if peer not in received:
                received[peer] = spare.pop()
        sends = [self.send(parts[p], dst=p) for p in reversed(self._peers) if parts[p].numel()]
        receives = [self.recv(received[p], src=p) for p in self._peers if out.numel()]
        in_order = [received[rank] for rank in range(self.world_size)]
        return Pending(
            [*sends, *receives],
            [out, *parts],
            lambda: add_up(in_order, out=out, scale=scale, adds=adds),
        )

    def num_scratch(self, device_type: str, *, adds: bool, casts: bool) -> int:
        """One per received part that does not go straight to its place."""
        if self._host is not None and device_type == "cpu":
            return self._host.num_scratch(adds=adds and not casts)
        if device_type == "cpu":
            return self.world_size - (1 if adds or casts else 2)
        return self.world_size if casts else int(adds)

    def reduce_over_replicas(self, tensor: Tensor) -> None:
        """Leave ``tensor`` as it is: there are none."""

    def broadcast_to_replicas(self, tensor: Tensor) -> None:
        """Leave ``tensor`` as it is: there are none."""

    def _reduce_scatter_natively(
        self,
        parts: Sequence[Tensor],
        *,
        out: Tensor,
        scratch: Sequence[Tensor],
        scale: float,
        adds: bool,
    ) -> Pending:
        """On flat tensors where parts are equal; by all-to-all where the sum is to have another dtype than the wire."""
        options = {"group": self.process_group, "async_op": True}
        if out.dtype != parts[0].dtype:
            work = self._distributed.all_to_all(list(scratch), list(parts), **options)
            summed = list(scratch)
            return Pending(
                [work], [*parts, *scratch], lambda: add_up(summed, out=out, scale=scale, adds=adds)
            )
        target = scratch[0] if adds else out
        flat = _joined(parts)
        if flat is not None:
            work = self._distributed.reduce_scatter_tensor(target, flat, **options)
        else:
            work = self._distributed.reduce_scatter(target, list(parts), **options)

        def finish() -> None:
            if scale != 1.0:
                target.mul_(scale)
            if adds:
                out.add_(target)

        return Pending([work], [target, *parts], finish)

    def send(self, tensor: Tensor, *, dst: int) -> Pending:
        """Launch one point-to-point send of the tensor's bytes."""
        wire = self._bytes(tensor)
        work = self._distributed.isend(
            wire, dst=self._global_ranks[dst], group=self._control, tag=self._tag
        )
        return Pending([work], [wire])

    def recv(self, tensor: Tensor, *, src: int) -> Pending:
        """Launch the receive that matches a ``send``."""
        wire = self._bytes(tensor)
        work = self._distributed.irecv(
            wire, src=self._global_ranks[src], group=self._control, tag=self._tag
        )
        return Pending([work], [wire])

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Run one all-reduce."""
        group = self._control if tensor.device.type == "cpu" else self.process_group
        operators = self._distributed.ReduceOp
        operator = operators.MAX if maximum else operators.SUM
        self._distributed.all_reduce(tensor, op=operator, group=group)

    def launch_all_gather_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Launch messages on the host, or one all-gather of a small CPU tensor."""
        if self._host is not None and self._host.can_gather_ints(len(values)):
            return self._host.launch_all_gather_ints(values)
        mine = self._framework.tensor(list(values), dtype=self._framework.int64)
        everyone = [self._framework.empty_like(mine) for _ in range(self.world_size)]
        work = self._distributed.all_gather(everyone, mine, group=self._control, async_op=True)
        pending = Pending([work], [mine, *everyone])

        def wait() -> list[list[int]]:
            pending.wait()
            return [[int(value) for value in theirs.tolist()] for theirs in everyone]

        return wait

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Launch it and wait."""
        return self.launch_all_gather_ints(values)()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Pickle and gather; for small metadata and on the way to an exception only."""
        everyone: list[Any] = [None] * self.world_size
        self._distributed.all_gather_object(everyone, value, group=self._control)
        return everyone

    def _launch_broadcast(self, tensor: Tensor, *, src: int, group: Any) -> Pending:
        wire = self._bytes(tensor)
        work = self._distributed.broadcast(
            wire, src=self._global_ranks[src], group=group, async_op=True
        )
        return Pending([work], [wire])

    def _bytes(self, tensor: Tensor) -> Tensor:
        return tensor.view(self._framework.uint8)


def _joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """The flat tensor that equal tensors make up, if they lie side by side in memory in this order."""
    first, numel = tensors[0], tensors[0].numel()
    nbytes = numel * first.element_size()
    memory = first.untyped_storage().data_ptr()
    for position, tensor in enumerate(tensors):
        is_next = tensor.data_ptr() == first.data_ptr() + position * nbytes
        if tensor.numel() != numel or not is_next:
            return None
        if tensor.untyped_storage().data_ptr() != memory:
            return None  # allocations that happen to touch
    return first.as_strided((len(tensors) * numel,), (1,), first.storage_offset())
