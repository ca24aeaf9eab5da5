"""``step()``, and what else the wrapped optimizer does for the whole one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardopt.errors import OverlapError
from shardopt.optimizer.base import OptimizerBase
from shardopt.step import DDPBackwardStepper, LossScale, local_step


class StepMethods(OptimizerBase):
    """The step, after backward or as the confirmation of one inside it."""

    _step_supports_amp_scaling = True
    """Makes GradScaler call ``step()`` also where it found an inf, so that ranks agree on it; see step/scaling.py."""

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Perform one step and bring every replica to the same parameters. Collective.

        Args:
            closure: Computes the loss and its gradients. Evaluated once, before any rank updates.
            **kwargs: Passed on to the local optimizer's ``step()``.

        Returns:
            What the local optimizer's ``step()`` returned; with ``overlap_with_ddp=True`` the closure's loss.

        Raises:
            RankMismatchError: Options such as the learning rate differ between ranks; nothing was updated.
            ParameterChangedError: A parameter changed its shape or dtype; nothing was updated.
            RemoteRankError: The local optimizer of another rank raised. The replicas are equal all the same.
            OverlapError: With ``overlap_with_ddp=True``: no update was made in backward, or gradients were changed after.
        """
        self._is_fresh = False
        if self._pieces.steps_in_backward:
            if kwargs:
                raise OverlapError(
                    f"step() has made its update in backward, so {sorted(kwargs)} come too late"
                )
            loss = self._evaluate(closure)
            self._confirm(LossScale.of(self))
            return loss
        return self._hooked_step(*([] if closure is None else [closure]), **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # Note [Step hooks]
    """Note [Step hooks]: the framework wraps ``step`` of a class that has no attribute ``hooked`` in what fires step
    hooks and the profiler label. A step inside backward fires hooks where it updates, not where ``step()`` confirms it,
    so here that wrapper goes around ``_step_after_backward`` instead: each front makes ``_hooked_step`` that way."""

    _hooked_step: Callable[..., Any]

    @property
    def backward_step(self) -> DDPBackwardStepper | None:
        """What a hook on DDP drives; None without ``overlap_with_ddp``."""
        return self._pieces.backward_step

    def _confirm(self, scale: LossScale) -> None:
        reduction = self._pieces.reduction
        if self.backward_step is not None:
            self.backward_step.confirm(scale)
        elif reduction is not None and reduction.stepper is not None:
            try:
                reduction.stepper.confirm(scale, reduction.finalizer)
            finally:
                reduction.hooks.watch()

    def _step_after_backward(self, closure: Any = None, **kwargs: Any) -> Any:
        work = self.framework.notify_join(self)
        if work is not None:
            work.wait()
        loss, error = None, None
        try:
            loss = self._evaluate(closure)
        except Exception as raised:
            error = raised
        try:
            return self._pieces.stepper.step(
                local_step(self.optim, closure, loss, self.shards.versions, kwargs),
                scale=LossScale.of(self),
                is_in_join=self._membership.is_active(),
                error=error,
            )
        except Exception:
            LossScale.forget(self)  # a GradScaler removes them only after a step that returns
            raise
        finally:
            if self._pieces.reduction is not None:
                self._pieces.reduction.hooks.watch()

    def _evaluate(self, closure: Any) -> Any:
        with self.framework.enable_grad():
            return closure() if callable(closure) else None
