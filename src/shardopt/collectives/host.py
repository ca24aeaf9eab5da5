"""Ranks of one host: what one sends, the others read where it lies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shardopt.collectives.group import Pending, add_up
from shardopt.collectives.mailbox import MAX_INTS, Mailbox
from shardopt.collectives.shared_file import Address, PeerFile, Place, SharedFile
from shardopt.collectives.staging import StagingPool, new_memory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Card(NamedTuple):
    """What a rank tells the others of itself."""

    address: Address
    entrances: dict[int, int]


class Host:
    """All ranks of a group, if they run on one host, on its CPUs.

    Note [Shared memory]: over loopback each byte is copied into the kernel and out again, by threads that compete with
    the training for the cores. Here what a rank sends lies in memory that its peers can read; a message of four integers
    says where, and orders the reading after the writing. A receiver adds up, or copies, straight from there. Whether all
    have read is seen in memory, so a sender never waits for that: memory that is still being read is not used again yet.
    """

    def __init__(
        self, framework: Any, rank: int, others: Sequence[int], *, timeout_s: float
    ) -> None:
        """Make this rank's file and pipes.

        Args:
            framework: Makes tensors.
            rank: This rank.
            others: The other ranks, in the order in which they are turned to.
            timeout_s: Seconds to wait for another rank.

        Raises:
            OSError, AttributeError: This system cannot, or has no more files to give.
        """
        self._framework = framework
        self._rank = rank
        self._others = list(others)
        self._world_size = len(self._others) + 1
        self._file = SharedFile(self._world_size)
        self._mailbox = Mailbox(self._others, timeout_s=timeout_s)
        self._peers: dict[int, PeerFile] = {}
        self.pool = StagingPool(self._new_buffer, self._is_read)
        self.card = Card(self._file.address, self._mailbox.entrances)

    def open(self, cards: Sequence[Card]) -> bool:
        """Open the files and pipes of all other ranks; False if one is on another host, or keeps its files to itself."""
        try:
            for peer in self._others:
                address, entrances = cards[peer]
                self._peers[peer] = PeerFile(address, rank=self._rank, world_size=self._world_size)
                self._mailbox.open(peer, pid=address.pid, entrance=entrances[self._rank])
        except OSError as error:
            logger.info("memory is not shared: %s", error)
            return False
        return True

    def begin(self) -> None:
        """Go on, once all ranks have opened what they need."""
        self._mailbox.close_entrances()

    # --- Memory -----------------------------------------------------------------------------------------------

    def _new_buffer(self, numel: int, like: Tensor) -> Tensor:
        if like.device.type != "cpu":
            made: Tensor = new_memory(numel, like)
            return made
        nbytes = max(1, numel) * int(like.element_size())
        memory = self._file.new_piece(nbytes)
        flat = self._framework.frombuffer(memory, dtype=self._framework.uint8, count=nbytes)
        buffer: Tensor = flat.view(like.dtype)
        return buffer.narrow(0, 0, numel)

    def _is_read(self, buffer: Tensor) -> bool:
        return self._file.is_read(buffer.data_ptr())

    # --- Collectives ------------------------------------------------------------------------------------------

    def num_scratch(self, *, adds: bool) -> int:
        """One for the sum, where it is added to another and this rank's own part is not among the first two."""
        return int(adds and self._rank > 1)

    def all_gather(self, sections: Mapping[int, Tensor]) -> Pending:
        """Launch it, as ``Group.all_gather``."""
        arrivals = self._expect()
        mine = sections.get(self._rank)
        self._announce({} if mine is None else dict.fromkeys(self._others, mine))

        def finish(arrived: Mapping[int, Arrival]) -> None:
            for rank, section in sections.items():
                if rank != self._rank:
                    section.copy_(arrived[rank].read(like=section))

        return self._pending(arrivals, finish)

    def reduce_scatter(
        self,
        parts: Sequence[Tensor],
        *,
        out: Tensor,
        scratch: Sequence[Tensor],
        scale: float,
        adds: bool,
    ) -> Pending:
        """Launch it, as ``Group.reduce_scatter``."""
        arrivals = self._expect()
        self._announce({peer: parts[peer] for peer in self._others if parts[peer].numel()})
        mine = parts[self._rank]

        def finish(arrived: Mapping[int, Arrival]) -> None:
            if out.numel():
                by_rank = {p: arrival.read(like=mine) for p, arrival in arrived.items()}
                by_rank[self._rank] = mine
                add_up(
                    [by_rank[rank] for rank in range(self._world_size)],
                    out=out,
                    scale=scale,
                    adds=adds,
                    total=[*scratch, mine][0],
                    add=self._framework.add,
                )

        return self._pending(arrivals, finish)

    def can_gather_ints(self, num: int) -> bool:
        """Whether as many fit into one message."""
        return num <= MAX_INTS

    def launch_all_gather_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Launch it, as ``Group.launch_all_gather_ints``."""
        for peer in self._others:
            self._mailbox.post(peer, values)
        numbers = {peer: self._mailbox.expect(peer) for peer in self._others}

        def wait() -> list[list[int]]:
            by_rank = {peer: self._mailbox.take(peer, n) for peer, n in numbers.items()}
            by_rank[self._rank] = values
            if wrong := [peer for peer, theirs in by_rank.items() if len(theirs) != len(values)]:
                raise _out_of_step(wrong[0])
            return [list(by_rank[rank]) for rank in range(self._world_size)]

        return wait

    def _announce(self, tensors: Mapping[int, Tensor]) -> None:
        """Tell every rank where the tensor lies that it is to read, or that there is none.

        Tensors that lie elsewhere are copied, one after the other, into one piece. Every rank is told, so that none can run
        ahead of those that have nothing to send to it.
        """
        outside = {id(t): t for t in tensors.values() if self._file.find(t.data_ptr()) is None}
        copies: dict[int, Tensor] = {}
        memory = None
        if outside:
            like, start = next(iter(outside.values())), 0
            memory = self.pool.take(sum(t.numel() for t in outside.values()), like=like)
            for key, tensor in outside.items():
                copies[key] = memory.narrow(0, start, tensor.numel())
                copies[key].copy_(tensor)
                start += tensor.numel()
        for rank in self._others:
            message: Sequence[int] = ()
            if rank in tensors:
                address = copies.get(id(tensors[rank]), tensors[rank]).data_ptr()
                place = self._file.find(address)
                assert place is not None
                self._file.note_sent(address, rank=rank)
                message = place
            self._mailbox.post(rank, message)
        if memory is not None:
            self.pool.give_back(memory)  # which nobody takes before it has been read

    def _expect(self) -> dict[int, Arrival]:
        """What all other ranks are to announce next."""
        return {
            peer: Arrival(self._framework, self._mailbox, peer, self._peers[peer])
            for peer in self._others
        }

    def _pending(
        self, arrivals: Mapping[int, Arrival], finish: Callable[[Mapping[int, Arrival]], None]
    ) -> Pending:
        def read() -> None:
            try:
                finish(arrivals)
            finally:
                for arrival in arrivals.values():
                    arrival.release()

        return Pending(list(arrivals.values()), then=read)


class Arrival:
    """The next announcement of a peer: a tensor to be read where it lies, or that there is none."""

    def __init__(self, framework: Any, mailbox: Mailbox, peer: int, file: PeerFile) -> None:
        """Expect it."""
        self._framework = framework
        self._mailbox = mailbox
        self._number = mailbox.expect(peer)
        self._peer = peer
        self._file = file
        self._place: Place | None = None

    def wait(self) -> None:
        """Wait for the announcement.

        Raises:
            RuntimeError: It is none; or the peer has gone.
        """
        message = self._mailbox.take(self._peer, self._number)
        if len(message) not in (0, len(Place._fields)):
            raise _out_of_step(self._peer)
        self._place = Place(*message) if message else None

    def read(self, *, like: Tensor) -> Tensor:
        """The peer's memory, of numel and dtype of ``like``; not to be written to, or to be read after ``release``.

        Raises:
            RuntimeError: There is none.
        """
        if self._place is None:
            raise _out_of_step(self._peer)
        tensor: Tensor = self._framework.frombuffer(
            self._file.memory(self._place),
            dtype=like.dtype,
            count=like.numel(),
            offset=self._place.start,
        )
        return tensor

    def release(self) -> None:
        """Let the peer write there again."""
        if self._place is not None:
            self._file.mark_read(self._place)


def _out_of_step(peer: int) -> RuntimeError:
    return RuntimeError(
        f"rank {peer} exchanges something else than this rank does; every rank has to make the same calls of the optimizer, "
        "in the same order (to read the norm of a sharded gradient is such a call)"
    )
