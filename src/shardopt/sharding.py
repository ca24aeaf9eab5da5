"""The policy object that holds every option of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an optimizer is sharded; frozen, and equal on all ranks.

    Attributes:
        granularity: ``"parameter"``: each parameter belongs to one rank, exact for every optimizer. ``"element"``: buckets
            are cut into equal sections wherever that falls, so state is balanced to the element; for optimizers that
            update every element on its own. Needs ``parameters_as_bucket_view=True``.
        gradients: The optimizer averages gradients itself: each rank's own ones are reduced to their owners at
            ``step()``, which consumes them, and parameters are made equal to those of the first rank when they are
            handed in. No DDP is needed, and none may be used. 2 S (N - 1) / N bytes per rank and step, with S bytes of
            parameters.
        bucket_mb: Bound on the MiB of one bucket, the unit in which parameters and state travel. Larger buckets mean
            fewer collectives; staging buffers hold two of them. A parameter above the bound travels alone.
    """

    granularity: Literal["parameter", "element"] = "parameter"
    gradients: bool = False
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        """Check ranges."""
        if self.granularity not in ("parameter", "element"):
            raise ValueError(
                f"granularity: expected 'parameter' or 'element', got {self.granularity!r}"
            )
        if not 0 < self.bucket_mb < float("inf"):
            raise ValueError(
                f"bucket_mb: expected a finite number of MiB above 0, got {self.bucket_mb!r}"
            )

    @property
    def bucket_nbytes(self) -> int:
        """``bucket_mb`` in bytes."""
        return max(1, int(self.bucket_mb * 2**20))
