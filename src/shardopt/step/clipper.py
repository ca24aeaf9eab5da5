"""Clips gradients that are sharded, by their total norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.collectives import Group
from shardopt.gradients import GradientFinalizer, Norm, ReducedGradients, norms_of, scale_to
from shardopt.shards import Shards
from shardopt.step.agreement import agree

if TYPE_CHECKING:
    from torch import Tensor


class Clipper:
    """Takes norms over the averages that all ranks hold together, and scales them."""

    def __init__(
        self,
        group: Group,
        shards: Shards,
        gradients: ReducedGradients,
        norm: Norm,
        *,
        param_groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Bind the pieces; ``norm`` computes that of one tensor as the framework's own clipping does."""
        self._group = group
        self._shards = shards
        self._gradients = gradients
        self._norm = norm
        self._param_groups = param_groups

    def norms(self, norm_type: float, used: Sequence[bool]) -> Tensor:
        """The norm of each parameter's average, (number of parameters,), 0 for those not ``used``. Collective."""
        return norms_of(
            self._group,
            self._gradients.held_of_all(used),
            self._shards.parts,
            like=self._like(),
            is_cut=[spec.is_cut for spec in self._shards.specs],
            norm_type=norm_type,
            norm=self._norm,
        )

    def clip(
        self,
        finalizer: GradientFinalizer,
        max_norm: float,
        norm_type: float,
        *,
        error_if_nonfinite: bool,
    ) -> Any:
        """Scale gradients to a total norm of at most ``max_norm``; returns the norm before. Collective.

        Raises:
            RuntimeError: On every rank, if asked for: the norm is inf or NaN; nothing was scaled.
            ValueError: ``norm_type`` is not above 0.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type: expected a number above 0, or inf, got {norm_type!r}")
        agree(
            self._group,
            self._param_groups,
            error=self._find_error(),
            fingerprint=[("max_norm", repr(max_norm)), ("norm_type", repr(norm_type))],
            extra=finalizer.report(),
            on_extra=finalizer.finalize,
        )
        finalizer.complete()
        used = finalizer.reducer.used
        norms = self.norms(norm_type, used)
        counted = [index for index, is_used in enumerate(used) if is_used]
        total = self._norm(norms[counted], norm_type) if counted else norms.sum()
        if error_if_nonfinite and not (total - total == 0).item():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {total.item()}; "
                "pass error_if_nonfinite=False to clip all the same"
            )
        scale_to(total, self._gradients.held_of_all(used).values(), max_norm=max_norm)
        return total

    def _find_error(self) -> Exception | None:
        try:
            self._shards.require_intact()
        except Exception as raised:
            return raised
        return None

    def _like(self) -> Tensor:
        """A real tensor of the dtype in which norms are taken: that of all gradients, or float32 where they differ."""
        shards = [bucket.shard for bucket in self._shards.gradient_buckets]
        if not shards:
            return self._shards.params[0].detach().abs()
        is_uniform = len({str(shard.dtype) for shard in shards}) == 1
        like = shards[0].new_zeros((1,)).abs()
        return like if is_uniform else like.float()
