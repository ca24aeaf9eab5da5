"""Give ranks that ran out of inputs what they need to update their shards.

Such a rank owns a part of the parameters, so the others cannot step without it, but it has neither this step's
gradients nor the current options. The lowest active rank sends it both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.collectives import Group, options_of
from shardopt.partition import Part
from shardopt.step.agreement import Intent

if TYPE_CHECKING:
    from torch import Tensor


class JoinMembership:
    """Whether the optimizer is within ``Join``, as the framework's ``Join`` tells it."""

    def __init__(self) -> None:
        """Be outside of it."""
        self.config: Any = None

    def is_active(self) -> bool:
        """Whether other ranks may have run out of inputs."""
        return self.config is not None and bool(self.config.enable)

    def leave(self) -> None:
        """Be outside of it again."""
        self.config = self.config._replace(enable=False)


def sync_joined_options(
    group: Group, intent: Intent, param_groups: Sequence[dict[str, Any]]
) -> None:
    """Make the options of joined ranks those of the lowest active rank. Collective; nothing without joined ranks."""
    if not intent.joined:
        return
    options = group.all_gather_object([options_of(g) for g in param_groups])[intent.active[0]]
    if group.rank in intent.joined:
        for param_group, theirs in zip(param_groups, options, strict=True):
            param_group.update(theirs)


def sync_joined_gradients(
    group: Group,
    intent: Intent,
    params: Sequence[Tensor],
    parts_by_rank: Mapping[int, Sequence[Part]],
) -> None:
    """Bring gradients from the lowest active rank to the joined ranks that own their parameters. Collective.

    Afterwards ``param.grad`` of each parameter that a joined rank owns, or owns a part of, is on that rank what it is on
    the lowest active rank, None included; with DDP that is the averaged gradient. Nothing without joined ranks.

    Args:
        group: The sharding group.
        intent: What the ranks agreed on.
        params: All parameters.
        parts_by_rank: What each joined rank owns.

    Raises:
        ValueError: On every rank: a gradient that would have to be sent is sparse.
    """
    if not intent.joined:
        return
    source = intent.active[0]
    kinds = group.all_gather_object([_kind(param.grad) for param in params])[source]
    if any(kinds[part.param] == "sparse" for parts in parts_by_rank.values() for part in parts):
        raise ValueError(
            "Join: a rank without inputs owns a parameter with a sparse gradient, which cannot be sent to it; use "
            "dense gradients (nn.Embedding(sparse=False)) or even inputs"
        )
    for rank, parts in parts_by_rank.items():
        for part in parts:
            has_gradient = kinds[part.param] is not None
            _send_gradient(group, params[part.param], has_gradient, src=source, dst=rank)


def _kind(gradient: Tensor | None) -> str | None:
    """What the others need to know of a gradient before it is sent."""
    if gradient is None:
        return None
    return "sparse" if getattr(gradient, "is_sparse", False) else "dense"


def _send_gradient(group: Group, param: Tensor, has_gradient: bool, *, src: int, dst: int) -> None:
    """Make ``param.grad`` at ``dst`` what it is at ``src``."""
    if group.rank == dst:
        if not has_gradient:
            param.grad = None
            return
        received = param.detach().new_empty((param.numel(),), device="cpu")
        group.recv(received, src=src).wait()
        if param.grad is None:
            param.grad = param.detach().clone()
        param.grad.copy_(received.view(param.shape))
    elif group.rank == src and param.grad is not None:
        group.send(param.grad.detach().cpu().contiguous().view(-1), dst=dst).wait()
