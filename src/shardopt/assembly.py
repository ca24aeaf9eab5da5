"""Puts the pieces of one sharded optimizer together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardopt.backward_stepper import BackwardStepper
from shardopt.clipper import Clipper
from shardopt.collectives import Group
from shardopt.frameworks import Framework
from shardopt.sharding import Sharding
from shardopt.shards import Shards
from shardopt.state import ShardedState
from shardopt.step import BackwardStep, Exchange, GradientIntake, GradientReducer
from shardopt.stepper import Stepper


@dataclass(frozen=True, slots=True)
class Pieces:
    """What works on the shards of one optimizer.

    Attributes:
        state: Collects, loads and shows its state.
        exchange: Brings parameters from their owners.
        intake: Averages gradients; None where they are averages already.
        clipper: Clips averaged gradients.
        stepper: Steps, after backward.
        backward_stepper: Steps inside backward, without DDP; None if that was not asked for.
        backward_step: Steps inside DDP's backward, driven by one of its hooks; None if that was not asked for.
    """

    state: ShardedState
    exchange: Exchange
    intake: GradientIntake | None
    clipper: Clipper
    stepper: Stepper
    backward_stepper: BackwardStepper | None
    backward_step: BackwardStep | None

    @property
    def steps_in_backward(self) -> bool:
        """Whether ``step()`` comes after the update."""
        return self.backward_stepper is not None or self.backward_step is not None


def assemble(
    group: Group,
    framework: Framework,
    sharding: Sharding,
    shards: Shards,
    local_optimizer: Any,
    *,
    param_groups: Callable[[], list[dict[str, Any]]],
    fire_hooks: Callable[..., None],
    is_in_join: Callable[[], bool],
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
        param_groups: Returns those of the whole optimizer.
        fire_hooks: Calls its step pre-hooks with ``before=True``, its post-hooks with ``before=False``.
        is_in_join: Whether other ranks may have run out of inputs.
        is_separable: Whether the local optimizer may update some parameters now and others later.
        overlaps: Whether a DDP hook steps.
    """
    is_bounded = partial(_is_copied, group, shards)
    exchange = Exchange(group, shards.buckets, is_bounded=is_bounded, touch=shards.touch)
    clipper = Clipper(group, shards, framework.norm, param_groups=param_groups)
    intake = None
    if sharding.gradients:
        intake = _make_intake(group, framework, sharding, shards, clipper, is_in_join)
    stepper = Stepper(
        group,
        shards,
        local_optimizer,
        exchange,
        intake,
        param_groups=param_groups,
        is_separable=is_separable,
    )
    backward_stepper = None
    if intake is not None and sharding.step_in_backward:
        backward_stepper = BackwardStepper(
            group,
            shards,
            local_optimizer,
            stepper=stepper,
            exchange=exchange,
            intake=intake,
            param_groups=param_groups,
            fire_hooks=fire_hooks,
        )
        intake.driver = backward_stepper
        intake.reducer.on_launch = backward_stepper.launched
    backward_step = None
    if overlaps:
        backward_step = BackwardStep(
            group,
            local_optimizer,
            param_groups=param_groups,
            params=shards.params,
            owners=shards.owners,
            plan=shards.buckets_for,
            require_intact=shards.require_intact,
            fire_hooks=fire_hooks,
        )
    state = ShardedState(
        group, framework, shards, local_optimizer, chunk_nbytes=sharding.bucket_nbytes
    )
    return Pieces(state, exchange, intake, clipper, stepper, backward_stepper, backward_step)


def _is_copied(group: Group, shards: Shards, number: int) -> bool:
    """Whether what is sent of a bucket is a copy."""
    first = shards.params[shards.buckets[number].plan.params[0]]
    return not shards.has_views or (group.shares_memory and first.device.type == "cpu")


def _make_intake(
    group: Group,
    framework: Framework,
    sharding: Sharding,
    shards: Shards,
    clipper: Clipper,
    is_in_join: Callable[[], bool],
) -> GradientIntake:
    reducer = GradientReducer(
        group,
        shards.gradient_buckets,
        shards.params,
        shards.specs,
        in_flight_nbytes=sharding.bucket_nbytes,
    )
    intake = GradientIntake(
        group,
        reducer,
        params=shards.params,
        bucket_of=shards.bucket_of,
        owned=shards.reduced_gradient,
        norms=clipper.norms,
        autograd=framework.autograd,
        is_paused=is_in_join,
    )
    intake.watch()
    return intake
