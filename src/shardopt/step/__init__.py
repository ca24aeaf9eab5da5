"""One step: agree, bring gradients, update the parameters this rank owns, exchange what changed.

``stepper`` is the order of a step after backward, ``in_backward`` that of one inside it, and ``in_ddp_backward`` that of
one inside DDP's. They are made of the same pieces: ``agreement`` compares what ranks intend before anything is updated,
``options`` keeps the hyperparameters of the whole and of the local optimizer equal, ``local_update`` runs the local
optimizer, and ``update`` notices what it changed and keeps its errors until all ranks know. ``closure`` and ``hooks`` are what users hand to
a step, ``scaling`` speaks to GradScaler, ``clipper`` clips, ``attachment`` lets a module's forward wait for parameters, and
``uneven_inputs`` gives ranks without inputs what they need to take part.
The order of collectives is the same on every rank, whatever each of them has to update.
"""

from shardopt.step.agreement import Intent, agree
from shardopt.step.attachment import Attachment, equalize_buffers
from shardopt.step.clipper import Clipper
from shardopt.step.closure import EvaluatedClosure, local_step
from shardopt.step.hooks import StepHooks
from shardopt.step.in_backward import BackwardStepper
from shardopt.step.in_ddp_backward import DDPBackwardStepper, backward_step_of
from shardopt.step.local_update import LocalUpdater
from shardopt.step.options import copy_options
from shardopt.step.scaling import LossScale
from shardopt.step.stepper import Stepper
from shardopt.step.uneven_inputs import (
    JoinMembership,
    sync_joined_gradients,
    sync_joined_options,
)
from shardopt.step.update import ShardUpdate, only_params

__all__ = [
    "Attachment",
    "BackwardStepper",
    "Clipper",
    "DDPBackwardStepper",
    "EvaluatedClosure",
    "Intent",
    "JoinMembership",
    "LocalUpdater",
    "LossScale",
    "ShardUpdate",
    "StepHooks",
    "Stepper",
    "agree",
    "backward_step_of",
    "copy_options",
    "equalize_buffers",
    "local_step",
    "only_params",
    "sync_joined_gradients",
    "sync_joined_options",
]
