"""How the step answers ``torch.amp.GradScaler``.

For an optimizer that says ``_step_supports_amp_scaling`` the scaler calls ``step()`` also where it found an inf, with
the finding in ``found_inf`` and the scale still to be divided out in ``grad_scale``. That lets ranks agree first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardopt.collectives import Group

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossScale:
    """What a scaler left for one step.

    Attributes:
        grad_scale: 0-dim, what gradients are to be divided by, or None if that was done.
        found_inf: 0-dim, above 0 if this rank found an inf or NaN; the number 0 where it has no gradient at all; None
            without a scaler.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | int | None

    @classmethod
    def of(cls, optimizer: Any) -> LossScale:
        """Read what the scaler set on ``optimizer``."""
        attributes = vars(optimizer)
        return cls(attributes.get("grad_scale"), attributes.get("found_inf"))

    def wants_skip(self, params: Sequence[Tensor], *, in_kernel: bool) -> bool:
        """Whether this rank found an inf; the host reads it, unless a kernel will. Local."""
        if self.found_inf is None or in_kernel:
            return False
        return bool(self._found_inf(params).item())

    def fingerprint(self, *, in_kernel: bool) -> list[tuple[str, str]]:
        """The scale, for ranks to compare: gradients of different scales must not be averaged. Local.

        A scale on a GPU is not read where a kernel divides by it, so that the host waits for nothing.
        """
        if self.grad_scale is None or (in_kernel and self.grad_scale.device.type != "cpu"):
            return []
        return [("GradScaler's scale", repr(self.grad_scale.item()))]

    def apply(
        self,
        group: Group,
        local_optimizer: Any,
        gradients: Callable[[], Sequence[Tensor]],
        *,
        params: Sequence[Tensor],
        in_kernel: bool,
    ) -> None:
        """Let the scale be divided out of gradients. Collective.

        Args:
            group: The sharding group.
            local_optimizer: The wrapped optimizer; with ``in_kernel`` it gets the scale, and the finding of any rank.
            gradients: Returns those of this step; where no kernel does, they are divided here, as the scaler itself
                would do.
            params: All parameters.
            in_kernel: Whether a fused kernel divides and skips.
        """
        if self.found_inf is None:
            return
        if in_kernel:
            found_inf = self._found_inf(params)
            group.all_reduce(found_inf, maximum=True)
            local_optimizer.grad_scale = self.grad_scale
            local_optimizer.found_inf = found_inf
        else:
            self.divide(gradients)

    def divide(self, gradients: Callable[[], Sequence[Tensor]]) -> None:
        """Divide the scale out of gradients, unless the scaler has done so. Local."""
        if self.grad_scale is not None:
            inverse = self.grad_scale.double().reciprocal().float()
            for gradient in gradients():
                gradient.detach().mul_(inverse.to(gradient.device))

    def _found_inf(self, params: Sequence[Tensor]) -> Tensor:
        """The finding as a tensor; on a rank without any gradient a scaler leaves the number 0."""
        if isinstance(self.found_inf, (int, float)):
            return params[0].detach().new_zeros(()).abs().float() + self.found_inf
        assert self.found_inf is not None
        return self.found_inf

    def take_back(self, local_optimizer: Any) -> None:
        """Leave nothing of this step on the local optimizer."""
        self.forget(local_optimizer)

    @staticmethod
    def forget(optimizer: Any) -> None:
        """Remove what a scaler set on an optimizer."""
        vars(optimizer).pop("grad_scale", None)
        vars(optimizer).pop("found_inf", None)
