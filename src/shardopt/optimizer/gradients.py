"""What users do with gradients between backward and step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardopt.errors import MSG_GRADIENTS_CHANGED, OverlapError
from shardopt.optimizer.base import OptimizerBase


class GradientMethods(OptimizerBase):
    """Reset, clip and accumulate gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, as the framework's ``Optimizer`` does. Local."""
        if self._pieces.backward_step is not None:
            self._pieces.backward_step.before_zero_grad()
        reduction = self._pieces.reduction
        if reduction is not None:
            reduction.finalizer.forget(after_step=False)
            reduction.hooks.watch()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Any:
        """Scale the gradients of all parameters so that their total norm is at most ``max_norm``. Collective.

        With ``Sharding(gradients=True)`` this reduces them, which ``step()`` then need not do. The framework's own function
        would see this rank's gradients only, before they are averaged. Otherwise it is the framework's own function.

        Args:
            max_norm: The largest norm allowed.
            norm_type: p of the p-norm, above 0, or inf.
            error_if_nonfinite: Raise if the norm is inf or NaN.

        Returns:
            The norm before scaling, 0-dim, equal on all ranks.

        Raises:
            RuntimeError: As asked for with ``error_if_nonfinite``, on every rank.
            OverlapError: With ``overlap_with_ddp=True``: the update has been made already.
        """
        if self._pieces.steps_in_backward:
            raise OverlapError(MSG_GRADIENTS_CHANGED)
        reduction = self._pieces.reduction
        if reduction is None:
            return self.framework.clip_grad_norm(
                self.shards.params, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        return reduction.clipper.clip(
            reduction.finalizer, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of every backward within the block add up on this rank, unreduced. Local.

        The next backward outside of it reduces them together with its own, or else ``step()`` does: less traffic, at the
        price of whole gradients in the meantime. With gradients that DDP averages, use DDP's own.

        Raises:
            RuntimeError: This optimizer does not reduce gradients.
        """
        if self._pieces.reduction is None:
            raise RuntimeError(
                "no_sync() of an optimizer that does not reduce gradients; use that of DDP, or Sharding(gradients=True)"
            )
        with self._pieces.reduction.hooks.pause():
            yield
