"""How the step answers ``torch.amp.GradScaler``.

For an optimizer that says ``_step_supports_amp_scaling`` the scaler calls ``step()`` also where it found an inf, with
the finding in ``found_inf`` and the scale still to be divided out in ``grad_scale``. That lets ranks agree first.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        found_inf: 0-dim, above 0 if this rank found an inf or NaN; None without a scaler.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None

    @classmethod
    def of(cls, optimizer: Any) -> LossScale:
        """Read what the scaler set on ``optimizer``."""
        attributes = vars(optimizer)
        return cls(attributes.get("grad_scale"), attributes.get("found_inf"))

    def hand_over(
        self, group: Group, local_optimizer: Any, params: Sequence[Tensor], *, in_kernel: bool
    ) -> bool:
        """Prepare the local optimizer for this step; returns whether this rank wants it skipped. Collective.

        A fused optimizer can divide and skip inside its kernel: it gets both tensors, with the finding of any rank,
        and the host waits for nothing. For any other the gradients are divided here and the finding is read, as
        the scaler itself would do.

        Args:
            group: The sharding group.
            local_optimizer: The wrapped optimizer.
            params: All parameters.
            in_kernel: Whether to let a fused optimizer do it; equal on every rank. Not where ranks without inputs
                take part, since they have no scaler.
        """
        if self.found_inf is None:
            return False
        if in_kernel and getattr(local_optimizer, "_step_supports_amp_scaling", False):
            group.all_reduce(self.found_inf, maximum=True)
            local_optimizer.grad_scale = self.grad_scale
            local_optimizer.found_inf = self.found_inf
            return False
        if self.grad_scale is not None:
            inverse = self.grad_scale.double().reciprocal().float()
            for param in params:
                if param.grad is not None:
                    param.grad.detach().mul_(inverse.to(param.grad.device))
        return bool(self.found_inf.item())

    def take_back(self, local_optimizer: Any) -> None:
        """Leave nothing of this step on the local optimizer."""
        vars(local_optimizer).pop("grad_scale", None)
        vars(local_optimizer).pop("found_inf", None)
