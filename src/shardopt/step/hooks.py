"""The step hooks of the whole optimizer, where no call of its ``step()`` brackets the update."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


class StepHooks:
    """Fires them; refers to the optimizer weakly."""

    def __init__(self, fire: Callable[..., None], optimizer: Any) -> None:
        """Bind what fires the hooks of an optimizer in its framework."""
        self._fire = fire
        self._optimizer = weakref.ref(optimizer)

    def __call__(self, *, before: bool) -> None:
        """Fire the pre-hooks, or with ``before=False`` the post-hooks."""
        optimizer = self._optimizer()
        if optimizer is not None:
            self._fire(optimizer, before=before)
