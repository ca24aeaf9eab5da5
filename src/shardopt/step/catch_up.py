"""Give ranks that ran out of inputs what they need to update their shards.

Such a rank owns a part of the parameters, so the others cannot step without it, but it has neither this step's
gradients nor the current options. The lowest active rank sends it both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardopt.collectives import Group
from shardopt.step.agreement import Intent
from shardopt.step.options import options_of

if TYPE_CHECKING:
    from torch import Tensor


def catch_up(
    group: Group,
    intent: Intent,
    *,
    param_groups: Sequence[dict[str, Any]],
    params: Sequence[Tensor],
    owners: Sequence[int],
) -> None:
    """Bring options and gradients from the lowest active rank to the owners that joined. Collective.

    Afterwards ``param.grad`` of each parameter owned by a joined rank is, on that rank, what it is on the lowest active
    rank, None included; with DDP that is the averaged gradient. Without joined ranks nothing happens.

    Args:
        group: The sharding group.
        intent: What the ranks agreed on.
        param_groups: The whole optimizer's groups; on joined ranks their options are replaced.
        params: All parameters.
        owners: The owner of each.
    """
    if not intent.joined:
        return
    source = intent.active[0]
    briefing = None
    if group.rank == source:
        briefing = ([options_of(g) for g in param_groups], [_kind(param.grad) for param in params])
    options, kinds = group.all_gather_object(briefing)[source]
    if "sparse" in (
        kind for kind, owner in zip(kinds, owners, strict=True) if owner in intent.joined
    ):
        raise ValueError(
            "Join: a rank without inputs owns a parameter with a sparse gradient, which cannot be sent to it; use "
            "dense gradients (nn.Embedding(sparse=False)) or even inputs"
        )
    if group.rank in intent.joined:
        for param_group, theirs in zip(param_groups, options, strict=True):
            param_group.update(theirs)
    for index, owner in enumerate(owners):
        if owner in intent.joined:
            _send_gradient(group, params[index], kinds[index] is not None, src=source, dst=owner)


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
