"""What the user asked for, read once and checked before anything depends on it.

``param_groups`` reads ``params``, whatever iterables it is made of; ``compatibility`` says which arguments exclude each
other, and what to pass instead.
"""

from shardopt.arguments.compatibility import (
    name_of,
    policy_fingerprint,
    require_possible,
    take_granularities,
)
from shardopt.arguments.param_groups import read_param_group, read_param_groups, read_specs

__all__ = [
    "name_of",
    "policy_fingerprint",
    "read_param_group",
    "read_param_groups",
    "read_specs",
    "require_possible",
    "take_granularities",
]
