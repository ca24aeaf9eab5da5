"""What every rank says of its gradients before a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardopt.collectives import pack_flags, unpack_flags


@dataclass(frozen=True, slots=True)
class GradientReport:
    """The gradients of one rank since the last step.

    Attributes:
        num_rounds: Rounds of reductions it has taken part in.
        num_dropped: How often it has dropped gradients that had been reduced.
        present: For each parameter whether a round has taken a gradient of this rank.
        is_late: For each parameter whether this rank has a gradient that no round has taken.
    """

    num_rounds: int
    num_dropped: int
    present: Sequence[bool]
    is_late: Sequence[bool]

    def pack(self) -> list[int]:
        """As integers, equally many on every rank."""
        flags = [*pack_flags(self.present), *pack_flags(self.is_late)]
        return [self.num_rounds, self.num_dropped, *flags]

    @staticmethod
    def unpack(ints: Sequence[int], num_params: int) -> GradientReport:
        """Undo ``pack``."""
        num_rounds, num_dropped, *flags = ints
        num_ints = len(pack_flags([False] * num_params))
        return GradientReport(
            num_rounds,
            num_dropped,
            unpack_flags(flags[:num_ints], num_params),
            unpack_flags(flags[num_ints:], num_params),
        )


def late_anywhere(reports: Sequence[GradientReport]) -> list[bool]:
    """For each parameter whether any rank has a gradient that no round has taken."""
    return [any(flags) for flags in zip(*(report.is_late for report in reports), strict=True)]


def used_anywhere(reports: Sequence[GradientReport]) -> list[bool]:
    """For each parameter whether any rank has a gradient at all."""
    present = zip(*(report.present for report in reports), strict=True)
    return [any(f) or late for f, late in zip(present, late_anywhere(reports), strict=True)]
