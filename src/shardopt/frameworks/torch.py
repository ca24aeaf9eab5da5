"""The torch adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # whose default arguments keep the process group, unless it is made later
import torch.utils.dlpack
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from shardopt.errors import CheckpointError
from shardopt.frameworks.framework import Framework
from shardopt.frameworks.join import ShadowStep
from shardopt.frameworks.sharded_gradient import ShardedGradient
from shardopt.frameworks.shared import (
    find_group,
    fire_step_hooks,
    is_elementwise,
    is_separable,
)


def control_of(group: dist.ProcessGroup) -> Any:
    """The group itself if one of its backends serves the CPU, else a gloo group of the same ranks. Collective."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Seconds after which an operation on the CPU fails; torch's default where the backend does not say."""
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (RuntimeError, AttributeError):
        timeout = dist.default_pg_timeout
    return float(timeout.total_seconds())


def copy_all(destinations: Sequence[Any], sources: Sequence[Any]) -> None:
    """Copy in one kernel per dtype and device where there is one."""
    with torch.no_grad():
        torch._foreach_copy_(list(destinations), list(sources))


def reject_param(param: Any) -> str | None:
    """Sparse tensors and DTensors cannot lie in a flat bucket."""
    if isinstance(param, DTensor):
        return (
            "is a DTensor, which is sharded already; pass plain tensors, e.g. param.to_local(), or leave it to "
            "an optimizer of its own"
        )
    if param.layout is not torch.strided:
        return f"has layout {param.layout}, expected a dense tensor; make it dense with param.to_dense()"
    return None


def reject_optimizer(optimizer_class: Any) -> str | None:
    """L-BFGS does not update parameters one by one."""
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.LBFGS):
        return (
            "LBFGS takes inner products over all parameters and evaluates the closure repeatedly, so it cannot be "
            "sharded by parameter; use it unsharded, or choose an optimizer that updates each parameter on its own"
        )
    return None


def empty_on_cpu(numel: int, dtype: str) -> torch.Tensor:
    """Make a flat CPU tensor; ``dtype`` is what ``str()`` makes of one."""
    return torch.empty(numel, dtype=getattr(torch, dtype.removeprefix("torch.")), device="cpu")


def own_storage(view: torch.Tensor) -> torch.Tensor:
    """Hand the memory over by DLPack, which keeps it alive; a view of what DLPack does not know stays one."""
    try:
        return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(view))  # type: ignore[attr-defined]
    except (RuntimeError, BufferError):
        return view


def scale_into(destination: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    """Write a multiple, in one pass, into memory of the same shape."""
    torch.mul(source.detach(), factor, out=destination)


def saved_tensor(*args: Any) -> Any:
    """Make what DCP saves; loaded on first use, since DCP's modules take long to import."""
    from shardopt.frameworks.dcp import SavedTensor

    return SavedTensor(*args)


def load_pickled(path: Path) -> Any:
    """Map a file of ``torch.save`` into memory; of objects, only those that hold plain values are made.

    Raises:
        CheckpointError: It is damaged, or holds other objects.
    """
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of many kinds, by what is damaged
        raise CheckpointError(f"{path}: cannot be loaded: {error}") from error


class TorchAutograd:
    """Watches gradients by hooks on parameters."""

    def watch(
        self, param: torch.Tensor, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call around each accumulation."""
        param.register_hook(lambda gradient: before())  # type: ignore[no-untyped-call]
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda param: after()
        )

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call when the graph task that is under way has run."""
        torch.autograd.Variable._execution_engine.queue_callback(callback)

    def placeholder(self, param: torch.Tensor, source: Any, index: int) -> ShardedGradient:
        """Make a tensor that lives on ``source``."""
        return ShardedGradient(param, source, index)


class TorchShadowStep(ShadowStep, JoinHook):
    """The hook as torch's ``Join`` expects it."""


TORCH = Framework(
    name="torch",
    is_tensor=torch.is_tensor,
    copy_all=copy_all,
    find_group=partial(
        find_group,
        framework=torch,
        distributed=dist,
        mesh_class=DeviceMesh,
        control_of=control_of,
        timeout_of=timeout_of,
    ),
    reject_param=reject_param,
    reject_overlap=lambda: None,
    reject_optimizer=reject_optimizer,
    enable_grad=torch.enable_grad,
    empty_on_cpu=empty_on_cpu,
    fire_step_hooks=partial(
        fire_step_hooks,
        global_before=torch_optimizer._global_optimizer_pre_hooks,
        global_after=torch_optimizer._global_optimizer_post_hooks,
    ),
    is_elementwise=partial(is_elementwise, optim=torch.optim),
    norm=torch.linalg.vector_norm,
    clip_grad_norm=torch.nn.utils.clip_grad_norm_,
    own_storage=own_storage,
    make_param=torch.nn.Parameter,
    init_joinable=Joinable.__init__,
    notify_join=Join.notify_join_context,
    saved_tensor=saved_tensor,
    load_pickled=load_pickled,
    shadow_step=TorchShadowStep,
    scale_into=scale_into,
    touch=torch.autograd.graph.increment_version,
    autograd=TorchAutograd(),
    outside_of_graphs=torch.compiler.disable,
    is_separable=partial(is_separable, optim=torch.optim),
)
