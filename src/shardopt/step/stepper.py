"""Sequences one step: check, agree, bring gradients, update, exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shardopt.collectives import Group, option_fingerprint
from shardopt.gradients import AveragedGradients, GradientFinalizer, GradientSource
from shardopt.partition import backward_order
from shardopt.shards import Exchange, Shards
from shardopt.step.agreement import Intent, agree
from shardopt.step.attachment import Attachment
from shardopt.step.local_update import LocalUpdater
from shardopt.step.options import copy_options
from shardopt.step.scaling import LossScale
from shardopt.step.uneven_inputs import sync_joined_gradients, sync_joined_options
from shardopt.step.update import ShardUpdate


class Stepper:
    """Lets the local optimizer act for the whole one, on all ranks together."""

    def __init__(
        self,
        group: Group,
        shards: Shards,
        local_optimizer: Any,
        exchange: Exchange,
        updater: LocalUpdater,
        gradients: GradientSource,
        finalizer: GradientFinalizer | None,
        *,
        param_groups: list[dict[str, Any]],
        is_separable: bool,
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            shards: What it shards.
            local_optimizer: The wrapped optimizer.
            exchange: Brings parameters from their owners.
            updater: Runs the local optimizer over some buckets.
            gradients: What it updates with.
            finalizer: Brings ranks to the same gradients; None where they are averages already.
            param_groups: Of the whole optimizer, whose options are the truth.
            is_separable: Whether the local optimizer may update some parameters now and others later.
        """
        self._group = group
        self._shards = shards
        self._local_optimizer = local_optimizer
        self._exchange = exchange
        self._updater = updater
        self._gradients = gradients
        self._finalizer = finalizer
        self._param_groups = param_groups
        self._is_separable = is_separable
        self._attachments: list[Attachment] = []

    def attach(self, attachment: Attachment) -> None:
        """Let the forward of a module wait for parameters, so that a step need not."""
        self._attachments.append(attachment)

    def read_attachments(self) -> None:
        """Look up the buckets of parameters anew, after some were added."""
        for attachment in self._attachments:
            attachment.read()

    @property
    def _awaits_exchange(self) -> bool:
        """Whether a step ends with all parameters in place, and not with some on their way into a forward."""
        return not any(attachment.is_ready for attachment in self._attachments)

    def step(
        self,
        step_local: Callable[[], Any],
        *,
        scale: LossScale,
        is_in_join: bool,
        is_joined: bool = False,
        error: Exception | None = None,
    ) -> Any:
        """Take one step and return what the local optimizer returned. Collective.

        Args:
            step_local: Runs the local optimizer.
            scale: What a GradScaler left for this step.
            is_in_join: Whether other ranks may have run out of inputs; equal on every rank.
            is_joined: Whether this rank ran out of inputs.
            error: Why this rank cannot step, if that is known already.
        """
        in_kernel = self._divides_in_kernel(is_in_join=is_in_join)
        error, skip = error or self._find_error(), False
        if error is None:
            skip = scale.wants_skip(self._shards.params, in_kernel=in_kernel)
        finalizer = self._finalizer
        if finalizer is not None and is_in_join:
            # ranks without inputs have no scale to divide an average by
            scale.divide(finalizer.waiting)
            scale = LossScale(None, scale.found_inf)
        intent = agree(
            self._group,
            self._param_groups,
            error=error,
            skip=skip,
            is_joined=is_joined,
            updates=self._updating_sections(),
            fingerprint=scale.fingerprint(in_kernel=in_kernel),
            extra=[] if finalizer is None else finalizer.report(has_inputs=not is_joined),
            on_extra=None
            if finalizer is None
            else partial(finalizer.finalize, has_inputs=not is_joined),
        )
        if intent.is_skipped:
            self._forget_gradients()
            return None
        try:
            scale.apply(
                self._group,
                self._local_optimizer,
                self._gradients.everything,
                params=self._shards.params,
                in_kernel=in_kernel,
            )
            updating = self._bring_gradients(intent)
            copy_options(self._param_groups, self._local_optimizer.param_groups)
            update = self._updater.start()
            loss = self._update(update, step_local, updating)
            copy_options(self._local_optimizer.param_groups, self._param_groups)
            self._finish(update, updating, doing="the local optimizer's step()")
        finally:
            scale.take_back(self._local_optimizer)
            self._forget_gradients()
        return loss

    def shadow_step(self) -> None:
        """Take part in a step of ranks that have inputs, from one that ran out of them. Collective."""
        self.step(
            self._local_optimizer.step, scale=LossScale(None, None), is_in_join=True, is_joined=True
        )

    def _divides_in_kernel(self, *, is_in_join: bool) -> bool:
        """Whether a fused kernel may divide by a loss scale; ranks without inputs, which take part, have no scaler."""
        return not is_in_join and getattr(
            self._local_optimizer, "_step_supports_amp_scaling", False
        )

    def _find_error(self) -> Exception | None:
        """Why this rank cannot step."""
        try:
            self._exchange.drain()
            self._shards.require_intact()
            self._shards.require_listed(self._param_groups)
        except Exception as raised:
            return raised
        return None

    def _bring_gradients(self, intent: Intent) -> Sequence[Sequence[int]]:
        """Let this rank have this step's gradients of what it owns, or be about to have them. Collective.

        Returns:
            For each bucket the ranks whose sections will be updated.
        """
        shards = self._shards
        sync_joined_options(self._group, intent, self._param_groups)
        if self._finalizer is not None:
            return shards.sections_with(self._finalizer.reducer.used)
        parts_by_rank = {rank: shards.parts_of(rank) for rank in intent.joined}
        sync_joined_gradients(self._group, intent, shards.params, parts_by_rank)
        return intent.updating

    def _updating_sections(self) -> list[bool]:
        """For each bucket whether this rank has gradients for its section, where that decides what is updated."""
        if isinstance(self._gradients, AveragedGradients):
            return self._gradients.updating_sections()
        return []

    def _update(
        self, update: ShardUpdate, step_local: Callable[[], Any], updating: Sequence[Sequence[int]]
    ) -> Any:
        """Run the local optimizer and launch the exchange, bucket by bucket if it is separable. Collective."""
        order = backward_order([bucket.plan for bucket in self._shards.buckets])
        if not self._awaits_exchange:
            order.reverse()  # the next forward needs first what backward has brought last
        batches = [[number] for number in order] if self._is_separable else [order]
        loss = None
        for position, batch in enumerate(batches or [[]]):
            is_last = position >= len(batches) - 1
            loss = self._updater.run(update, step_local, batch, with_empty=is_last)
            for number in batch:
                self._exchange.launch(number, updating[number])
        return loss

    def _finish(
        self, update: ShardUpdate, launched: Sequence[Sequence[int]], *, doing: str
    ) -> None:
        update.finish(self._group, self._exchange, launched=launched, doing=doing)
        if self._awaits_exchange:
            self._exchange.drain()
        else:
            self._exchange.drain_copies()

    def _forget_gradients(self) -> None:
        """Drop gradients that were made for a step: averages, and parts of gradients."""
        if self._finalizer is not None:
            self._finalizer.forget(after_step=True)

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the local optimizer on all ranks. Collective.

        If it changed parameters or options on any rank, all parameters are exchanged; if it raised on any, all raise.
        """
        error = self._find_error()
        copy_options(self._param_groups, self._local_optimizer.param_groups)
        options = option_fingerprint(self._param_groups)
        update = self._updater.start()
        update.error = error
        result = update.run(partial(method, *args, **kwargs))
        for section in self._shards.sections:
            section.write_back()
        copy_options(self._local_optimizer.param_groups, self._param_groups)
        has_changed = update.has_moved_params or option_fingerprint(self._param_groups) != options
        reports = self._group.all_gather_ints([int(has_changed or update.error is not None)])
        if any(is_affected for (is_affected,) in reports):
            everything = self._shards.sections_with([True] * len(self._shards.params))
            for number, ranks in enumerate(everything):
                self._exchange.launch(number, ranks)
            self._finish(
                update,
                everything,
                doing=f"{getattr(method, '__name__', 'a method')}() of the local optimizer",
            )
            self._exchange.drain()
        return result
