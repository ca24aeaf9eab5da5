"""The exceptions of shardopt: each is also the builtin kind that a caller would already catch."""

from __future__ import annotations


class ShardoptError(Exception):
    """Base of every exception that shardopt defines."""


class RankMismatchError(ShardoptError, ValueError):
    """Ranks were given different things where they must be given equal ones; raised on every rank."""


class RemoteRankError(ShardoptError, RuntimeError):
    """Another rank of the group failed, so this one stops too; the failing rank raises its own exception."""


class NotConsolidatedError(ShardoptError, RuntimeError):
    """``state_dict()`` was called on a rank that holds no consolidated state."""


class StateMismatchError(ShardoptError, ValueError):
    """A state dict does not fit the optimizer it was given to; nothing was loaded."""


class CheckpointError(ShardoptError, ValueError):
    """A file is no checkpoint, was cut short, is damaged, or was written by something else; nothing was loaded."""


class ParameterChangedError(ShardoptError, RuntimeError):
    """A parameter has another shape, dtype or device than when the optimizer was made."""


class OverlapError(ShardoptError, RuntimeError):
    """Something was asked of an optimizer that steps inside backward which only works outside of it."""


MSG_NOT_UPDATED = (
    "step() with overlap_with_ddp=True found that no update happened in backward since the last one; register "
    "ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero)), and call step() only after a "
    "backward outside of ddp.no_sync()"
)
MSG_NOT_UPDATED_IN_BACKWARD = (
    "step() with Sharding(step_in_backward=True) found that no update happened in backward since the last one; call it "
    "only after a backward outside of no_sync() that reaches a parameter of this optimizer"
)
MSG_SEVERAL_UPDATES = (
    "{num} updates were made in backward since the last step(); with overlap_with_ddp=True or step_in_backward=True "
    "every backward updates, so run all but the last of those that belong to one step under no_sync()"
)
MSG_GRADIENTS_CHANGED = (
    "gradients were changed between backward and step(), but with overlap_with_ddp=True or step_in_backward=True the "
    "update has happened in backward, without that change; clip or scale gradients in the communication hook that is "
    "given to hook_with_zero_step, or update at step(), with both of them False"
)
MSG_GRAD_SCALER = (
    "GradScaler unscales gradients between backward and step(), but with overlap_with_ddp=True or step_in_backward=True "
    "the update has happened in backward, with scaled gradients; use bfloat16, which needs no scaler, or update at "
    "step(), with both of them False"
)
