"""What this room asks of the memory that buckets travel in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Pool(Protocol):
    """Flat tensors that are taken for one bucket and given back."""

    def expect(self, numel: int, *, like: Tensor) -> None:
        """Announce the largest size that will be taken."""

    def take(self, numel: int, *, like: Tensor) -> Tensor:
        """Return a (capacity,) tensor, capacity at least ``numel``, of the dtype and device of ``like``."""

    def give_back(self, tensor: Tensor) -> None:
        """Take a tensor back that ``take`` returned."""
