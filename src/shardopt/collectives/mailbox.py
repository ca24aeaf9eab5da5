"""Small messages between processes of one host, in order for each pair, over pipes.

A message wakes the process that waits for it and nobody else, where gloo sends three and wakes a thread on either side.
That a peer has gone is noticed at once.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from multiprocessing.connection import Connection

MAX_INTS = 1024
"""In one message: far less than a pipe holds, 64 KiB on Linux, since a writer must not wait for a reader who writes, too."""

INT64 = "q"


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
        self._timeout_s = timeout_s
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
        self._outboxes[peer] = Connection(os.open(path, os.O_WRONLY | os.O_CLOEXEC), readable=False)

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
        try:
            self._outboxes[peer].send_bytes(array(INT64, values))
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
            try:
                message = inbox.connection.recv_bytes()
            except EOFError:
                raise _gone(peer) from None
            inbox.num_arrived += 1
            inbox.unread[inbox.num_arrived] = array(INT64, message)
        return inbox.unread.pop(number)


class _Inbox:
    """What came from one peer."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.num_expected = 0
        self.num_arrived = 0
        self.unread: dict[int, Sequence[int]] = {}


def _gone(peer: int) -> RuntimeError:
    return RuntimeError(f"rank {peer} has ended, so nothing can be exchanged with it any more")
