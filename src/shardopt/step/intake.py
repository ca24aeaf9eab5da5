"""Between autograd and the reducer: what arrives in ``param.grad``, and what is seen there.

Note [Sharded gradients]: between backward and ``step()`` ``param.grad`` is a stand-in of the parameter's shape (where the
framework can make one), for a gradient that is being reduced, or waits to be. What clips or unscales gradients acts
through it on this rank's part of the average, after all ranks together have settled what is left to reduce; anything
else raises. Before autograd accumulates into ``param.grad``, the stand-in makes room. A stand-in that has vanished was
dropped by the user, ``module.zero_grad()`` say, and what it stood for is dropped with it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from shardopt.collectives import Group
from shardopt.errors import OverlapError
from shardopt.step.backward import MSG_GRADIENTS_CHANGED
from shardopt.step.reduction import GradientReducer

if TYPE_CHECKING:
    from torch import Tensor


class Autograd(Protocol):
    """What the intake asks of a framework's autograd."""

    def watch(self, param: Tensor, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call ``before`` and ``after`` around each accumulation into ``param.grad``, as long as there is ``param``."""

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call once the backward that is under way ends well; hold ``callback`` no longer than that."""

    def stand_in(self, param: Tensor, source: Any, index: int) -> Any:
        """Make what ``param.grad`` is while the gradient is sharded; asks ``source`` for part and norm of ``index``."""


class Driver(Protocol):
    """What steps inside backward."""

    def opened(self) -> None:
        """A round has begun. Collective."""

    def closed(self) -> None:
        """It has ended. Collective."""


class GradientIntake:
    """Feeds one reducer, and keeps ``param.grad`` in order."""

    def __init__(
        self,
        group: Group,
        reducer: GradientReducer,
        *,
        params: Sequence[Tensor],
        bucket_of: Mapping[int, int],
        owned: Callable[[int], Tensor | None],
        norms: Callable[[float, Sequence[bool]], Tensor],
        autograd: Autograd | None,
        is_paused: Callable[[], bool],
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            reducer: Takes gradients.
            params: All parameters; may grow.
            bucket_of: The number of the bucket that each lies in; may grow.
            owned: Returns this rank's part of a parameter's reduced gradient, None where it has none.
            norms: Returns the p-norm of each parameter's reduced gradient, (number of parameters,), from p and which of
                them have one. Collective.
            autograd: None where the framework's cannot be watched: then all gradients wait in ``param.grad``.
            is_paused: Whether gradients are to wait, beyond ``no_sync()``.
        """
        self._group = group
        self.reducer = reducer
        self._params = params
        self._bucket_of = bucket_of
        self._owned = owned
        self._norms = norms
        self._known_norms: dict[float, Tensor] = {}
        self._autograd = autograd
        self._is_paused = is_paused
        self._num_pauses = 0
        self._lock = threading.RLock()  # devices have their own threads in backward
        self._watched: set[int] = set()
        self._stand_ins: dict[int, Any] = {}
        self._shown: set[int] = set()
        self._carried: dict[int, Tensor] = {}
        self._end: Callable[[], Any] = lambda: None
        self._is_settled = False
        self.used: list[bool] = []
        self.driver: Driver | None = None
        """Makes the step inside backward, if that is asked for."""

    # --- Inside backward --------------------------------------------------------------------------------------

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
        with self._lock:
            if index in self._shown:
                self._check(index)
            if index in self._shown:
                self._shown.remove(index)
                self._params[index].grad = self._carried.pop(index, None)

    def after(self, index: int) -> None:
        """Take the gradient that was accumulated. Collective, bucket by bucket."""
        with self._lock:
            param = self._params[index]
            gradient = param.grad
            if gradient is None or gradient.is_sparse:
                return
            self._is_settled = False
            self._known_norms.clear()
            if self._num_pauses or self._is_paused():
                self._carry(index, gradient)
                return
            if self.reducer.is_open and self._end() is None:
                self._close()  # the backward that opened this round has failed
            if not self.reducer.is_open:
                self._open()
            param.grad = None
            if not self.reducer.arrive(index, self._bucket_of[index], gradient):
                self._carry(index, gradient)

    def _open(self) -> None:
        assert self._autograd is not None
        self.reducer.open()
        if self.driver is not None:
            self.driver.opened()
        end = partial(self._close)
        self._end = weakref.ref(end)  # alive as long as the backward is
        self._autograd.at_end_of_backward(end)

    def _close(self) -> None:
        with self._lock:
            if self.reducer.is_open:
                reduced = self.reducer.close(self._take_late)
                if self.driver is not None:
                    self.driver.closed()
                for index in reduced:
                    if self._params[index].requires_grad:
                        self._show(index)

    def _take_late(self, index: int) -> Tensor | None:
        """A gradient that has not come by ``after``: it waits since before, or its parameter is not watched yet."""
        if index in self._shown:
            self._check(index)
        if index in self._carried or index in self._shown:
            return self._carried.pop(index, None)
        param = self._params[index]
        gradient = param.grad
        if gradient is None or gradient.is_sparse:
            return None
        param.grad = None
        return gradient

    def _carry(self, index: int, gradient: Tensor) -> None:
        self._carried[index] = gradient
        self._params[index].grad = None
        self._show(index)

    def _show(self, index: int) -> None:
        """Let ``param.grad`` be the stand-in, unless something was assigned to it by hand."""
        if self._autograd is not None and self._params[index].grad is None:
            if index not in self._stand_ins:
                self._stand_ins[index] = self._autograd.stand_in(self._params[index], self, index)
            self._params[index].grad = self._stand_ins[index]
            self._shown.add(index)

    def _check(self, index: int) -> None:
        """Drop a gradient whose stand-in has vanished."""
        if self._params[index].grad is not self._stand_ins[index]:
            self._shown.remove(index)
            if self._carried.pop(index, None) is None:
                self.reducer.drop(index, self._owned(index))

    # --- Before a step ----------------------------------------------------------------------------------------

    def words(self, *, has_inputs: bool = True) -> list[int]:
        """What the other ranks have to know before ``settle``. Closes a round that a failed backward left open."""
        self._close()
        left = self._left() if has_inputs else {}
        return self.reducer.words([index in left for index in range(len(self._params))])

    def settle(self, words: Sequence[Sequence[int]], *, has_inputs: bool = True) -> None:
        """Reduce what is left, as told by the ``words`` of every member. Collective."""
        left = self._left() if has_inputs else {}
        self._carried.clear()
        for index in left:
            self._params[index].grad = None
        self.used = self.reducer.settle(words, left)
        for index, is_used in enumerate(self.used):
            if index in self._bucket_of:
                if is_used:
                    self._show(index)
                elif index in self._shown:
                    self._shown.remove(index)
                    self._params[index].grad = None
        self._is_settled = True

    def complete(self) -> None:
        """Settle, unless that was done since the last backward, and wait for all reductions. Collective."""
        if self.driver is not None:
            raise OverlapError(MSG_GRADIENTS_CHANGED)
        if self._is_paused():
            raise RuntimeError(
                "gradients that are sharded cannot be clipped within Join, since ranks without inputs take no part in it"
            )
        if self.reducer.is_open and self._end() is not None:
            raise RuntimeError(
                "gradients are sharded and still being reduced in this backward; use them after it"
            )
        if not self._is_settled:
            self.settle(self._group.all_gather_ints(self.words()))
        self.reducer.complete_all()

    def waiting(self) -> list[Tensor]:
        """This rank's gradients that no round has taken, for changing them in place."""
        return list(self._left().values())

    def _left(self) -> dict[int, Tensor]:
        """This rank's gradients that no round has taken."""
        for index in list(self._shown):
            self._check(index)
        left = dict(self._carried)
        for index, param in enumerate(self._params):
            if param.grad is not None and index not in self._shown and not param.grad.is_sparse:
                left[index] = param.grad.detach()
        return left

    # --- What stand-ins ask for -------------------------------------------------------------------------------

    def part(self, index: int) -> Tensor | None:
        """This rank's part of the averaged gradient, to be changed; None where it owns nothing. Collective.

        Within Join, where gradients wait for ``step()``, it is this rank's own gradient.
        """
        if self._is_paused():
            return self._carried.get(index)
        self.complete()
        self._known_norms.clear()
        return self._owned(index)

    def norm(self, index: int, norm_type: float) -> Tensor:
        """The p-norm of the averaged gradient, 0-dim, equal on all ranks. Collective."""
        self.complete()
        if norm_type not in self._known_norms:
            self._known_norms[norm_type] = self._norms(norm_type, self.used)
        return self._known_norms[norm_type][index]

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over ranks; leave it, within Join. Collective."""
        if not self._is_paused():
            self._group.all_reduce(tensor, maximum=True)

    # --- Forgetting -------------------------------------------------------------------------------------------

    def forget(self, *, after_step: bool) -> None:
        """Drop all gradients, reduced or not. Local."""
        self._close()
        if after_step and self.used:
            self.reducer.fall_asleep(self.used)
        self.reducer.forget()
        if after_step:
            self.reducer.num_dropped = 0
        self._carried.clear()
        self._shown.clear()
        self._known_norms.clear()
        for param in self._params:
            param.grad = None
        self._is_settled = False
        self.watch()


def _hooks(
    intake: weakref.ref[GradientIntake], index: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What a parameter calls before and after accumulation; it outlives its optimizer, so does not keep it."""

    def before() -> None:
        alive = intake()
        if alive is not None and index in alive._shown:
            alive.before(index)

    def after() -> None:
        alive = intake()
        if alive is not None:
            alive.after(index)

    return before, after
