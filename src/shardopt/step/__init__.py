"""One step: agree, update the parameters this rank owns, exchange what changed.

``agreement`` compares what ranks intend before anything is updated, ``reduction`` averages gradients where nobody
else does, fed by ``intake`` from autograd; ``options`` keeps the hyperparameters of the whole and of the local optimizer
equal, ``update`` runs the local optimizer and settles its errors, ``exchange`` moves the parameters. ``backward`` does
this inside backward, ``catch_up`` gives ranks without inputs what they need to take part, ``scaling`` speaks to
GradScaler, ``clipping`` takes norms.
The order of collectives is the same on every rank, whatever each of them has to update.
"""

from shardopt.step.agreement import Intent, agree
from shardopt.step.backward import (
    MSG_GRAD_SCALER,
    MSG_GRADIENTS_CHANGED,
    MSG_NOT_UPDATED_IN_BACKWARD,
    MSG_SEVERAL_UPDATES,
    BackwardStep,
)
from shardopt.step.catch_up import catch_up_gradients, catch_up_options
from shardopt.step.clipping import Norm, norms_of, scale_to
from shardopt.step.closure import EvaluatedClosure, local_step
from shardopt.step.exchange import Exchange, equalize, launch_exchange
from shardopt.step.flags import pack_flags, unpack_flags
from shardopt.step.intake import Autograd, GradientIntake
from shardopt.step.options import copy_options
from shardopt.step.reduction import GradientReducer, agree_on_gradients
from shardopt.step.scaling import LossScale
from shardopt.step.update import ShardUpdate, only_params

__all__ = [
    "MSG_GRADIENTS_CHANGED",
    "MSG_GRAD_SCALER",
    "MSG_NOT_UPDATED_IN_BACKWARD",
    "MSG_SEVERAL_UPDATES",
    "Autograd",
    "BackwardStep",
    "EvaluatedClosure",
    "Exchange",
    "GradientIntake",
    "GradientReducer",
    "Intent",
    "LossScale",
    "Norm",
    "ShardUpdate",
    "agree",
    "agree_on_gradients",
    "catch_up_gradients",
    "catch_up_options",
    "copy_options",
    "equalize",
    "launch_exchange",
    "local_step",
    "norms_of",
    "only_params",
    "pack_flags",
    "scale_to",
    "unpack_flags",
]
