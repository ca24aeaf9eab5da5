"""Hyperparameters: the param groups of the whole optimizer are the truth, the local optimizer's follow.

Between steps users and schedulers write to the whole optimizer's groups; during a step the local optimizer may write
to its own (schedule-free keeps its counters there). So options flow to the local groups before it runs and back after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardopt.collectives import options_of


def copy_options(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Set each option in ``source`` in ``target`` too, group by group; values are shared, not copied."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update(options_of(theirs))
