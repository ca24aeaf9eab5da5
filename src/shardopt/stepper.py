"""Sequences one step: check, agree, bring gradients, update, exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shardopt.collectives import Group, option_facts
from shardopt.shards import Shards
from shardopt.step import (
    Intent,
    LossScale,
    Norm,
    ShardUpdate,
    agree,
    catch_up_gradients,
    catch_up_options,
    copy_options,
    reduce_gradients,
    scale_to,
    total_norm,
)


class Stepper:
    """Lets the local optimizer act for the whole one, on all ranks together."""

    def __init__(
        self,
        group: Group,
        shards: Shards,
        local_optimizer: Any,
        *,
        param_groups: Callable[[], list[dict[str, Any]]],
        reduces_gradients: bool,
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            shards: What it shards.
            local_optimizer: The wrapped optimizer.
            param_groups: Returns the param groups of the whole optimizer, whose options are the truth.
            reduces_gradients: Whether to average gradients; otherwise they are averages already.
        """
        self._group = group
        self._shards = shards
        self._local_optimizer = local_optimizer
        self._param_groups = param_groups
        self._reduces_gradients = reduces_gradients
        self._used: list[bool] | None = (
            None  # which parameters have a gradient, once those are reduced
        )

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
        intent = agree(
            self._group,
            self._param_groups(),
            error=error,
            skip=skip,
            is_joined=is_joined,
            updates=self._shards.updating_sections(),
            # gradients that are averaged here are divided first, each by its own rank's scale
            facts=[] if self._reduces_gradients else scale.facts(in_kernel=in_kernel),
        )
        if intent.is_skipped:
            self.forget_gradients()
            return None
        try:
            scale.apply(
                self._group, self._local_optimizer, self._shards.params, in_kernel=in_kernel
            )
            updating = self._bring_gradients(intent)
            copy_options(self._param_groups(), self._local_optimizer.param_groups)
            update = self._start_update()
            loss = update.run(step_local)
            copy_options(self._local_optimizer.param_groups, self._param_groups())
            update.finish(self._group, expected=updating, doing="the local optimizer's step()")
        finally:
            scale.take_back(self._local_optimizer)
            self.forget_gradients()
        return loss

    def _divides_in_kernel(self, *, is_in_join: bool) -> bool:
        """Whether a fused kernel may divide by a loss scale.

        Not where gradients of different scales could be averaged first, or where ranks without inputs take part, which
        have no scaler.
        """
        return (
            not is_in_join
            and not self._reduces_gradients
            and getattr(self._local_optimizer, "_step_supports_amp_scaling", False)
        )

    def clip_grad_norm(
        self, max_norm: float, norm_type: float, norm: Norm, error_if_nonfinite: bool
    ) -> Any:
        """Reduce gradients and scale them to a total norm of at most ``max_norm``; returns the norm before. Collective.

        Raises:
            RuntimeError: On every rank, if asked for: the norm is inf or NaN; nothing was scaled.
        """
        shards = self._shards
        agree(
            self._group,
            self._param_groups(),
            error=self._find_error(),
            facts=[("max_norm", repr(max_norm)), ("norm_type", repr(norm_type))],
        )
        used = self._reduce(has_inputs=True)
        total = total_norm(
            self._group,
            shards.params,
            shards.specs,
            shards.parts,
            shards.tensors,
            used=used,
            norm_type=norm_type,
            norm=norm,
        )
        if error_if_nonfinite and not (total - total == 0).item():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}; "
                "pass error_if_nonfinite=False to clip all the same"
            )
        scale_to(total, shards.tensors, max_norm=max_norm)
        return total

    def forget_gradients(self) -> None:
        """Drop gradients that were made for a step: averages, and parts of gradients."""
        self._shards.drop_part_gradients()
        if self._reduces_gradients:
            self._used = None
            self._shards.drop_gradients()

    def _find_error(self) -> Exception | None:
        """Why this rank cannot step."""
        try:
            self._shards.require_intact()
            self._shards.require_listed(self._param_groups())
            if self._used is not None:
                self._shards.require_reduced_only()
        except Exception as raised:
            return raised
        return None

    def _reduce(self, *, has_inputs: bool) -> list[bool]:
        """Average gradients, unless that was done since the last step. Collective."""
        shards = self._shards
        if self._used is None:
            self._used = reduce_gradients(
                self._group,
                shards.gradient_buckets,
                shards.params,
                shards.parts,
                shards.tensors,
                has_inputs=has_inputs,
            )
        return self._used

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the local optimizer on all ranks. Collective.

        If it changed parameters or options on any rank, all parameters are exchanged; if it raised on any, all raise.
        """
        copy_options(self._param_groups(), self._local_optimizer.param_groups)
        options = option_facts(self._param_groups())
        update = self._start_update()
        result = update.run(partial(method, *args, **kwargs))
        copy_options(self._local_optimizer.param_groups, self._param_groups())
        has_changed = update.has_moved_params or option_facts(self._param_groups()) != options
        reports = self._group.all_gather_ints([int(has_changed or update.error is not None)])
        if any(is_affected for (is_affected,) in reports):
            update.finish(
                self._group,
                expected=self._shards.sections_with([True] * len(self._shards.params)),
                doing=f"{getattr(method, '__name__', 'a method')}() of the local optimizer",
            )
        return result

    def _start_update(self) -> ShardUpdate:
        return ShardUpdate(self._group.rank, self._shards.buckets, self._shards.tensors)

    def _bring_gradients(self, intent: Intent) -> Sequence[Sequence[int]]:
        """Let the local optimizer see this step's gradients of what this rank owns. Collective.

        Returns:
            For each bucket the ranks whose sections will be updated.
        """
        shards = self._shards
        catch_up_options(self._group, intent, self._param_groups())
        if self._reduces_gradients:
            used = self._reduce(has_inputs=self._group.rank in intent.active)
            return shards.sections_with(used)
        parts_by_rank = {rank: shards.parts_of(rank) for rank in intent.joined}
        catch_up_gradients(self._group, intent, shards.params, parts_by_rank)
        shards.pass_gradients()
        return intent.updating
