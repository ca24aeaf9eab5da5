"""How gradients are averaged to their owners, where no DDP does it.

``hooks`` takes what arrives from backward, ``reducer`` runs the collective rounds, ``finalizer`` opens and closes them and
brings all ranks to the same gradients before a step, by the ``report`` of each. ``placeholders`` are what ``param.grad``
is meanwhile, ``norms`` takes norms of what ranks hold in parts, and ``sources`` hands the update its gradients, whoever
averaged them.
This room moves gradients; it updates nothing. A diagram of its states stands in ``docs/design.md``.
"""

from shardopt.gradients.finalizer import GradientFinalizer, StepInBackward
from shardopt.gradients.hooks import BackwardHooks
from shardopt.gradients.norms import Norm, norms_of, scale_to
from shardopt.gradients.placeholders import GradientPlaceholders
from shardopt.gradients.reducer import GradientReducer
from shardopt.gradients.report import GradientReport, late_anywhere
from shardopt.gradients.sources import AveragedGradients, GradientSource, ReducedGradients

__all__ = [
    "AveragedGradients",
    "BackwardHooks",
    "GradientFinalizer",
    "GradientPlaceholders",
    "GradientReducer",
    "GradientReport",
    "GradientSource",
    "Norm",
    "ReducedGradients",
    "StepInBackward",
    "late_anywhere",
    "norms_of",
    "scale_to",
]
