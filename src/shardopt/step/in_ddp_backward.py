"""The step taken inside backward, a DDP bucket at a time.

Parameters keep their owners; what changes is only when they are updated. Each update brings the gradients of some
parameters; their owners update them at once and their exchange is launched, while backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shardopt.buffers import StagedBucket
from shardopt.collectives import Group, InFlightQueue, options_of, raise_if_any_failed
from shardopt.errors import (
    MSG_GRAD_SCALER,
    MSG_GRADIENTS_CHANGED,
    MSG_NOT_UPDATED,
    MSG_SEVERAL_UPDATES,
    OverlapError,
)
from shardopt.shards import Shards, launch_exchange
from shardopt.step.agreement import agree
from shardopt.step.options import copy_options
from shardopt.step.scaling import LossScale
from shardopt.step.update import only_params

if TYPE_CHECKING:
    from torch import Tensor

NUM_IN_FLIGHT = 2
"""Buckets whose exchange is under way at a time."""


class DDPBackwardStepper:
    """Updates parameters as their gradients are reduced; every rank makes the same calls in the same order."""

    def __init__(
        self,
        group: Group,
        local_optimizer: Any,
        *,
        shards: Shards,
        param_groups: Sequence[dict[str, Any]],
        fire_hooks: Callable[..., None],
    ) -> None:
        """Bind the pieces.

        Args:
            group: The sharding group.
            local_optimizer: The wrapped optimizer.
            shards: What it shards, by whole parameters.
            param_groups: Of the whole optimizer.
            fire_hooks: Calls step pre-hooks with ``before=True``, post-hooks with ``before=False``.
        """
        self._group = group
        self._local_optimizer = local_optimizer
        self._param_groups = param_groups
        self._params = shards.params
        self._shards = shards
        self._fire_hooks = fire_hooks
        self._is_driven = False
        self._buckets_of: dict[tuple[int, ...], list[StagedBucket]] = {}
        self._options: list[dict[str, Any]] | None = None
        self._error: Exception | None = None
        self._agreed_error: Exception | None = None
        self._in_flight = InFlightQueue(depth=NUM_IN_FLIGHT)
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
            if self._shards.owners[i] == self._group.rank
        }
        if self._error is None:
            try:
                self._update_owned(owned)
            except Exception as raised:
                self._error = raised
        key = tuple(indices)
        if key not in self._buckets_of:
            self._buckets_of[key] = self._shards.buckets_for(key)
        for bucket in self._buckets_of[key]:
            ranks = [section.rank for section in bucket.plan.sections if section.slots]
            self._in_flight.launch(partial(launch_exchange, self._group, bucket, ranks))

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
        self._in_flight.drain()
        copy_options(self._local_optimizer.param_groups, self._param_groups)
        raise_if_any_failed(
            self._group, error, doing="the local optimizer's step() inside backward"
        )
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
            self._shards.require_intact()
            self._fire_hooks(before=True)
        except Exception as raised:
            error = raised
        try:
            agree(self._group, self._param_groups, error=error)
        except Exception as raised:
            self._agreed_error = raised
            return
        copy_options(self._param_groups, self._local_optimizer.param_groups)
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


def backward_step_of(
    zero: Any, *, ddp_params: Iterable[Any], ddp_ranks: Sequence[int], zero_ranks: Sequence[int]
) -> DDPBackwardStepper:
    """Return the step for a hook to drive, once it is sure that DDP reduces what it updates.

    Args:
        zero: The sharded optimizer.
        ddp_params: The parameters of the DDP module.
        ddp_ranks: Global ranks of its process group.
        zero_ranks: Global ranks of the sharding group.

    Raises:
        ValueError: ``zero`` was made without ``overlap_with_ddp``, for another process group, or with parameters that
            are none of the DDP module's.
    """
    step: DDPBackwardStepper | None = zero.backward_step
    if step is None:
        raise ValueError(
            "zero: was made with overlap_with_ddp=False, expected True for a hook that steps in backward"
        )
    if list(zero_ranks) != list(ddp_ranks):
        raise ValueError(
            f"zero: its process group has global ranks {list(zero_ranks)}, that of ddp has {list(ddp_ranks)}; "
            "give both the same group"
        )
    reduced = {id(param) for param in ddp_params}
    for index, param in enumerate(zero.shards.params):
        if id(param) not in reduced:
            raise ValueError(
                f"zero: param {index}, {tuple(param.shape)}, is no parameter of ddp, so no hook would update it; "
                "give it an optimizer of its own"
            )
    step.drive()
    return step
