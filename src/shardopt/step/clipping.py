"""Clip gradients by their total norm, where each rank holds those of what it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.collectives import Group
from shardopt.partition import ParamSpec, Part

if TYPE_CHECKING:
    from torch import Tensor

Norm = Callable[[Any, float], Any]
"""(tensor, p) -> 0-dim p-norm of the tensor."""

EPSILON = 1e-6
"""Added to the norm before dividing by it, as ``torch.nn.utils.clip_grad_norm_`` does."""


def total_norm(
    group: Group,
    params: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    parts: Sequence[Part],
    tensors: Mapping[int, Tensor],
    *,
    used: Sequence[bool],
    norm_type: float,
    norm: Norm,
) -> Tensor:
    """Return the norm of the norms of all averaged gradients, equal on every rank. Collective.

    With whole parameters it is bitwise what ``clip_grad_norm_`` computes of the unsharded gradients (of one dtype): each
    parameter's norm is computed by its owner, and every rank takes the norm of all of them in the order of parameters.
    With parts of parameters the p-th powers of partial norms are added up, which rounds differently, by a few units in
    the last place.

    Args:
        group: The sharding group.
        params: All parameters; say dtype and device of the result.
        specs: Their facts.
        parts: What this rank owns.
        tensors: What its local optimizer updates, with the averaged gradients.
        used: For each parameter whether it has a gradient.
        norm_type: p above 0, or inf.
        norm: Computes a p-norm.
    """
    is_max = norm_type == float("inf")
    norms = params[0].detach().new_zeros((len(params),)).abs().double()
    for part in parts:
        gradient = tensors[part.param].grad
        if gradient is not None and part.numel:
            value = norm(gradient.detach(), norm_type).double()
            norms[part.param] = value if part.is_whole or is_max else value**norm_type
    group.all_reduce(norms, maximum=is_max)
    if not is_max and not all(part.is_whole for part in parts):
        norms = norms ** (1.0 / norm_type)
    counted = norms[[index for index, is_used in enumerate(used) if is_used]]
    total: Tensor = norm(_in_gradient_dtype(counted, params, specs), norm_type)
    return total


def _in_gradient_dtype(
    norms: Tensor, params: Sequence[Tensor], specs: Sequence[ParamSpec]
) -> Tensor:
    """Norms in the dtype in which they were computed, so that the norm of norms rounds as it does unsharded."""
    is_uniform = len({spec.dtype for spec in specs}) == 1
    if is_uniform and not params[0].is_complex():
        return norms.to(params[0].dtype)
    return norms.float()


def scale_to(norm: Tensor, tensors: Mapping[int, Tensor], *, max_norm: float) -> None:
    """Scale the gradients so that their norm, which is ``norm``, does not exceed ``max_norm``."""
    factor = (max_norm / (norm + EPSILON)).clamp(max=1.0)
    for tensor in tensors.values():
        if tensor.grad is not None:
            tensor.grad.detach().mul_(factor.to(tensor.grad.device))
