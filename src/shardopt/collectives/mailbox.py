"""Small messages between processes of one host, in order for each pair, over pipes.

A message wakes the process that waits for it and nobody else, where gloo sends three and wakes a thread on either side.
That a peer has gone is noticed at once.
"""

from __future__ import annotations

import os
import select
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection

MAX_INTS = 500
"""In one message: with their header less than 4096 bytes, which a pipe takes at once or not at all."""

INT64 = "q"
MAX_TIMEOUT_S = 10 * 86_400.0
"""What the system's milliseconds have room for, about."""


class Mailbox:
    """A pipe from each peer, and one to each.

    A reader says that it will read (``expect``) in the order in which the peer posts; it may wait for messages in any
    order.
    """

    def __init__(self, peers: Sequence[int], *, timeout_s: float) -> None:
        """Make the pipes that this process reads from.

        Args:
            peers: The other ranks.
            timeout_s: Seconds to wait for a message.

        Raises:
            OSError: Too many files are open.
        """
        self._timeout_s = min(timeout_s, MAX_TIMEOUT_S)
        self._inboxes: dict[int, _Inbox] = {}
        self._outboxes: dict[int, Connection] = {}
        self._entrances: dict[int, Connection] = {}
        for peer in peers:
            exit_, entrance = os.pipe()
            self._inboxes[peer] = _Inbox(Connection(exit_, writable=False))
            self._entrances[peer] = Connection(entrance, readable=False)

    @property
    def entrances(self) -> dict[int, int]:
        """By peer, the file descriptor, in this process, of the end that it is to write to."""
        return {peer: connection.fileno() for peer, connection in self._entrances.items()}

    def open(self, peer: int, *, pid: int, entrance: int) -> None:
        """Open the end of a peer's pipe that was made for this process.

        Raises:
            OSError: This process may not.
        """
        path = f"/proc/{pid}/fd/{entrance}"
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK
        self._outboxes[peer] = Connection(os.open(path, flags), readable=False)

    def close_entrances(self) -> None:
        """Leave the ends that peers write to to them, who have opened theirs by now: a pipe ends with its last writer."""
        for connection in self._entrances.values():
            connection.close()
        self._entrances.clear()

    def post(self, peer: int, values: Sequence[int]) -> None:
        """Send up to ``MAX_INTS`` integers, in the range of int64.

        Raises:
            RuntimeError: The peer has gone.
        """
        assert len(values) <= MAX_INTS
        message = array(INT64, values)
        while True:
            try:
                return self._outboxes[peer].send_bytes(message)
            except BlockingIOError:
                self._make_room(peer)
            except BrokenPipeError:
                raise _gone(peer) from None

    def expect(self, peer: int) -> int:
        """Return the number of the peer's next message that nobody expects yet, to be taken once."""
        inbox = self._inboxes[peer]
        inbox.num_expected += 1
        return inbox.num_expected

    def take(self, peer: int, number: int) -> Sequence[int]:
        """Wait for a message.

        Raises:
            RuntimeError: The peer has gone, or kept silent for too long.
        """
        inbox = self._inboxes[peer]
        while number not in inbox.unread:
            if not inbox.connection.poll(self._timeout_s):
                raise RuntimeError(f"rank {peer} has sent nothing for {self._timeout_s:g} s")
            self._read(peer)
        return inbox.unread.pop(number)

    def _read(self, peer: int) -> None:
        """Put the next message of a peer aside until it is taken."""
        inbox = self._inboxes[peer]
        try:
            message = inbox.connection.recv_bytes()
        except EOFError:
            raise _gone(peer) from None
        inbox.num_arrived += 1
        inbox.unread[inbox.num_arrived] = array(INT64, message)

    def _make_room(self, peer: int) -> None:
        """Wait until a peer has read from its full pipe; read meanwhile, since it may be waiting for the same."""
        poll = select.poll()
        poll.register(self._outboxes[peer], select.POLLOUT)
        readers = {inbox.connection.fileno(): source for source, inbox in self._inboxes.items()}
        for descriptor in readers:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(1e3 * self._timeout_s)
        if not ready:
            raise RuntimeError(f"rank {peer} has read nothing for {self._timeout_s:g} s")
        for descriptor, _ in ready:
            if descriptor in readers:
                self._read(readers[descriptor])


class _Inbox:
    """What came from one peer."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.num_expected = 0
        self.num_arrived = 0
        self.unread: dict[int, Sequence[int]] = {}


def _gone(peer: int) -> RuntimeError:
    return RuntimeError(f"rank {peer} has ended, so nothing can be exchanged with it any more")
