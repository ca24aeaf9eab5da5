"""What an exchange may ask of a bucket, whether its parameters are copied or are views of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shardopt.partition import Bucket

if TYPE_CHECKING:
    from torch import Tensor


class OpenBucket(Protocol):
    """Some sections of a bucket as flat tensors, while they travel."""

    def outgoing(self, rank: int) -> Tensor:
        """(N,) the parameters that ``rank`` owns in this bucket, as they are now."""

    def incoming(self, rank: int) -> Tensor:
        """(N,) to be filled with the parameters that ``rank`` owns in this bucket."""

    def close(self, received: Sequence[int]) -> None:
        """Put the sections of the ranks in ``received`` into the parameters, and let go of the memory."""


class ParamBucket(Protocol):
    """One bucket of a layout, bound to the parameters it holds."""

    plan: Bucket

    def open(self, ranks: Sequence[int]) -> OpenBucket:
        """Prepare the sections of ``ranks``, none of them empty, to travel."""

    def reattach(self) -> list[int]:
        """Make sure that the bucket still stands for its parameters, whatever was assigned to ``param.data``.

        Returns:
            The parameters that had moved.
        """

    def restore(self) -> None:
        """Give its parameters memory of their own, with the values they have now."""
