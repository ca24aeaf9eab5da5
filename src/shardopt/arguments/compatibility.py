"""Arguments of the constructor that exclude each other."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from shardopt.frameworks import Framework
from shardopt.sharding import GRANULARITIES, Sharding

logger = logging.getLogger(__name__)


def name_of(optimizer_class: Any) -> str:
    """How messages call the wrapped class, or whatever callable makes the optimizer."""
    return str(getattr(optimizer_class, "__qualname__", type(optimizer_class).__name__))


def policy_fingerprint(
    optimizer_class: Any, sharding: Sharding, *, has_views: bool, overlaps: bool
) -> list[tuple[str, str]]:
    """The arguments that ranks must share, as (label, value) pairs."""
    return [
        ("optimizer_class", name_of(optimizer_class)),
        ("parameters_as_bucket_view", str(has_views)),
        ("overlap_with_ddp", str(overlaps)),
        ("sharding", sharding.fingerprint()),
    ]


def require_possible(
    framework: Framework,
    optimizer_class: Any,
    sharding: Sharding,
    *,
    has_views: bool,
    overlaps: bool,
) -> None:
    """Raise if the arguments exclude each other.

    Args:
        framework: Knows its optimizers.
        optimizer_class: The wrapped class.
        sharding: The policy.
        has_views: ``parameters_as_bucket_view``.
        overlaps: ``overlap_with_ddp``.

    Raises:
        TypeError: One is something else altogether.
        ValueError: They do; says what to pass instead.
    """
    if not isinstance(sharding, Sharding):
        raise TypeError(f"sharding: expected a Sharding, got {type(sharding).__name__}")
    if not callable(optimizer_class):
        raise TypeError(f"optimizer_class: expected a class, got {optimizer_class!r}")
    if reason := framework.reject_optimizer(optimizer_class):
        raise ValueError(f"optimizer_class: {reason}")
    if overlaps and has_views:
        logger.warning(
            "parameters_as_bucket_view has no effect with overlap_with_ddp=True: DDP's buckets are exchanged"
        )
    if overlaps and (reason := framework.reject_overlap()):
        raise ValueError(f"overlap_with_ddp=True: {reason}")
    plain = Sharding(
        bucket_mb=sharding.bucket_mb,
        shared_memory=sharding.shared_memory,
        state_dict=sharding.state_dict,
    )
    if overlaps and sharding != plain:
        raise ValueError(
            f"overlap_with_ddp=True steps whole parameters in DDP's backward, so it excludes {sharding}; "
            "use overlap_with_ddp=False"
        )
    if sharding.step_in_backward and framework.autograd is None:
        raise ValueError(
            f"{sharding}: backward cannot be watched in {framework.name}; use step_in_backward=False"
        )
    if sharding.step_in_backward and not framework.is_separable(optimizer_class):
        raise ValueError(
            f"optimizer_class: {name_of(optimizer_class)} is not known to update every parameter on its own, so it "
            "cannot be run bucket by bucket; use step_in_backward=False"
        )


def take_granularities(
    framework: Framework,
    optimizer_class: Any,
    sharding: Sharding,
    groups: Sequence[dict[str, Any]],
    *,
    has_views: bool,
) -> list[str]:
    """Remove each param group's own granularity from it, so that it is no option of the wrapped optimizer.

    Args:
        framework: Knows its optimizers.
        optimizer_class: The wrapped class.
        sharding: The policy, whose granularity is that of groups without their own.
        groups: Param groups; changed.
        has_views: Whether parameters are bucket views.

    Returns:
        The granularity of each group.

    Raises:
        ValueError: One is none, or cannot be had; says what to pass instead.
    """
    taken = [group.pop("granularity", sharding.granularity) for group in groups]
    if unknown := [granularity for granularity in taken if granularity not in GRANULARITIES]:
        raise ValueError(
            f"granularity of a param group: expected one of {GRANULARITIES}, got {unknown[0]!r}"
        )
    if "element" in taken:
        _require_cuttable(framework, optimizer_class, sharding, has_views=has_views)
    return taken


def _require_cuttable(
    framework: Framework, optimizer_class: Any, sharding: Sharding, *, has_views: bool
) -> None:
    if not has_views:
        raise ValueError(
            "element granularity cuts flat buckets, of which parameters have to be views; pass "
            "parameters_as_bucket_view=True, and overlap_with_ddp=False"
        )
    is_elementwise = framework.is_elementwise(optimizer_class)
    if not is_elementwise and framework.is_separable(optimizer_class):
        raise ValueError(
            f"optimizer_class: {name_of(optimizer_class)} looks at whole parameters, so parts of them would give other "
            "results, silently; use granularity='parameter'"
        )
    if not is_elementwise and not sharding.elementwise:
        raise ValueError(
            f"optimizer_class: {name_of(optimizer_class)} is not known to update every element on its own, so parts "
            "of parameters could give other results, silently; use granularity='parameter', or vouch for it with "
            "Sharding(elementwise=True)"
        )
