"""Count what leaves this rank, by wrapping the functions of ``torch.distributed`` that the library calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist


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

    kinds = ("broadcast", "isend", "irecv", "all_gather", "all_reduce", "all_gather_object")
    patches = [wrap(kind) for kind in kinds]
    for patch in patches:
        patch.start()
    try:
        yield traffic
    finally:
        for patch in patches:
            patch.stop()
