"""Norms of gradients of which each rank holds what it owns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.collectives import Group
from shardopt.partition import Part

if TYPE_CHECKING:
    from torch import Tensor

Norm = Callable[[Any, float], Any]
"""(tensor, p) -> 0-dim p-norm of the tensor."""

EPSILON = 1e-6
"""Added to the norm before dividing by it, as ``torch.nn.utils.clip_grad_norm_`` does."""


def norms_of(
    group: Group,
    gradients: Mapping[int, Tensor],
    parts: Sequence[Part],
    *,
    like: Tensor,
    is_cut: Sequence[bool],
    norm_type: float,
    norm: Norm,
) -> Tensor:
    """Return the norm of each parameter's averaged gradient, (number of parameters,), equal on every rank; one all-reduce. Collective.

    The norm of a whole parameter is its owner's, to the bit. With parts the p-th powers of partial norms are added up,
    which rounds differently, by a few units in the last place.

    Args:
        group: The sharding group.
        gradients: The averages this rank holds, by parameter; those of parts are parts.
        parts: What this rank owns.
        like: A real tensor with dtype and device of the result; taken in double precision on the way.
        is_cut: For each of all parameters whether it has parts; those without gradient have norm 0.
        norm_type: p above 0, or inf.
        norm: Computes a p-norm.
    """
    is_max = norm_type == float("inf")
    norms = like.detach().new_zeros((len(is_cut),)).double()
    for part in parts:
        gradient = gradients.get(part.param)
        if gradient is not None and part.numel:
            value = norm(gradient.detach(), norm_type).double()
            norms[part.param] = value if part.is_whole or is_max else value**norm_type
    group.all_reduce(norms, maximum=is_max)
    if not is_max:
        for param in [param for param, cut in enumerate(is_cut) if cut]:
            norms[param] = norms[param] ** (1.0 / norm_type)
    return norms.to(like.dtype)


def scale_to(norm: Tensor, gradients: Iterable[Tensor], *, max_norm: float) -> None:
    """Scale gradients so that their norm, which is ``norm``, does not exceed ``max_norm``."""
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device))
