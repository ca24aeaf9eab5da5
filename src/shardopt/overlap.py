"""What the DDP hooks of every framework check before they step in backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardopt.step import BackwardStep


def backward_step_of(
    zero: Any, *, ddp_params: Iterable[Any], ddp_ranks: Sequence[int], zero_ranks: Sequence[int]
) -> BackwardStep:
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
    step: BackwardStep | None = zero.backward_step
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
