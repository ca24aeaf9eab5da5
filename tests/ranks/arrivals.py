"""Let nothing arrive before it is waited for, so that a wait that is missing is seen, and not hidden by luck."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


class _Late:
    """Receives elsewhere, and brings what came to its place in ``wait()``."""

    def __init__(self, work: Any, received: Tensor, place: Tensor) -> None:
        self._work = work
        self._received = received
        self._place = place

    def wait(self) -> None:
        self._work.wait()
        self._place.copy_(self._received)


@contextmanager
def arriving_when_awaited() -> Iterator[None]:
    """Until the end of the block, for what is received point to point."""
    receive = dist.irecv

    def receive_late(tensor: Tensor, *args: Any, **kwargs: Any) -> _Late:
        received = torch.empty_like(tensor)
        return _Late(receive(received, *args, **kwargs), received, tensor)

    with mock.patch.object(dist, "irecv", receive_late):
        yield
