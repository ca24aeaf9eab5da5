"""Count what leaves this rank, by wrapping the functions of ``torch.distributed`` that the library calls.

What is announced to a peer in shared memory counts as the message that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardopt.collectives.host import Arrival, Host


@dataclass
class Traffic:
    """Messages as (kind, nbytes); a broadcast counts where it is sent from."""

    messages: list[tuple[str, int]] = field(default_factory=list)
    num_broadcasts: int = 0

    def nbytes(self, *kinds: str) -> int:
        return sum(nbytes for kind, nbytes in self.messages if kind in kinds)

    def count(self, kind: str) -> int:
        return sum(k == kind for k, _ in self.messages)


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count until the end of the block."""
    traffic = Traffic()

    def wrap(kind: str) -> Any:
        function = getattr(dist, kind)

        def counting(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if kind == "broadcast":
                traffic.num_broadcasts += 1
            if kind != "broadcast" or kwargs["src"] == dist.get_rank():
                payload = args[0] if kind == "all_gather" else tensor
                traffic.messages.append((kind, getattr(payload, "nbytes", 0)))
            return function(tensor, *args, **kwargs)

        return mock.patch.object(dist, kind, counting)

    def announce(host: Host, tensors: Mapping[int, Any]) -> None:
        traffic.messages.extend(("isend", tensor.nbytes) for tensor in tensors.values())
        originals["_announce"](host, tensors)

    def read(arrival: Arrival, *, like: Any) -> Any:
        traffic.messages.append(("irecv", like.nbytes))
        return read_where_it_lies(arrival, like=like)

    def gather(host: Host, values: Sequence[int]) -> Any:
        traffic.messages.append(("all_gather", 8 * len(values)))
        return originals["launch_all_gather_ints"](host, values)

    counting = {"_announce": announce, "launch_all_gather_ints": gather}
    originals = {name: getattr(Host, name) for name in counting}
    read_where_it_lies = Arrival.read
    kinds = ("broadcast", "isend", "irecv", "all_gather", "all_reduce", "all_gather_object")
    patches = [wrap(kind) for kind in kinds]
    patches += [mock.patch.object(Host, name, function) for name, function in counting.items()]
    patches.append(mock.patch.object(Arrival, "read", read))
    for patch in patches:
        patch.start()
    try:
        yield traffic
    finally:
        for patch in patches:
            patch.stop()
