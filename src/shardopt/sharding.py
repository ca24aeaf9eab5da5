"""The policy object that holds every option of ours."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an optimizer is sharded; frozen, and equal on all ranks.

    Attributes:
        bucket_mb: Bound on the MiB of one bucket, the unit in which parameters and state travel. Larger buckets mean
            fewer collectives; staging buffers hold two of them. A parameter above the bound travels alone.
    """

    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        """Check ranges."""
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb: expected a number of MiB above 0, got {self.bucket_mb!r}")

    @property
    def bucket_nbytes(self) -> int:
        """``bucket_mb`` in bytes."""
        return max(1, int(self.bucket_mb * 2**20))
