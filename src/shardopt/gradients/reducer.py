"""Average gradients where no DDP does, each to the rank that owns it, S * (N - 1) / N bytes per rank.

Note [Rounds]: a round is one reduction of all buckets that are awake, in one order that all ranks share. During a
backward each gradient is taken into its bucket as it is accumulated, and ``param.grad`` is emptied; a full bucket is
launched once all buckets before it in the order were. The end of backward closes the round: what is left is launched,
with zeros for what did not come. So every backward is one round, whatever came in whichever order, and the sequence
of collectives is the same on all ranks.

What a round cannot take stays in ``param.grad``, or is carried beside it: gradients computed under ``no_sync()``, of
parameters in a bucket that sleeps since nobody had a gradient for it in the last step, or assigned by hand. The
finalizer has those reduced once, in buckets that any rank has one for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from shardopt.buffers import GradientBucket
from shardopt.collectives import Finish, Group
from shardopt.partition import ParamSpec, backward_order

if TYPE_CHECKING:
    from torch import Tensor


Launched = Callable[[int], None]
"""Told the number of a bucket that a round has launched. Collective."""


def ignore(number: int) -> None:
    """Be told and do nothing."""


class GradientReducer:
    """Collects this rank's gradients and leaves it the averages of what it owns, in ``bucket.shard``.

    Knows nothing of autograd: it is told what has arrived (``arrive``), when a backward ends (``close``), and what is left
    to reduce before a step.
    """

    def __init__(
        self,
        group: Group,
        buckets: Sequence[GradientBucket],
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        *,
        in_flight_nbytes: int,
    ) -> None:
        """Bind the pieces; the sequences may grow.

        Args:
            group: The sharding group.
            buckets: Of gradients; equal plans, in equal order, on every rank.
            params: All parameters.
            specs: Their facts.
            in_flight_nbytes: Bytes that may be under way, if it is more than one bucket; then backward waits for the
                oldest.
        """
        self._group = group
        self._buckets = buckets
        self._params = params
        self._specs = specs
        self._in_flight_nbytes = in_flight_nbytes
        self._in_flight: deque[tuple[int, Finish]] = deque()
        self._missing: dict[int, set[int]] | None = None
        self._position = 0
        self._order: list[int] = []
        self._is_awake: list[bool] = []
        self._holding: set[int] = set()
        self._replicated: set[int] = set()
        self._present: set[int] = set()
        self.num_rounds = 0
        self.num_dropped = 0
        self.used: list[bool] = []
        """For each parameter whether any rank has a gradient for it in this step; known once it is finalized."""

    # --- Rounds -----------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a round is under way."""
        return self._missing is not None

    def open(self) -> None:
        """Begin a round: expect a gradient of every parameter that is trained. Local."""
        self._order = self._order_of_launch()
        self._missing = {
            number: {p for p in self._buckets[number].plan.params if self._params[p].requires_grad}
            for number in self._order
        }
        self._position = 0

    def arrive(
        self, param: int, number: int, gradient: Tensor, *, launched: Launched = ignore
    ) -> bool:
        """Take a gradient into its bucket, ``number``; False if the bucket sleeps or has been launched.

        Collective where buckets are complete; ``launched`` is told of each.
        """
        assert self._missing is not None
        if number not in self._missing:
            return False
        self._buckets[number].add(param, gradient)
        self._present.add(param)
        self._missing[number].discard(param)
        while self._position < len(self._order) and not self._missing[self._order[self._position]]:
            self._launch_next(launched)
        return True

    @property
    def present(self) -> list[bool]:
        """For each parameter whether this rank has had a gradient of it since the last step."""
        return [p in self._present for p in range(len(self._params))]

    def is_present(self, param: int) -> bool:
        """Whether this rank has had a gradient of a parameter since the last step."""
        return param in self._present

    def close(
        self, take_late: Callable[[int], Tensor | None], *, launched: Launched = ignore
    ) -> list[int]:
        """End the round and return the parameters it has reduced. Collective.

        Args:
            take_late: Returns gradients of parameters that the backward did not reach, from before it.
            launched: Told of each bucket that is launched.
        """
        assert self._missing is not None
        while self._position < len(self._order):
            number = self._order[self._position]
            for param in sorted(self._missing[number]):
                gradient = take_late(param)
                if gradient is not None:
                    self._buckets[number].add(param, gradient)
                    self._present.add(param)
            self._launch_next(launched)
        self._missing = None
        self.num_rounds += 1
        return [p for number in self._order for p in self._buckets[number].plan.params]

    def _launch_next(self, launched: Launched) -> None:
        number = self._order[self._position]
        self._position += 1
        assert self._missing is not None
        del self._missing[number]
        self._launch(number)
        launched(number)

    def _order_of_launch(self) -> list[int]:
        """Buckets that are awake, about as backward fills them: gradients come in reverse order of parameters."""
        for bucket in self._buckets[len(self._is_awake) :]:
            self._is_awake.append(any(self._specs[p].requires_grad for p in bucket.plan.params))
        return [number for number in self._backward_order() if self._is_awake[number]]

    def _backward_order(self) -> list[int]:
        return backward_order([bucket.plan for bucket in self._buckets])

    def _launch(self, number: int) -> None:
        """Launch the reduction of one bucket with what was taken in, waiting for older ones if there are many."""
        room = self._in_flight_nbytes - self._buckets[number].nbytes
        while self._in_flight and self._nbytes_in_flight() > room:
            self._finish_oldest()
        self._in_flight.append((number, self._start(number)))

    def _nbytes_in_flight(self) -> int:
        return sum(self._buckets[number].nbytes for number, _ in self._in_flight)

    def _finish_oldest(self) -> None:
        """Finish one reduction; after an exception all others, too, before it is raised."""
        try:
            self._in_flight.popleft()[1]()
        except BaseException:
            while self._in_flight:
                with suppress(Exception):
                    self._in_flight.popleft()[1]()
            raise

    def _start(self, number: int) -> Finish:
        bucket = self._buckets[number]
        parts = bucket.seal()
        release = bucket.take_memory()
        out = bucket.shard.narrow(0, 0, parts[self._group.rank].numel())
        adds = number in self._holding
        if number in self._replicated and not self._group.is_first_replica:
            bucket.shard.zero_()  # what all replicas have is to count once
        self._replicated.discard(number)
        num = self._group.num_scratch(out.device.type, adds=adds, casts=bucket.casts)
        scratch, release_scratch = bucket.scratch(num, out.numel())
        try:
            pending = self._group.reduce_scatter(
                parts, out=out, scratch=scratch, scale=bucket.sum_scale, adds=adds
            )
        except BaseException:
            release()
            release_scratch()
            raise
        self._holding.add(number)

        def finish() -> None:
            try:
                pending.wait()
            finally:
                release()
                release_scratch()

        return finish

    # --- Before a step ----------------------------------------------------------------------------------------

    def reduce_late(self, is_late: Sequence[bool], gradients: Mapping[int, Tensor]) -> None:
        """Launch every bucket that any rank has a gradient for which no round has taken. Collective.

        Args:
            is_late: For each parameter whether any rank has one; equal on every rank.
            gradients: Those of this rank.
        """
        for number in self._backward_order():
            params = self._buckets[number].plan.params
            if any(is_late[p] for p in params):
                for p in params:
                    if p in gradients:
                        self._buckets[number].add(p, gradients[p])
                self._launch(number)

    def run_empty_round(self) -> None:
        """Take part in a round of the others with nothing. Collective."""
        self.open()
        self.close(lambda param: None)

    def finalize(self, used: Sequence[bool]) -> None:
        """Note what the rounds of this step were about: which parameters any rank has had a gradient for."""
        self.used = list(used)
        self._present = {p for p, is_used in enumerate(used) if is_used}
        self.num_rounds = self.num_dropped = 0

    def complete(self, number: int) -> None:
        """Wait until the reductions of one bucket are done, over replicas too. Collective."""
        while any(number == other for other, _ in self._in_flight):
            self._finish_oldest()
        if number in self._holding and number not in self._replicated:
            self._group.reduce_over_replicas(self._buckets[number].shard)
            self._replicated.add(number)

    def complete_all(self) -> None:
        """Wait until all reductions are done, over replicas too. Collective."""
        for number in self._backward_order():
            self.complete(number)

    def drain(self) -> None:
        """Wait for everything in flight. Local."""
        while self._in_flight:
            self._finish_oldest()

    # --- Forgetting -------------------------------------------------------------------------------------------

    def fall_asleep(self) -> None:
        """Let buckets rest that nobody had a gradient for in this step, until somebody has one."""
        if self.used:
            self._is_awake = [
                any(self.used[p] for p in bucket.plan.params) for bucket in self._buckets
            ]

    def forget(self) -> None:
        """Drop what was reduced. Local; to be called on all ranks alike."""
        if self._holding:
            self.num_dropped += 1
        self.drain()
        self._holding.clear()
        self._replicated.clear()
        self._present.clear()

    def drop(self, param: int, owned: Tensor | None) -> None:
        """Drop what was reduced of one parameter; ``owned`` is this rank's part of it. Local."""
        self.num_dropped += 1
        self._present.discard(param)
        self.drain()
        if owned is not None:
            owned.zero_()
