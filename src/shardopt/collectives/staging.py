"""Memory for what travels, used again and again, so that fresh memory is touched once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def new_memory(numel: int, like: Any) -> Any:
    """(numel,) memory of the dtype and device of ``like``."""
    return like.detach().new_empty((numel,))


class StagingPool:
    """Flat tensors that are taken for one bucket and given back."""

    def __init__(
        self,
        make: Callable[[int, Any], Any] = new_memory,
        is_idle: Callable[[Any], bool] = lambda tensor: True,
    ) -> None:
        """Start with nothing.

        Args:
            make: Makes a tensor of some numel like another one.
            is_idle: Whether one that was given back may be written to again.
        """
        self._make = make
        self._is_idle = is_idle
        self._free: dict[tuple[str, str], list[Tensor]] = {}
        self._expected: dict[tuple[str, str], int] = {}

    def expect(self, numel: int, *, like: Tensor) -> None:
        """Announce the largest size that will be taken, so that every buffer is made that large at once."""
        kind = str(like.dtype), str(like.device)
        self._expected[kind] = max(numel, self._expected.get(kind, 0))

    def take(self, numel: int, *, like: Tensor) -> Tensor:
        """Return a (capacity,) tensor, capacity at least ``numel``, of the dtype and device of ``like``."""
        kind = str(like.dtype), str(like.device)
        free = self._free.setdefault(kind, [])
        idle = [n for n in reversed(range(len(free))) if self._is_idle(free[n])]  # last used first
        fitting = [n for n in idle if free[n].numel() >= numel]
        if fitting:
            return free.pop(min(fitting, key=lambda n: free[n].numel()))
        if idle:  # make room for the larger one: as many are held as were ever in use at once
            free.pop(max(idle, key=lambda n: free[n].numel()))
        made: Tensor = self._make(max(numel, self._expected.get(kind, 0)), like)
        return made

    def give_back(self, tensor: Tensor) -> None:
        """Take a tensor back that ``take`` returned."""
        self._free[str(tensor.dtype), str(tensor.device)].append(tensor)

    @property
    def nbytes(self) -> int:
        """Bytes held for reuse."""
        return sum(t.numel() * t.element_size() for free in self._free.values() for t in free)
