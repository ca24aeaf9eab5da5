"""Average gradients where no DDP does, each to the rank that owns it, S * (N - 1) / N bytes per rank.

Note [Rounds]: a round is one reduction of all buckets that are awake, in one order that all ranks share. During a
backward each gradient is taken into its bucket as it is accumulated, and ``param.grad`` is emptied; a full bucket is
launched once all buckets before it in the order were. The end of backward closes the round: what is left is launched,
with zeros for what did not come. So every backward is one round, whatever came in whichever order, and the sequence
of collectives is the same on all ranks.

What a round cannot take stays in ``param.grad``, or is carried beside it: gradients computed under ``no_sync()``, of
parameters in a bucket that sleeps since nobody had a gradient for it in the last step, or assigned by hand. ``settle``
reduces those once, in buckets that any rank has one for, after ranks that took part in fewer rounds have caught up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from shardopt.buffers import GradientBucket
from shardopt.collectives import Finish, Group
from shardopt.errors import RankMismatchError
from shardopt.partition import ParamSpec, backward_order
from shardopt.step.flags import pack_flags, unpack_flags

if TYPE_CHECKING:
    from torch import Tensor


def agree_on_gradients(group: Group, present: Sequence[bool]) -> list[bool]:
    """Return for each parameter whether any rank has a gradient for it. Collective."""
    reports = [
        unpack_flags(ints, len(present)) for ints in group.all_gather_ints(pack_flags(present))
    ]
    return [any(flags) for flags in zip(*reports, strict=True)]


class GradientReducer:
    """Collects this rank's gradients and leaves it the averages of what it owns, in ``bucket.shard``.

    Knows nothing of autograd: it is told what has arrived (``arrive``), when a backward ends (``close``), and what to
    settle before a step.
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
        self.on_launch: Callable[[int], None] | None = None
        """Told of each bucket that a round has launched. Collective."""

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

    def arrive(self, param: int, number: int, gradient: Tensor) -> bool:
        """Take a gradient into its bucket, ``number``; False if the bucket sleeps or has been launched.

        Collective where buckets are complete.
        """
        assert self._missing is not None
        if number not in self._missing:
            return False
        self._buckets[number].add(param, gradient)
        self._present.add(param)
        self._missing[number].discard(param)
        while self._position < len(self._order) and not self._missing[self._order[self._position]]:
            self._launch_next()
        return True

    def is_present(self, param: int) -> bool:
        """Whether this rank has had a gradient of a parameter since the last step."""
        return param in self._present

    def close(self, take_late: Callable[[int], Tensor | None]) -> list[int]:
        """End the round and return the parameters it has reduced. Collective.

        ``take_late`` returns gradients of parameters that the backward did not reach, from before it.
        """
        assert self._missing is not None
        while self._position < len(self._order):
            number = self._order[self._position]
            for param in sorted(self._missing[number]):
                gradient = take_late(param)
                if gradient is not None:
                    self._buckets[number].add(param, gradient)
                    self._present.add(param)
            self._launch_next()
        self._missing = None
        self.num_rounds += 1
        return [p for number in self._order for p in self._buckets[number].plan.params]

    def _launch_next(self) -> None:
        number = self._order[self._position]
        self._position += 1
        assert self._missing is not None
        del self._missing[number]
        self._launch(number)
        if self.on_launch is not None:
            self.on_launch(number)

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

    def words(self, left: Sequence[bool]) -> list[int]:
        """What the other ranks have to know before ``settle``; ``left`` says which gradients no round has taken."""
        present = [p in self._present for p in range(len(self._params))]
        return [self.num_rounds, self.num_dropped, *pack_flags(present), *pack_flags(left)]

    def is_left(self, words: Sequence[Sequence[int]]) -> list[bool]:
        """For each parameter whether any member has a gradient that no round has taken."""
        num_ints = len(pack_flags([False] * len(self._params)))
        flags = [unpack_flags(theirs[2 + num_ints :], len(self._params)) for theirs in words]
        return [any(of_members) for of_members in zip(*flags, strict=True)]

    def settle(self, words: Sequence[Sequence[int]], gradients: Mapping[int, Tensor]) -> list[bool]:
        """Bring all ranks to the same rounds and reduce what is left. Collective.

        Args:
            words: Of every member.
            gradients: Those of this rank that no round has taken.

        Returns:
            For each parameter whether any rank had a gradient for it.

        Raises:
            RankMismatchError: On every rank: gradients were dropped at other times on other ranks.
        """
        num_params = len(self._params)
        num_ints = len(pack_flags([False] * num_params))
        present = [unpack_flags(theirs[2 : 2 + num_ints], num_params) for theirs in words]
        while self.num_rounds < max(theirs[0] for theirs in words):
            self.open()
            self.close(lambda param: None)
        is_left = self.is_left(words)
        for number in self._backward_order():
            if any(is_left[p] for p in self._buckets[number].plan.params):
                self._add_and_launch(number, gradients)
        used = [any(f) or late for f, late in zip(zip(*present, strict=True), is_left, strict=True)]
        self._present = {p for p, is_used in enumerate(used) if is_used}
        self.num_rounds = self.num_dropped = 0
        self._require_equal_drops([theirs[1] for theirs in words])
        return used

    def _require_equal_drops(self, num_dropped: Sequence[int]) -> None:
        """Raise where a rank lost what another one still counts on, after an exception in one rank's backward, say.

        Everything is dropped then, on every rank, so that they can start again.
        """
        other = next((m for m, num in enumerate(num_dropped) if num != num_dropped[0]), None)
        if other is not None:
            self.forget()
            self.num_dropped = 0
            raise RankMismatchError(
                f"gradients that had been reduced were dropped {num_dropped[other]} times on rank {other} and "
                f"{num_dropped[0]} times on rank 0 since the last step, so those of this step are not complete; call "
                "zero_grad() on every rank, and run backward again"
            )

    def _add_and_launch(self, number: int, gradients: Mapping[int, Tensor]) -> None:
        for p in self._buckets[number].plan.params:
            if p in gradients:
                self._buckets[number].add(p, gradients[p])
        self._launch(number)

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

    def fall_asleep(self, used: Sequence[bool]) -> None:
        """Let buckets rest that nobody had a gradient for, until somebody has one; ``used`` is equal on all ranks."""
        self._is_awake = [any(used[p] for p in bucket.plan.params) for bucket in self._buckets]

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
