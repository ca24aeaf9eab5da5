"""The policy object that holds every option of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

GRANULARITIES = ("parameter", "element")
STATE_DICTS = ("consolidated", "sharded")


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an optimizer is sharded; frozen, and equal on all ranks.

    Attributes:
        granularity: ``"parameter"``: each parameter belongs to one rank, exact for every optimizer. ``"element"``: buckets
            are cut into equal sections wherever that falls, so state is balanced to the element; for optimizers that
            update every element on its own. Needs ``parameters_as_bucket_view=True``. A param group may name its own:
            ``{"params": matrices, "granularity": "parameter"}``.
        gradients: The optimizer averages gradients itself, to their owners, each rank keeping S / N bytes of them for S
            bytes of parameters: bucket by bucket in backward where the framework allows, else at ``step()``, which
            consumes them. Parameters are made equal to those of the first rank when they are handed in. No DDP is
            needed, and none may be used. 2 S (N - 1) / N bytes per rank and step.
        step_in_backward: Update each bucket in backward, as soon as its gradients are averaged. Needs ``gradients=True``
            and an optimizer that updates each parameter on its own; leaves no room for clipping or a GradScaler.
        master_dtype: Keep the owned parts in this dtype too, and update those: ``torch.float32`` for bf16 or fp16
            parameters, which are rounded from it after each step. Parameters of this dtype have no master weights.
        reduce_dtype: In which gradients travel; by default their own.
        sum_dtype: In which received gradients are added up and kept; by default that in which they travel.
        bucket_mb: Bound on the MiB of one bucket, the unit in which parameters and gradients travel. Larger buckets mean
            fewer collectives; staging memory holds two of them, or four to six where it is shared. A parameter above the bound
            travels alone.
        shared_memory: Where all ranks that shard run on one Linux host, what travels between CPUs lies in memory that they
            share, in anonymous files, instead of going over loopback.
        state_dict: What ``state_dict()`` returns: ``"consolidated"``, the whole state that ``consolidate_state_dict()`` has
            collected, on the rank that holds it; or ``"sharded"``, this rank's own part, at any time and without
            communication.
        elementwise: Vouches that ``optimizer_class`` updates every element on its own, whatever the others are, for
            element granularity with an optimizer that is not one of the framework's.
        cost: Of a ``ParamSpec`` (``shape``, ``numel``, ``name``, ...) what its update costs, 0 or more, in any unit; whole
            parameters are packed so that ranks carry about equal sums. By default the number of elements;
            ``shardopt.newton_schulz_work`` for Muon.
    """

    granularity: Literal["parameter", "element"] = "parameter"
    gradients: bool = False
    step_in_backward: bool = False
    master_dtype: Any = None
    reduce_dtype: Any = None
    sum_dtype: Any = None
    bucket_mb: float = 25.0
    shared_memory: bool = True
    state_dict: Literal["consolidated", "sharded"] = "consolidated"
    elementwise: bool = False
    cost: Callable[[Any], float] | None = None

    def __post_init__(self) -> None:
        """Check ranges, and what excludes what."""
        if self.granularity not in GRANULARITIES:
            raise ValueError(
                f"granularity: expected 'parameter' or 'element', got {self.granularity!r}"
            )
        if self.state_dict not in STATE_DICTS:
            raise ValueError(
                f"state_dict: expected 'consolidated' or 'sharded', got {self.state_dict!r}"
            )
        if not 0 < self.bucket_mb < float("inf"):
            raise ValueError(
                f"bucket_mb: expected a finite number of MiB above 0, got {self.bucket_mb!r}"
            )
        for name in ("step_in_backward", "reduce_dtype", "sum_dtype"):
            if getattr(self, name) and not self.gradients:
                raise ValueError(
                    f"{name}={getattr(self, name)} says how gradients are reduced, which DDP does unless gradients=True; "
                    f"set that, or leave {name} out"
                )

    @property
    def bucket_nbytes(self) -> int:
        """``bucket_mb`` in bytes."""
        return max(1, int(self.bucket_mb * 2**20))

    def fingerprint(self) -> str:
        """What ranks compare: all of it but ``cost``, which is compared by what it returns."""
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self)[:-1])
