"""What ``param.grad`` is while the gradient is being reduced, or waits to be.

Note [Sharded gradients]: between backward and ``step()`` ``param.grad`` is a placeholder of the parameter's shape (where
the framework can make one). What clips or unscales gradients acts through it on this rank's part of the average, after
all ranks together have finalized what is left to reduce; anything else raises. Before autograd accumulates into
``param.grad``, the placeholder makes room. A placeholder that has vanished was dropped by the user,
``module.zero_grad()`` say, and what it stood for is dropped with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.frameworks import Autograd
from shardopt.gradients.reducer import GradientReducer

if TYPE_CHECKING:
    from torch import Tensor


class GradientPlaceholders:
    """``param.grad`` of all parameters, and the gradients of this rank that are carried beside it, unreduced."""

    def __init__(
        self,
        params: Sequence[Tensor],
        reducer: GradientReducer,
        owned: Callable[[int], Tensor | None],
        autograd: Autograd | None,
    ) -> None:
        """Bind the pieces.

        Args:
            params: All parameters; may grow.
            reducer: Told what was dropped.
            owned: Returns this rank's part of a parameter's reduced gradient, None where it has none.
            autograd: Makes placeholders; None where the framework has none: then gradients wait in ``param.grad``.
        """
        self._params = params
        self._reducer = reducer
        self._owned = owned
        self._autograd = autograd
        self._made: dict[int, Any] = {}
        self._shown: set[int] = set()
        self._carried: dict[int, Tensor] = {}

    def is_shown(self, index: int) -> bool:
        """Whether ``param.grad`` is a placeholder, or was when it was last looked at."""
        return index in self._shown

    def carried(self, index: int) -> Tensor | None:
        """This rank's own gradient that a placeholder stands for."""
        return self._carried.get(index)

    def show(self, index: int, *, source: Any) -> None:
        """Let ``param.grad`` be the placeholder, unless something was assigned to it by hand.

        ``source`` answers for the gradient: its part on this rank, and its norm.
        """
        if self._autograd is not None and self._params[index].grad is None:
            if index not in self._made:
                self._made[index] = self._autograd.placeholder(self._params[index], source, index)
            self._params[index].grad = self._made[index]
            self._shown.add(index)

    def carry(self, index: int, gradient: Tensor, *, source: Any) -> None:
        """Keep a gradient that no round takes, and show the placeholder."""
        self._carried[index] = gradient
        self._params[index].grad = None
        self.show(index, source=source)

    def make_room(self, index: int) -> None:
        """Let autograd accumulate into what is carried, if anything is."""
        self._check(index)
        if index in self._shown:
            self._shown.remove(index)
            self._params[index].grad = self._carried.pop(index, None)

    def hide(self, index: int) -> None:
        """Let ``param.grad`` be None where it was the placeholder."""
        if index in self._shown:
            self._shown.remove(index)
            self._params[index].grad = None

    def take(self, index: int) -> Tensor | None:
        """Hand over this rank's gradient that no round has taken: carried, or in ``param.grad``."""
        self._check(index)
        if index in self._carried or index in self._shown:
            return self._carried.pop(index, None)
        param = self._params[index]
        gradient = param.grad
        if gradient is None or gradient.is_sparse:
            return None
        param.grad = None
        return gradient

    def late(self) -> dict[int, Tensor]:
        """This rank's gradients that no round has taken, by parameter; they stay where they are."""
        for index in list(self._shown):
            self._check(index)
        late = dict(self._carried)
        for index, param in enumerate(self._params):
            if param.grad is not None and index not in self._shown and not param.grad.is_sparse:
                late[index] = param.grad.detach()
        return late

    def give_up_late(self, late: Sequence[int]) -> None:
        """Let go of what ``late`` returned."""
        self._carried.clear()
        for index in late:
            self._params[index].grad = None

    def clear(self) -> None:
        """Drop everything: all gradients are None."""
        self._carried.clear()
        self._shown.clear()
        for param in self._params:
            param.grad = None

    def _check(self, index: int) -> None:
        """Drop a gradient whose placeholder has vanished."""
        if index in self._shown and self._params[index].grad is not self._made[index]:
            self._shown.remove(index)
            if self._carried.pop(index, None) is None:
                self._reducer.drop(index, self._owned(index))
