"""What one launch measures, as the driver tells it to the worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class Unavailable(Exception):  # noqa: N818 - the variant is, which is no error
    """A variant cannot be measured with what is installed here."""


@dataclass(frozen=True)
class Settings:
    """One launch.

    Attributes:
        variant: A name of ``variants.VARIANTS``, or ``EXCHANGE``.
        model: A name of ``models.MODELS``.
        ranks: Number of processes.
        warmup: Steps between the check and the timed ones.
        steps: Timed steps.
        check_steps: Steps after which parameters are compared; they come first, and warm up too.
        dtype: Of the model: ``float32`` or ``bfloat16``.
        bucket_mb: Of the variants of shardopt.
        folder: Where the worker leaves its result, and the first launch of the reference its parameters.
    """

    variant: str
    model: str
    ranks: int
    warmup: int
    steps: int
    check_steps: int
    dtype: str
    bucket_mb: float
    folder: str

    @property
    def result_path(self) -> Path:
        """Where rank 0 writes what was measured."""
        return Path(self.folder) / "result.json"

    @property
    def reference_path(self) -> Path:
        """Parameters of the reference after ``check_steps``."""
        return Path(self.folder) / "reference.pt"

    def error_path(self, rank: int) -> Path:
        """Where a rank writes why it failed."""
        return Path(self.folder) / f"error-{rank}.json"

    def dumps(self) -> str:
        """As one argument of a command."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Settings:
        """Read what ``dumps`` wrote."""
        values: dict[str, Any] = json.loads(text)
        return Settings(**values)


EXCHANGE = "exchange"
"""The launch that measures the parts of the exchange limit."""

REFERENCE = "ddp"
"""The variant whose parameters all are compared with."""
