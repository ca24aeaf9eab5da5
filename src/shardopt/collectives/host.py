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
    the training for the cores. Here what a rank sends lies in memory that its peers can read; a message of three integers
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
        self._file.bind(memory, flat.data_ptr())
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
        if self._rank in sections:
            self._announce(dict.fromkeys(self._others, sections[self._rank]))
        arrivals = {r: self._expect(sections[r], src=r) for r in self._others if r in sections}

        def finish() -> None:
            for rank, arrival in arrivals.items():
                sections[rank].copy_(arrival.read())
                arrival.release()

        return Pending(list(arrivals.values()), then=finish)

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
        self._announce({peer: parts[peer] for peer in self._others if parts[peer].numel()})
        mine = parts[self._rank]
        arrivals = {p: self._expect(mine, src=p) for p in self._others if out.numel()}

        def finish() -> None:
            if arrivals:
                by_rank = {self._rank: mine, **{p: a.read() for p, a in arrivals.items()}}
                add_up(
                    [by_rank[rank] for rank in range(self._world_size)],
                    out=out,
                    scale=scale,
                    adds=adds,
                    total=[*scratch, mine][0],
                    add=self._framework.add,
                )
            for arrival in arrivals.values():
                arrival.release()

        return Pending(list(arrivals.values()), [out, *parts], finish)

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
            return [list(by_rank[rank]) for rank in range(self._world_size)]

        return wait

    def _announce(self, tensors: Mapping[int, Tensor]) -> None:
        """Tell each rank where the tensor lies that it is to read; those that lie elsewhere are copied."""
        copies: dict[int, Tensor] = {}
        for rank, tensor in tensors.items():
            address = tensor.data_ptr()
            place = self._file.find(address)
            if place is None:
                if address not in copies:
                    copies[address] = self.pool.take(tensor.numel(), like=tensor)
                    copies[address].narrow(0, 0, tensor.numel()).copy_(tensor)
                address = copies[address].data_ptr()
                place = self._file.find(address)
            assert place is not None
            self._file.note_sent(address, rank=rank)
            self._mailbox.post(rank, place)
        for copy in copies.values():
            self.pool.give_back(copy)  # which nobody takes before it has been read

    def _expect(self, like: Tensor, *, src: int) -> Arrival:
        number = self._mailbox.expect(src)
        return Arrival(
            self._framework, self._mailbox, number, peer=src, file=self._peers[src], like=like
        )


class Arrival:
    """A tensor that a peer announces, to be read where it lies."""

    def __init__(
        self,
        framework: Any,
        mailbox: Mailbox,
        number: int,
        *,
        peer: int,
        file: PeerFile,
        like: Tensor,
    ) -> None:
        """Wait for message ``number`` of ``peer``; what it announces has numel and dtype of ``like``."""
        self._framework = framework
        self._mailbox = mailbox
        self._number = number
        self._peer = peer
        self._file = file
        self._like = like
        self._place: Place | None = None

    def wait(self) -> None:
        """Wait for the announcement."""
        self._place = Place(*self._mailbox.take(self._peer, self._number))

    def read(self) -> Tensor:
        """The peer's memory; not to be written to, and not to be read after ``release``."""
        assert self._place is not None
        tensor: Tensor = self._framework.frombuffer(
            self._file.memory(self._place),
            dtype=self._like.dtype,
            count=self._like.numel(),
            offset=self._place.start,
        )
        return tensor

    def release(self) -> None:
        """Let the peer write there again."""
        assert self._place is not None
        self._file.mark_read(self._place)
