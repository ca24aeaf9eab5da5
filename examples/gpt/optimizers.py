"""Optimizers by name, and whether one can train a GPT at all."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from gpt.model import GPT, GPTShape, losses

TINY = GPTShape(width=4, layers=1, heads=1, context=4)
"""Has every kind of parameter that a larger one has."""


def find_optimizer(name: str) -> Any:
    """Return the class called ``name``: one of ``torch.optim``, or ``module.Class`` of any installed module.

    Raises:
        ValueError: There is none.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(module_name or "torch.optim")
    except ImportError as error:
        raise ValueError(f"--optimizer {name}: {error}") from error
    found = getattr(module, class_name, None)
    if not _is_optimizer(found):
        names = sorted(key for key, value in vars(module).items() if _is_optimizer(value))
        raise ValueError(
            f"--optimizer {name}: {module.__name__} has no optimizer {class_name!r}; "
            f"it has {', '.join(names) or 'none'}"
        )
    return found


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    )


def require_usable(name: str, *, lr: float) -> None:
    """Make one step on a tiny GPT, so that an optimizer that cannot train one is refused before anything starts.

    Raises:
        ValueError: It cannot, and why; such as Muon, which wants matrices only.
    """
    optimizer_class = find_optimizer(name)
    try:
        model = GPT(TINY)
        optimizer = optimizer_class(model.parameters(), lr=lr)
        set_mode(model, optimizer, is_training=True)
        inputs = torch.zeros(1, TINY.context, dtype=torch.int64)
        losses(model(inputs), inputs).sum().backward()
        optimizer.step()
    except Exception as error:
        raise ValueError(
            f"--optimizer {name} cannot train this model: {type(error).__name__}: {error}"
        ) from error


def set_mode(model: torch.nn.Module, optimizer: Any, *, is_training: bool) -> None:
    """Switch the model, and those optimizers that evaluate at other weights than they train at (schedule-free)."""
    model.train(is_training)
    switch = getattr(optimizer, "train" if is_training else "eval", None)
    if switch is not None:
        switch()
