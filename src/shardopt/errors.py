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


class ParameterChangedError(ShardoptError, RuntimeError):
    """A parameter has another shape, dtype or device than when the optimizer was made."""


class OverlapError(ShardoptError, RuntimeError):
    """Something was asked of an optimizer that steps inside backward which only works outside of it."""
