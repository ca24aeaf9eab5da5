"""The step taken inside backward, a DDP bucket at a time.

Parameters keep their owners; what changes is only when they are updated. Each update brings the gradients of some
parameters; their owners update them at once and their exchange is launched, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardopt.buffers import StagedBucket
from shardopt.collectives import Group, Window, options_of, settle
from shardopt.errors import OverlapError
from shardopt.step.agreement import agree
from shardopt.step.exchange import DEPTH, launch_exchange
from shardopt.step.options import copy_options
from shardopt.step.scaling import LossScale
from shardopt.step.update import only_params

if TYPE_CHECKING:
    from torch import Tensor

MSG_NOT_UPDATED = (
    "step() with overlap_with_ddp=True found that no update happened in backward since the last one; register "
    "ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero)), and call step() only after a "
    "backward outside of ddp.no_sync()"
)
MSG_NOT_UPDATED_IN_BACKWARD = (
    "step() with Sharding(step_in_backward=True) found that no update happened in backward since the last one; call it "
    "only after a backward outside of no_sync() that reaches a parameter of this optimizer"
)
MSG_SEVERAL_UPDATES = (
    "{num} updates were made in backward since the last step(); with overlap_with_ddp=True or step_in_backward=True "
    "every backward updates, so run all but the last of those that belong to one step under no_sync()"
)
MSG_GRADIENTS_CHANGED = (
    "gradients were changed between backward and step(), but with overlap_with_ddp=True or step_in_backward=True the "
    "update has happened in backward, without that change; clip or scale gradients in the communication hook that is "
    "given to hook_with_zero_step, or update at step(), with both of them False"
)
MSG_GRAD_SCALER = (
    "GradScaler unscales gradients between backward and step(), but with overlap_with_ddp=True or step_in_backward=True "
    "the update has happened in backward, with scaled gradients; use bfloat16, which needs no scaler, or update at "
    "step(), with both of them False"
)


class BackwardStep:
    """Updates parameters as their gradients are reduced; every rank makes the same calls in the same order."""

    def __init__(
        self,
        group: Group,
        local_optimizer: Any,
        *,
        param_groups: Callable[[], Sequence[dict[str, Any]]],
        params: Sequence[Tensor],
        owners: Sequence[int],
        plan: Callable[[Sequence[int]], list[StagedBucket]],
        require_intact: Callable[[], None],
        fire_hooks: Callable[..., None],
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            local_optimizer: The wrapped optimizer.
            param_groups: Returns the whole optimizer's param groups.
            params: All parameters, by index.
            owners: The owner of each.
            plan: Returns buckets for some parameters, by index.
            require_intact: Raises if parameters are no longer what was planned for.
            fire_hooks: Calls step pre-hooks with ``before=True``, post-hooks with ``before=False``.
        """
        self._group = group
        self._local_optimizer = local_optimizer
        self._param_groups = param_groups
        self._params = params
        self._owners = owners
        self._plan = plan
        self._require_intact = require_intact
        self._fire_hooks = fire_hooks
        self._is_driven = False
        self._buckets_of: dict[tuple[int, ...], list[StagedBucket]] = {}
        self._options: list[dict[str, Any]] | None = None
        self._error: Exception | None = None
        self._agreed_error: Exception | None = None
        self._window = Window(depth=DEPTH)
        self._num_unconfirmed = 0
        self._gradients: list[tuple[Tensor, int]] = []

    def update(self, indices: Sequence[int], gradients: Sequence[Tensor]) -> None:
        """Update some parameters with their reduced gradients and launch their exchange. Collective.

        An exception of the local optimizer is kept for ``finish``, so that the order of collectives stays the same.

        Args:
            indices: The parameters; equal on every rank.
            gradients: Their gradients, of their shapes.
        """
        if self._options is None and self._agreed_error is None:
            self._begin()
        if self._agreed_error is not None:
            return  # on every rank alike; raised by finish, since an exception within a hook would break DDP
        owned = {
            i: gradient
            for i, gradient in zip(indices, gradients, strict=True)
            if self._owners[i] == self._group.rank
        }
        if self._error is None:
            try:
                self._update_owned(owned)
            except Exception as raised:
                self._error = raised
        key = tuple(indices)
        if key not in self._buckets_of:
            self._buckets_of[key] = self._plan(key)
        for bucket in self._buckets_of[key]:
            ranks = [section.rank for section in bucket.plan.sections if section.slots]
            self._window.launch(partial(launch_exchange, self._group, bucket, ranks))

    def finish(self, *, tracks_gradients: bool = True) -> None:
        """Wait for all exchanges; raise on every rank if an update failed on one. Collective.

        Args:
            tracks_gradients: Whether gradients are final by now, so that a later change of one is an error.
        """
        agreed, self._agreed_error = self._agreed_error, None
        if agreed is not None:
            raise agreed
        if self._options is None:
            return
        error, self._error = self._error, None
        self._options = None
        self._window.drain()
        copy_options(self._local_optimizer.param_groups, self._param_groups())
        settle(self._group, error, doing="the local optimizer's step() inside backward")
        self._num_unconfirmed += 1
        if tracks_gradients:
            gradients = [param.grad for param in self._params]
            self._gradients = [(g, g._version) for g in gradients if g is not None]
        self._fire_hooks(before=False)

    @property
    def is_driven(self) -> bool:
        """Whether a hook was made that calls ``update`` and ``finish``."""
        return self._is_driven

    def drive(self) -> None:
        """Note that a hook was made."""
        self._is_driven = True

    def confirm(self, scale: LossScale) -> None:
        """Answer a call of ``step()`` from outside: the update has been made.

        Raises:
            OverlapError: It has not, or gradients were changed since, or a GradScaler calls.
        """
        if scale.found_inf is not None:
            raise OverlapError(MSG_GRAD_SCALER)
        if not self._num_unconfirmed:
            raise OverlapError(MSG_NOT_UPDATED)
        num_updates, self._num_unconfirmed = self._num_unconfirmed, 0
        if num_updates > 1:
            raise OverlapError(MSG_SEVERAL_UPDATES.format(num=num_updates))
        self._require_unchanged_gradients()

    def before_zero_grad(self) -> None:
        """Raise if gradients are about to be dropped that no hook has used, or that were changed after it did.

        Raises:
            OverlapError: Says what to register, or what to use instead.
        """
        if not self._is_driven and any(param.grad is not None for param in self._params):
            raise OverlapError(MSG_NOT_UPDATED)
        self._require_unchanged_gradients()

    def _require_unchanged_gradients(self) -> None:
        """Raise if gradients were changed in place since the update that used them."""
        gradients, self._gradients = self._gradients, []
        if any(gradient._version != version for gradient, version in gradients):
            raise OverlapError(MSG_GRADIENTS_CHANGED)

    def _begin(self) -> None:
        """Agree, as a step outside of backward does, and remember the options that every part of it starts from."""
        error: Exception | None = None
        try:
            self._require_intact()
            self._fire_hooks(before=True)
        except Exception as raised:
            error = raised
        try:
            agree(self._group, self._param_groups(), error=error)
        except Exception as raised:
            self._agreed_error = raised
            return
        copy_options(self._param_groups(), self._local_optimizer.param_groups)
        self._options = [dict(options_of(group)) for group in self._local_optimizer.param_groups]

    def _update_owned(self, gradients: dict[int, Tensor]) -> None:
        """Run the local optimizer on some parameters only.

        Options are set back before each part, so that what an optimizer counts in its groups it counts once per step.
        """
        assert self._options is not None
        groups = self._local_optimizer.param_groups
        copy_options(self._options, groups)
        kept: dict[int, Tensor | None] = {i: self._params[i].grad for i in gradients}
        try:
            for i, reduced in gradients.items():
                self._params[i].grad = reduced
            with only_params(groups, [self._params[i] for i in gradients]):
                self._local_optimizer.step()
        finally:
            for i, gradient in kept.items():
                self._params[i].grad = gradient
