"""Puts the pieces of one sharded optimizer together, each complete when it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardopt.checkpoint import ShardedState
from shardopt.collectives import Group
from shardopt.frameworks import Framework
from shardopt.gradients import (
    AveragedGradients,
    BackwardHooks,
    GradientFinalizer,
    GradientPlaceholders,
    GradientReducer,
    ReducedGradients,
)
from shardopt.sharding import Sharding
from shardopt.shards import Exchange, Shards
from shardopt.step import (
    BackwardStepper,
    Clipper,
    DDPBackwardStepper,
    JoinMembership,
    LocalUpdater,
    Stepper,
)


@dataclass(frozen=True, slots=True)
class Reduction:
    """What averages gradients where nobody else does.

    Attributes:
        gradients: The averages that this rank holds.
        hooks: Take gradients from backward.
        finalizer: Brings ranks to the same gradients before a step.
        clipper: Clips them.
        stepper: Steps inside backward; None if that was not asked for.
    """

    gradients: ReducedGradients
    hooks: BackwardHooks
    finalizer: GradientFinalizer
    clipper: Clipper
    stepper: BackwardStepper | None


@dataclass(frozen=True, slots=True)
class Pieces:
    """What works on the shards of one optimizer.

    Attributes:
        state: Collects, loads and shows its state.
        exchange: Brings parameters from their owners.
        reduction: Averages gradients; None where they are averages already.
        stepper: Steps, after backward.
        backward_step: Steps inside DDP's backward, driven by one of its hooks; None if that was not asked for.
    """

    state: ShardedState
    exchange: Exchange
    reduction: Reduction | None
    stepper: Stepper
    backward_step: DDPBackwardStepper | None

    @property
    def steps_in_backward(self) -> bool:
        """Whether ``step()`` comes after the update."""
        has_stepper = self.reduction is not None and self.reduction.stepper is not None
        return has_stepper or self.backward_step is not None


def assemble(
    group: Group,
    framework: Framework,
    sharding: Sharding,
    shards: Shards,
    local_optimizer: Any,
    *,
    param_groups: list[dict[str, Any]],
    fire_hooks: Callable[..., None],
    membership: JoinMembership,
    make_optimizer: Callable[[list[dict[str, Any]]], Any],
    is_separable: bool,
    overlaps: bool,
) -> Pieces:
    """Make all pieces.

    Args:
        group: The sharding group.
        framework: The framework.
        sharding: The policy.
        shards: What is sharded.
        local_optimizer: The wrapped optimizer of this rank.
        param_groups: Those of the whole optimizer.
        fire_hooks: Calls its step pre-hooks with ``before=True``, its post-hooks with ``before=False``.
        membership: Whether other ranks may have run out of inputs.
        make_optimizer: Makes another local optimizer from param groups.
        is_separable: Whether the local optimizer may update some parameters now and others later.
        overlaps: Whether a DDP hook steps.
    """
    is_bounded = partial(_is_copied, group, shards)
    exchange = Exchange(group, shards.buckets, is_bounded=is_bounded, touch=shards.touch)
    reduction = None
    if sharding.gradients:
        reduction = _make_reduction(
            group,
            framework,
            sharding,
            shards,
            local_optimizer,
            exchange,
            param_groups=param_groups,
            fire_hooks=fire_hooks,
            is_paused=membership.is_active,
        )
    gradients = AveragedGradients(shards) if reduction is None else reduction.gradients
    stepper = Stepper(
        group,
        shards,
        local_optimizer,
        exchange,
        LocalUpdater(shards, local_optimizer, gradients),
        gradients,
        None if reduction is None else reduction.finalizer,
        param_groups=param_groups,
        is_separable=is_separable,
    )
    backward_step = None
    if overlaps:
        backward_step = DDPBackwardStepper(
            group, local_optimizer, shards=shards, param_groups=param_groups, fire_hooks=fire_hooks
        )
    state = ShardedState(
        group,
        framework,
        shards,
        local_optimizer,
        make_optimizer=make_optimizer,
        chunk_nbytes=sharding.bucket_nbytes,
    )
    return Pieces(state, exchange, reduction, stepper, backward_step)


def _is_copied(group: Group, shards: Shards, number: int) -> bool:
    """Whether what is sent of a bucket is a copy."""
    first = shards.params[shards.buckets[number].plan.params[0]]
    return not shards.has_views or (group.shares_memory and first.device.type == "cpu")


def _make_reduction(
    group: Group,
    framework: Framework,
    sharding: Sharding,
    shards: Shards,
    local_optimizer: Any,
    exchange: Exchange,
    *,
    param_groups: list[dict[str, Any]],
    fire_hooks: Callable[..., None],
    is_paused: Callable[[], bool],
) -> Reduction:
    params, bucket_of, autograd = shards.params, shards.bucket_of, framework.autograd
    reducer = GradientReducer(
        group,
        shards.gradient_buckets,
        params,
        shards.specs,
        in_flight_nbytes=sharding.bucket_nbytes,
    )
    gradients = ReducedGradients(shards, reducer)
    clipper = Clipper(group, shards, gradients, framework.norm, param_groups=param_groups)
    stepper = None
    if sharding.step_in_backward:
        stepper = BackwardStepper(
            group,
            shards,
            local_optimizer,
            updater=LocalUpdater(shards, local_optimizer, gradients),
            exchange=exchange,
            reducer=reducer,
            param_groups=param_groups,
            fire_hooks=fire_hooks,
        )
    placeholders = GradientPlaceholders(params, reducer, gradients.part, autograd)
    finalizer = GradientFinalizer(
        group,
        reducer,
        placeholders,
        params=params,
        bucket_of=bucket_of,
        owned=gradients.part,
        norms=clipper.norms,
        is_paused=is_paused,
        step_in_backward=stepper,
    )
    hooks = BackwardHooks(
        finalizer,
        placeholders,
        params=params,
        bucket_of=bucket_of,
        autograd=autograd,
        is_paused=is_paused,
    )
    return Reduction(gradients, hooks, finalizer, clipper, stepper)
