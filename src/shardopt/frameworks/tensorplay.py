"""The TensorPlay adapter.

Workarounds for TensorPlay 1.0.0 stand here, each named in a comment that says when it can go; ``docs/tensorplay.md``
lists them with a reproduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tensorplay
import tensorplay.distributed as dist
from tensorplay.distributed.algorithms.join import Join, Joinable, JoinHook
from tensorplay.distributed.device_mesh import DeviceMesh
from tensorplay.distributed.tensor import DTensor
from tensorplay.optim import LBFGS
from tensorplay.optim import optimizer as tensorplay_optimizer

from shardopt.errors import CheckpointError
from shardopt.frameworks.framework import Framework
from shardopt.frameworks.join import ShadowStep
from shardopt.frameworks.shared import (
    find_group,
    fire_step_hooks,
    is_elementwise,
    is_separable,
)

DEFAULT_TIMEOUT_S = 1800.0
"""Of process groups, which do not say theirs."""


def control_of(group: Any) -> Any:
    """The group itself: its gloo backend serves the CPU."""
    return group


def copy_all(destinations: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy in one call."""
    with tensorplay.no_grad():
        tensorplay._foreach_copy_(list(destinations), list(sources))


def reject_param(param: Any) -> str | None:
    """Sparse tensors and DTensors cannot lie in a flat bucket."""
    if isinstance(param, DTensor):
        return "is a DTensor, which is sharded already; pass plain tensors"
    if param.is_sparse:
        return "is sparse, expected a dense tensor; make it dense with param.to_dense()"
    return None


def reject_overlap() -> str | None:
    """Builds without NCCL offer no DistributedDataParallel: the public name is None."""
    if tensorplay.nn.parallel.DistributedDataParallel is None:
        return (
            "this build of TensorPlay has no DistributedDataParallel; use overlap_with_ddp=False, with "
            "Sharding(gradients=True) to have gradients averaged"
        )
    return None


def reject_optimizer(optimizer_class: Any) -> str | None:
    """L-BFGS does not update parameters one by one."""
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, LBFGS):
        return (
            "LBFGS takes inner products over all parameters and evaluates the closure repeatedly, so it cannot be "
            "sharded by parameter; use it unsharded, or choose an optimizer that updates each parameter on its own"
        )
    return None


def empty_on_cpu(numel: int, dtype: str) -> Any:
    """Make a flat CPU tensor; ``dtype`` is what ``str()`` makes of one."""
    name = dtype.removeprefix("tensorplay.")
    return tensorplay.empty(numel, dtype=getattr(tensorplay, name), device="cpu")


def make_param(flat: Any) -> Any:
    """Make a parameter in the memory of ``flat``.

    Workaround, TensorPlay 1.0.0: ``Parameter(x)`` turns ``x`` itself into a leaf that requires gradients; can go when it
    leaves ``x`` alone.
    """
    return tensorplay.nn.Parameter(flat.detach())


def own_storage(view: Any) -> Any:
    """Hand the memory over by DLPack, which keeps it alive; a view of what DLPack does not know stays one.

    Workaround, TensorPlay 1.0.0: ``save()`` of a view writes a file that ``load()`` refuses; torch has use for this, too.
    """
    try:
        owned = tensorplay.from_dlpack(tensorplay.to_dlpack(view))
    except (RuntimeError, BufferError, TypeError, ValueError):
        return view
    return owned if tuple(owned.stride()) == tuple(view.stride()) else view


def scale_into(destination: Any, source: Any, factor: float) -> None:
    """Write a multiple into memory of the same shape."""
    with tensorplay.no_grad():
        destination.copy_(source)
        destination.mul_(factor)


def load_pickled(path: Path) -> Any:
    """Refuse: TensorPlay's own files are unpickled without limits.

    Raises:
        CheckpointError: Always; says what to do instead.
    """
    raise CheckpointError(
        f"{path}: a pickled file, which may run anything when it is read; read it with tensorplay.load() if you trust it, "
        "and pass the state dict"
    )


class TensorPlayShadowStep(ShadowStep, JoinHook):  # type: ignore[misc]
    """The hook as TensorPlay's ``Join`` expects it."""


TENSORPLAY = Framework(
    name="tensorplay",
    is_tensor=tensorplay.is_tensor,
    copy_all=copy_all,
    find_group=partial(
        find_group,
        framework=tensorplay,
        distributed=dist,
        mesh_class=DeviceMesh,
        control_of=control_of,
        timeout_of=lambda group: DEFAULT_TIMEOUT_S,
    ),
    reject_param=reject_param,
    reject_overlap=reject_overlap,
    reject_optimizer=reject_optimizer,
    enable_grad=tensorplay.enable_grad,
    empty_on_cpu=empty_on_cpu,
    fire_step_hooks=partial(
        fire_step_hooks,
        global_before=tensorplay_optimizer._global_optimizer_pre_hooks,
        global_after=tensorplay_optimizer._global_optimizer_post_hooks,
    ),
    is_elementwise=partial(is_elementwise, optim=tensorplay.optim),
    norm=tensorplay.linalg.vector_norm,
    clip_grad_norm=tensorplay.nn.utils.clip_grad_norm_,
    own_storage=own_storage,
    make_param=make_param,
    init_joinable=Joinable.__init__,
    notify_join=Join.notify_join_context,
    saved_tensor=None,
    load_pickled=load_pickled,
    shadow_step=TensorPlayShadowStep,
    scale_into=scale_into,
    touch=lambda params: None,
    autograd=None,
    outside_of_graphs=lambda function: function,
    is_separable=partial(is_separable, optim=tensorplay.optim),
)
