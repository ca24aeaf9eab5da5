"""Parameters by their fully qualified names, as checkpoints of models call them."""

from __future__ import annotations

from typing import Any

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Attributes under which compiled, checkpointing and fully sharded modules hold the module that they wrap."""


def names_of(module: Any) -> dict[int, str]:
    """Return the name of each parameter of a module by its ``id()``, without the names of wrappers.

    Example: of ``DistributedDataParallel(torch.compile(model))`` the parameter ``module._orig_mod.head.weight`` is
    ``head.weight``, as in ``torch.distributed.checkpoint.state_dict``.
    """
    return {id(param): _clean(module, name) for name, param in module.named_parameters()}


def _clean(module: Any, name: str) -> str:
    kept = []
    for step in name.split("."):
        is_wrapper = step == "module" and type(module).__name__ == "DistributedDataParallel"
        if not is_wrapper and step not in WRAPPERS:
            kept.append(step)
        module = getattr(module, step)
    return ".".join(kept)
