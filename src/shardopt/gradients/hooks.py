"""What arrives from backward: hooks on parameters take each gradient as autograd has accumulated it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardopt.frameworks import Autograd
from shardopt.gradients.finalizer import GradientFinalizer
from shardopt.gradients.placeholders import GradientPlaceholders

if TYPE_CHECKING:
    from torch import Tensor


class BackwardHooks:
    """Gives gradients to the round of their backward, or lets them wait."""

    def __init__(
        self,
        finalizer: GradientFinalizer,
        placeholders: GradientPlaceholders,
        *,
        params: Sequence[Tensor],
        bucket_of: Mapping[int, int],
        autograd: Autograd | None,
        is_paused: Callable[[], bool],
    ) -> None:
        """Bind the pieces, and watch the parameters.

        Args:
            finalizer: Opens and closes rounds.
            placeholders: Keep ``param.grad`` in order.
            params: All parameters; may grow.
            bucket_of: The number of the bucket that each lies in; may grow.
            autograd: None where the framework's cannot be watched: then all gradients wait in ``param.grad``.
            is_paused: Whether gradients are to wait, beyond ``no_sync()``.
        """
        self._finalizer = finalizer
        self._placeholders = placeholders
        self._params = params
        self._bucket_of = bucket_of
        self._autograd = autograd
        self._is_paused = is_paused
        self._num_pauses = 0
        self._watched: set[int] = set()
        self.watch()

    def watch(self) -> None:
        """Watch all parameters that are trained by now and were not before."""
        if self._autograd is None:
            return
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._watched and index in self._bucket_of:
                before, after = _hooks(weakref.ref(self), index)
                self._autograd.watch(param, before, after)
                self._watched.add(index)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let gradients add up in ``param.grad`` within the block."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def before(self, index: int) -> None:
        """Make room for a gradient that is about to be accumulated."""
        if self._placeholders.is_shown(index):
            with self._finalizer.lock:
                self._placeholders.make_room(index)

    def after(self, index: int) -> None:
        """Take the gradient that was accumulated. Collective, bucket by bucket."""
        with self._finalizer.lock:
            param = self._params[index]
            gradient = param.grad
            if gradient is None or gradient.is_sparse:
                return
            self._finalizer.reopen()
            if self._num_pauses or self._is_paused():
                self._placeholders.carry(index, gradient, source=self._finalizer)
                return
            assert self._autograd is not None
            self._finalizer.begin(self._autograd.at_end_of_backward)
            param.grad = None
            if not self._finalizer.take(index, gradient):
                self._placeholders.carry(index, gradient, source=self._finalizer)


def _hooks(
    hooks: weakref.ref[BackwardHooks], index: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What a parameter calls before and after accumulation; it outlives its optimizer, so does not keep it."""

    def before() -> None:
        alive = hooks()
        if alive is not None:
            alive.before(index)

    def after() -> None:
        alive = hooks()
        if alive is not None:
            alive.after(index)

    return before, after
