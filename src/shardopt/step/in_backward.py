"""Steps inside backward, without DDP: each bucket is updated once its gradients are averaged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from shardopt.collectives import Group, pack_flags, unpack_flags
from shardopt.errors import (
    MSG_GRAD_SCALER,
    MSG_NOT_UPDATED_IN_BACKWARD,
    MSG_SEVERAL_UPDATES,
    OverlapError,
)
from shardopt.gradients import GradientFinalizer, GradientReducer, late_anywhere
from shardopt.shards import Exchange, Shards
from shardopt.step.agreement import agree
from shardopt.step.local_update import LocalUpdater
from shardopt.step.options import copy_options
from shardopt.step.scaling import LossScale
from shardopt.step.update import ShardUpdate

LAG = 1
"""Buckets whose reduction is under way while backward goes on, before the oldest is waited for and updated."""


class BackwardStepper:
    """Told by the finalizer when a round of reductions opens, has launched a bucket, and closes.

    The order of collectives is a function of that of the launches, so it is the same on every rank: a bucket's flags
    follow its reduction, and it is updated and its exchange launched once ``LAG`` more buckets have been launched.
    What is raised is raised by ``confirm``, on all ranks: within backward it would leave others waiting.
    """

    def __init__(
        self,
        group: Group,
        shards: Shards,
        local_optimizer: Any,
        *,
        updater: LocalUpdater,
        exchange: Exchange,
        reducer: GradientReducer,
        param_groups: list[dict[str, Any]],
        fire_hooks: Callable[..., None],
    ) -> None:
        """Bind the pieces; ``fire_hooks`` calls step pre-hooks with ``before=True``, post-hooks with ``before=False``."""
        self._group = group
        self._shards = shards
        self._local_optimizer = local_optimizer
        self._updater = updater
        self._exchange = exchange
        self._reducer = reducer
        self._param_groups = param_groups
        self._fire_hooks = fire_hooks
        self._update: ShardUpdate | None = None
        self._queue: deque[tuple[int, Callable[[], list[list[int]]]]] = deque()
        self._launched: list[Sequence[int]] = []
        self._failure: Exception | None = None
        self._num_unconfirmed = 0

    def opened(self) -> None:
        """Agree on the step, as one outside of backward does. Collective."""
        self._raise_failure()
        self._launched = [()] * len(self._shards.buckets)
        self._reducer.used = [False] * len(self._shards.params)
        error: Exception | None = None
        try:
            self._exchange.drain()
            self._shards.require_intact()
            self._shards.require_listed(self._param_groups)
            self._fire_hooks(before=True)
        except Exception as raised:
            error = raised
        try:
            agree(self._group, self._param_groups, error=error)
        except Exception as raised:
            self._failure = raised  # on every rank
            return
        copy_options(self._param_groups, self._local_optimizer.param_groups)
        self._update = self._updater.start()

    def launched(self, number: int) -> None:
        """Take note of a reduction; update the bucket that is due. Collective."""
        if self._update is not None:
            params = self._shards.buckets[number].plan.params
            present = [self._reducer.is_present(param) for param in params]
            reports = self._group.launch_all_gather_ints(pack_flags(present))
            self._queue.append((number, reports))
            if len(self._queue) > LAG:
                self._update_oldest()

    def closed(self, finalizer: GradientFinalizer) -> None:
        """Update what is left, wait for everything, and keep errors for ``confirm``. Collective."""
        while self._queue:
            self._update_oldest()
        early = [number for number, ranks in enumerate(self._launched) if ranks]
        reports = self._group.all_gather_ints(finalizer.report())
        self._require_early(early, late_anywhere(finalizer.read(reports)))
        finalizer.finalize(reports)
        if self._update is not None:
            try:
                self._update_late(early)
                doing = "the local optimizer's step() inside backward"
                self._update.finish(
                    self._group, self._exchange, launched=self._launched, doing=doing
                )
                self._exchange.drain()
                copy_options(self._local_optimizer.param_groups, self._param_groups)
                self._fire_hooks(before=False)
            except Exception as raised:
                self._failure = raised
        self._update = None
        self._num_unconfirmed += 1

    def _require_early(self, early: Sequence[int], is_late: Sequence[bool]) -> None:
        """Note a failure, on every rank, if a bucket was updated without all of its gradients."""
        for number in early:
            for param in self._shards.buckets[number].plan.params:
                if is_late[param]:
                    self._failure = OverlapError(
                        f"{self._shards.specs[param].label}: a gradient came after its bucket was updated in backward, from "
                        "a second use in reentrant checkpoints, say; use use_reentrant=False, or step_in_backward=False"
                    )

    def _update_late(self, early: Sequence[int]) -> None:
        """Update buckets that nobody had a gradient for in the last step, but somebody has now."""
        updating = self._shards.sections_with(self._reducer.used)
        late = [number for number, ranks in enumerate(updating) if ranks and number not in early]
        for number in late:
            self._update_bucket(number, updating[number])
        assert self._update is not None
        self._updater.run(self._update, self._local_optimizer.step, [], with_empty=True)

    def _update_oldest(self) -> None:
        number, reports = self._queue.popleft()
        plan = self._shards.buckets[number].plan
        flags = [unpack_flags(packed, len(plan.params)) for packed in reports()]
        for param, is_used in zip(plan.params, zip(*flags, strict=True), strict=True):
            self._reducer.used[param] = any(is_used)
        used = self._reducer.used
        ranks = [s.rank for s in plan.sections if any(used[slot.param] for slot in s.slots)]
        self._update_bucket(number, ranks)

    def _update_bucket(self, number: int, ranks: Sequence[int]) -> None:
        assert self._update is not None
        self._updater.run(self._update, self._local_optimizer.step, [number])
        self._exchange.launch(number, ranks)
        self._launched[number] = ranks

    # --- Outside of backward ----------------------------------------------------------------------------------

    def confirm(self, scale: LossScale, finalizer: GradientFinalizer) -> None:
        """Answer a call of ``step()``: the update has been made, and gradients are dropped.

        Raises:
            Exception: What went wrong in it, on every rank.
            OverlapError: It has not been made, or several times, or a GradScaler calls.
        """
        if scale.found_inf is not None:
            raise OverlapError(MSG_GRAD_SCALER)
        num_updates, self._num_unconfirmed = self._num_unconfirmed, 0
        finalizer.forget(after_step=True)
        self._raise_failure()
        if not num_updates:
            raise OverlapError(MSG_NOT_UPDATED_IN_BACKWARD)
        if num_updates > 1:
            raise OverlapError(MSG_SEVERAL_UPDATES.format(num=num_updates))

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
