"""From the end of a backward to the step: what is left is reduced, and all ranks know what there is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from shardopt.collectives import Group
from shardopt.errors import MSG_GRADIENTS_CHANGED, OverlapError, RankMismatchError
from shardopt.gradients.placeholders import GradientPlaceholders
from shardopt.gradients.reducer import GradientReducer, ignore
from shardopt.gradients.report import GradientReport, late_anywhere, used_anywhere

if TYPE_CHECKING:
    from torch import Tensor


class StepInBackward(Protocol):
    """What updates parameters as rounds go on; every call comes on all ranks alike."""

    def opened(self) -> None:
        """A round has begun. Collective."""

    def launched(self, number: int) -> None:
        """The reduction of a bucket was launched. Collective."""

    def closed(self, finalizer: GradientFinalizer) -> None:
        """All of the round was launched; to be finalized now. Collective."""


class GradientFinalizer:
    """Opens and closes rounds, and brings all ranks to the same gradients before they are used.

    See the diagram of states in ``docs/design.md``.
    """

    def __init__(
        self,
        group: Group,
        reducer: GradientReducer,
        placeholders: GradientPlaceholders,
        *,
        params: Sequence[Tensor],
        bucket_of: Mapping[int, int],
        owned: Callable[[int], Tensor | None],
        norms: Callable[[float, Sequence[bool]], Tensor],
        is_paused: Callable[[], bool],
        step_in_backward: StepInBackward | None = None,
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            reducer: Takes gradients and reduces them.
            placeholders: Keep ``param.grad`` in order.
            params: All parameters; may grow.
            bucket_of: The number of the bucket that each lies in; may grow.
            owned: Returns this rank's part of a parameter's reduced gradient, None where it has none.
            norms: Returns the p-norm of each parameter's reduced gradient, (number of parameters,), from p and which of
                them have one. Collective.
            is_paused: Whether gradients are to wait for ``step()``, as within ``Join``.
            step_in_backward: Makes the step inside backward, if that is asked for.
        """
        self.lock = threading.RLock()
        """Held while gradients arrive: devices have their own threads in backward."""
        self.reducer = reducer
        self._group = group
        self._placeholders = placeholders
        self._params = params
        self._bucket_of = bucket_of
        self._owned = owned
        self._norms = norms
        self._known_norms: dict[float, Tensor] = {}
        self._is_paused = is_paused
        self._step_in_backward = step_in_backward
        self._launched = ignore if step_in_backward is None else step_in_backward.launched
        self._end: Callable[[], object] = lambda: None
        self._is_final = False

    # --- A round, within backward -----------------------------------------------------------------------------

    @property
    def _is_in_backward(self) -> bool:
        """Whether the backward that opened the round is under way."""
        return self.reducer.is_open and self._end() is not None

    def begin(self, at_end: Callable[[Callable[[], None]], None]) -> None:
        """See to it that a round of the backward under way is open. Collective.

        ``at_end`` has something called when this backward ends well, and holds it no longer than that.
        """
        if self.reducer.is_open and not self._is_in_backward:
            self.close()  # the backward that opened this round has failed
        if not self.reducer.is_open:
            self.reducer.open()
            if self._step_in_backward is not None:
                self._step_in_backward.opened()
            end = partial(self.close)
            self._end = weakref.ref(end)
            at_end(end)

    def take(self, index: int, gradient: Tensor) -> bool:
        """Give a gradient to the round; False if it does not take it. Collective, bucket by bucket."""
        number = self._bucket_of[index]
        return self.reducer.arrive(index, number, gradient, launched=self._launched)

    def close(self) -> None:
        """Close the round, if one is open. Collective."""
        with self.lock:
            if self.reducer.is_open:
                reduced = self.reducer.close(self._placeholders.take, launched=self._launched)
                if self._step_in_backward is not None:
                    self._step_in_backward.closed(self)
                for index in reduced:
                    if self._params[index].requires_grad:
                        self._placeholders.show(index, source=self)

    def reopen(self) -> None:
        """Note that more gradients have come, so that what was final is no longer."""
        self._is_final = False
        self._known_norms.clear()

    # --- Before a step ----------------------------------------------------------------------------------------

    def report(self, *, has_inputs: bool = True) -> list[int]:
        """What the other ranks have to know before ``finalize``. Closes a round that a failed backward left open."""
        self.close()
        late = self._placeholders.late() if has_inputs else {}
        reducer = self.reducer
        is_late = [index in late for index in range(len(self._params))]
        return GradientReport(
            reducer.num_rounds, reducer.num_dropped, reducer.present, is_late
        ).pack()

    def read(self, reports: Sequence[Sequence[int]]) -> list[GradientReport]:
        """The reports of all members."""
        return [GradientReport.unpack(report, len(self._params)) for report in reports]

    def finalize(self, reports: Sequence[Sequence[int]], *, has_inputs: bool = True) -> None:
        """Bring all ranks to the same rounds and reduce what no round has taken. Collective.

        Args:
            reports: What every member said in ``report``.
            has_inputs: Whether this rank's own gradients count.

        Raises:
            RankMismatchError: On every rank: gradients were dropped at other times on other ranks.
        """
        read = self.read(reports)
        late = self._placeholders.late() if has_inputs else {}
        self._placeholders.give_up_late(list(late))
        while self.reducer.num_rounds < max(theirs.num_rounds for theirs in read):
            self.reducer.run_empty_round()
        self.reducer.reduce_late(late_anywhere(read), late)
        self.reducer.finalize(used_anywhere(read))
        self._require_equal_drops([theirs.num_dropped for theirs in read])
        for index in self._bucket_of:
            if self.reducer.used[index]:
                self._placeholders.show(index, source=self)
            else:
                self._placeholders.hide(index)
        self._is_final = True

    def _require_equal_drops(self, num_dropped: Sequence[int]) -> None:
        """Raise where a rank lost what another one still counts on, after an exception in one rank's backward, say.

        Everything is dropped then, on every rank, so that they can start again.
        """
        other = next((m for m, num in enumerate(num_dropped) if num != num_dropped[0]), None)
        if other is not None:
            self.reducer.forget()
            self.reducer.num_dropped = 0
            raise RankMismatchError(
                f"gradients that had been reduced were dropped {num_dropped[other]} times on rank {other} and "
                f"{num_dropped[0]} times on rank 0 since the last step, so those of this step are not complete; call "
                "zero_grad() on every rank, and run backward again"
            )

    def complete(self) -> None:
        """Finalize, unless that was done since the last backward, and wait for all reductions. Collective.

        Raises:
            OverlapError: The update has been made in backward.
            RuntimeError: Gradients cannot be used now.
        """
        if self._step_in_backward is not None:
            raise OverlapError(MSG_GRADIENTS_CHANGED)
        if self._is_paused():
            raise RuntimeError(
                "gradients that are sharded cannot be clipped within Join, since ranks without inputs take no part in it"
            )
        if self._is_in_backward:
            raise RuntimeError(
                "gradients are sharded and still being reduced in this backward; use them after it"
            )
        if not self._is_final:
            self.finalize(self._group.all_gather_ints(self.report()))
        self.reducer.complete_all()

    def waiting(self) -> list[Tensor]:
        """This rank's gradients that no round has taken, for changing them in place."""
        return list(self._placeholders.late().values())

    # --- What placeholders ask for ----------------------------------------------------------------------------

    def part(self, index: int) -> Tensor | None:
        """This rank's part of the averaged gradient, to be changed; None where it owns nothing. Collective.

        Within Join, where gradients wait for ``step()``, it is this rank's own gradient.
        """
        if self._is_paused():
            return self._placeholders.carried(index)
        self.complete()
        self._known_norms.clear()
        return self._owned(index)

    def norm(self, index: int, norm_type: float) -> Tensor:
        """The p-norm of the averaged gradient, 0-dim, equal on all ranks. Collective."""
        self.complete()
        if norm_type not in self._known_norms:
            self._known_norms[norm_type] = self._norms(norm_type, self.reducer.used)
        return self._known_norms[norm_type][index]

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over ranks; leave it, within Join. Collective."""
        if not self._is_paused():
            self._group.all_reduce(tensor, maximum=True)

    # --- Forgetting -------------------------------------------------------------------------------------------

    def forget(self, *, after_step: bool) -> None:
        """Drop all gradients, reduced or not. Local."""
        self.close()
        if after_step:
            self.reducer.fall_asleep()
        self.reducer.forget()
        if after_step:
            self.reducer.num_dropped = 0
        self._placeholders.clear()
        self.reopen()
