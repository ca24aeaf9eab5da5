"""The closure that the local optimizer is given: already evaluated, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class EvaluatedClosure:
    """Returns a loss that was computed before the local optimizer ran.

    A closure runs a forward and backward pass with all parameters on all ranks, so it is evaluated once, before any
    rank updates. An optimizer that wants more than that (line search, or parameters moved before the evaluation)
    would compute with replicas that differ, and is stopped here.
    """

    def __init__(self, loss: Any, versions: Callable[[], list[int]]) -> None:
        """Remember the loss and the versions of this rank's parameters."""
        self._loss = loss
        self._versions = versions
        self._evaluated_at = versions()
        self._is_used = False

    def __call__(self) -> Any:
        """Return the loss.

        Raises:
            RuntimeError: On a second call, or if parameters were changed since the evaluation.
        """
        if self._is_used:
            raise RuntimeError(
                "the wrapped optimizer evaluates the closure more than once in a step, which needs all parameters "
                "to be exchanged in between; use an optimizer that evaluates it at most once"
            )
        self._is_used = True
        if self._versions() != self._evaluated_at:
            raise RuntimeError(
                "the wrapped optimizer changes parameters before it evaluates the closure, which would compute the "
                "loss with replicas that differ; compute the gradients before step() and pass no closure"
            )
        return self._loss


def local_step(
    local_optimizer: Any,
    closure: Any,
    loss: Any,
    versions: Callable[[], list[int]],
    kwargs: Mapping[str, Any],
) -> Callable[[], Any]:
    """Return what runs the local optimizer's ``step()``, any number of times over some of its parameters each.

    Args:
        local_optimizer: The wrapped optimizer.
        closure: What the user passed.
        loss: What it returned, if it can be called.
        versions: Returns the versions of this rank's parameters.
        kwargs: Further arguments of ``step()``.
    """

    def step() -> Any:
        if closure is None:
            return local_optimizer.step(**kwargs)
        once = EvaluatedClosure(loss, versions) if callable(closure) else closure
        return local_optimizer.step(closure=once, **kwargs)

    return step
