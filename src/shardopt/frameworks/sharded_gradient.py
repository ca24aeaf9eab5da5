"""What ``param.grad`` is in torch while its values lie sharded over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten


class GradientSource(Protocol):
    """Where the gradient really is."""

    def part(self, index: int) -> Tensor | None:
        """This rank's part of gradient ``index``, to be changed; None where it has none. Collective."""

    def norm(self, index: int, norm_type: float) -> Tensor:
        """The p-norm of gradient ``index``, equal on all ranks. Collective."""

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Replace ``tensor`` by its maximum over ranks. Collective."""


class ShardedGradient(torch.Tensor):
    """A gradient of which this rank holds a part, in the shape of its parameter and without memory of its own.

    It can be clipped by norm or value, unscaled, scaled and zeroed, by what torch has for that, on all ranks alike: each
    acts on its part, and norms and the search for inf go over all ranks. Anything else raises.
    """

    _index: int
    _source: GradientSource

    @staticmethod
    def __new__(
        cls: type[ShardedGradient], param: Tensor, source: GradientSource, index: int
    ) -> ShardedGradient:
        """Stand in for the gradient ``index`` of ``source``, which is that of ``param``."""
        made: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device
        )
        made._index = index
        made._source = source
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise _refusal("copy.deepcopy()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refusal("pickling")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handle = HANDLERS.get(func)
        if handle is None:
            raise _refusal(str(func))
        return handle(func, args, kwargs or {})

    def part(self) -> Tensor | None:
        """This rank's part. Collective."""
        return self._source.part(self._index)


def _refusal(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} on a gradient that is sharded over ranks (Sharding(gradients=True)): between backward and step() each "
        "rank holds a part of the average only; clip with torch.nn.utils.clip_grad_norm_() or "
        "optimizer.clip_grad_norm_(), read norm() on all ranks, scale in place, or read gradients in a tensor hook "
        "(param.register_hook) before they are averaged; and do not wrap the model in DistributedDataParallel"
    )


def _local(values: Sequence[Any]) -> list[Tensor]:
    """Each gradient's part on this rank, if it has one; ordinary tensors as they are."""
    parts = [v.part() if isinstance(v, ShardedGradient) else v for v in values]
    return [part for part in parts if part is not None]


def _in_place(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Change each element on its own."""
    if any(isinstance(arg, ShardedGradient) for arg in args[1:]):
        raise _refusal(f"{func} of two of them")
    part = args[0].part()
    if part is not None and part.numel():
        func(part, *args[1:], **kwargs)
    return args[0]


def _in_place_each(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Change each element of each gradient in a list on its own."""
    if any(isinstance(arg, (list, tuple)) for arg in args[1:]):
        raise _refusal(f"{func} with a list of factors")
    if parts := _local(args[0]):
        func(parts, *args[1:], **kwargs)


def _unscale(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Multiply by a factor and note whether any rank has an inf or NaN."""
    gradients, found_inf, inverse_scale = args
    if parts := _local(gradients):
        func(parts, found_inf, inverse_scale)
    sharded = next(g for g in gradients if isinstance(g, ShardedGradient))
    sharded._source.all_reduce_max(found_inf)


def _norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Take the norm of all elements."""
    gradient, norm_type = args[0], args[1] if len(args) > 1 else 2
    if args[2:3] not in ((), (None,)) or kwargs.get("dim") is not None:
        raise _refusal(f"{func} along some dimensions")
    total: Tensor = gradient._source.norm(gradient._index, float(norm_type))
    return total


def _norm_each(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Take the norm of each gradient in a list."""
    norm_type = args[1] if len(args) > 1 else 2
    return [
        g._source.norm(g._index, float(norm_type))
        if isinstance(g, ShardedGradient)
        else torch.linalg.vector_norm(g, norm_type)
        for g in args[0]
    ]


def _same(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> ShardedGradient:
    gradient = args[0]
    return ShardedGradient(gradient, gradient._source, gradient._index)


HANDLERS: dict[Any, Callable[[Any, Sequence[Any], dict[str, Any]], Any]] = {
    aten.detach.default: _same,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _norm_each,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    **dict.fromkeys(
        [
            aten.mul_.Tensor,
            aten.mul_.Scalar,
            aten.div_.Tensor,
            aten.div_.Scalar,
            aten.neg_.default,
            aten.zero_.default,
            aten.clamp_.default,
            aten.clamp_min_.default,
            aten.clamp_max_.default,
            aten.nan_to_num_.default,
        ],
        _in_place,
    ),
    **dict.fromkeys(
        [
            aten._foreach_mul_.Scalar,
            aten._foreach_mul_.Tensor,
            aten._foreach_div_.Scalar,
            aten._foreach_div_.Tensor,
            aten._foreach_zero_.default,
            aten._foreach_clamp_min_.Scalar,
            aten._foreach_clamp_max_.Scalar,
            aten._foreach_maximum_.Scalar,
            aten._foreach_minimum_.Scalar,
        ],
        _in_place_each,
    ),
}
"""What can be done to gradients of which each rank has a part."""
