"""Training on uneven inputs: what a rank does for the others after its own inputs ran out.

A thin adapter to the framework's ``Join``. The rank goes on to update the parameters it owns, with gradients and
options that a rank with inputs sends (see ``step.uneven_inputs``), so the result is that of the unsharded optimizer.

Note [Order of joinables]: the hook of a rank without inputs has to follow those of DDP, as a step follows forward and
backward on the other ranks, and DDP has to announce each iteration, before its first collective. ``Join`` runs hooks
in the order of the list it was given, so a sharded optimizer that stands before other joinables moves behind them.
``Join`` offers no way to say so, hence ``stand_last`` looks for it on the stack of its constructor; ``docs/design.md`` says
what else was tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class ShadowStep:
    """The hook that a sharded optimizer gives to ``Join``."""

    def __init__(self, step: Callable[[], Any], leave: Callable[[], None]) -> None:
        """Bind what takes part in a step of the other ranks, and what tells the optimizer that ``Join`` is over."""
        self._step = step
        self._leave = leave

    def main_hook(self) -> None:
        """Take part in a step of the ranks that still have inputs."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Stop announcing steps; the replicas are equal already."""
        self._leave()


def stand_last(optimizer: Any, is_sharded: Any) -> Any:
    """Move sharded optimizers behind all other joinables of the ``Join`` that is being constructed.

    Called while ``Join`` asks each joinable of its list for its hook, in order.

    Args:
        optimizer: The joinable that is being asked.
        is_sharded: Tells sharded optimizers from other joinables.

    Returns:
        The joinable that has taken its place in the list, and is to answer instead; ``optimizer`` itself if it stays.
    """
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        joinables: Any = getattr(caller, "_joinables", ())
        positions = [i for i, joinable in enumerate(joinables) if joinable is optimizer]
        if positions and not isinstance(joinables, list):
            raise TypeError(
                "Join: pass the joinables in a list, so that their order can be changed"
            )
        if positions:
            [position] = positions
            joinables.sort(key=is_sharded)  # stable: False, other joinables, before True
            return joinables[position]
        frame = frame.f_back  # type: ignore[assignment]
    return optimizer
