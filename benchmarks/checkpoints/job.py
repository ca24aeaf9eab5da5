"""What one launch measures, as the driver tells it to the worker."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.train_step.models import MODELS, Shape

SHAPES = {**MODELS, "tiny": Shape(layers=2, width=48, heads=2, vocabulary=512, positions=64)}
"""Of the models; the tiny one is there to try this benchmark."""


@dataclass(frozen=True)
class Job:
    """One launch.

    Attributes:
        variant: A name of ``variants.VARIANTS``.
        model: A name of ``SHAPES``.
        granularity: Of shardopt's optimizer.
        folder: Where the worker leaves its result.
        output: An empty folder, for what the variant saves.
        source: What the variant loads; one that saves has none.
    """

    variant: str
    model: str
    granularity: str
    folder: str
    output: str
    source: str = ""

    @property
    def result_path(self) -> Path:
        """Where rank 0 writes what was measured."""
        return Path(self.folder) / "result.json"

    def error_path(self, rank: int) -> Path:
        """Where a rank writes why it failed."""
        return Path(self.folder) / f"error-{rank}.json"

    def dumps(self) -> str:
        """As one argument of a command."""
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> Job:
        """Read what ``dumps`` wrote."""
        values: dict[str, Any] = json.loads(text)
        return Job(**values)
