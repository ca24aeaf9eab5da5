"""The seam between the rooms and a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardopt.buffers import CopyAll, OwnStorage, ScaleInto
from shardopt.collectives import Group


class Autograd(Protocol):
    """What reducing gradients in backward asks of a framework's autograd."""

    def watch(self, param: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Call ``before`` and ``after`` around each accumulation into ``param.grad``, as long as there is ``param``."""

    def at_end_of_backward(self, callback: Callable[[], None]) -> None:
        """Call once the backward that is under way ends well; hold ``callback`` no longer than that."""

    def placeholder(self, param: Any, source: Any, index: int) -> Any:
        """Make what ``param.grad`` is while the gradient is sharded; asks ``source`` for part and norm of ``index``."""


@dataclass(frozen=True, slots=True)
class Framework:
    """The functions of one framework that are no tensor methods.

    Attributes:
        name: ``"torch"`` or ``"tensorplay"``.
        is_tensor: Whether an object is a tensor of the framework.
        copy_all: Copies tensors in as few kernels as possible, unseen by autograd.
        find_group: Turns what the user passed as ``process_group`` into a ``Group``, which shares memory if it is asked to
            with ``shares_memory`` and can; or raises ``ValueError``, ``TypeError`` or ``RuntimeError``. Collective.
        reject_param: Why a parameter cannot be sharded, or None.
        reject_overlap: Why steps in DDP's backward are not to be had, or None.
        reject_optimizer: Why an optimizer class cannot be sharded, or None.
        enable_grad: Context in which a closure computes gradients.
        empty_on_cpu: Makes a flat CPU tensor from a numel and ``str(dtype)``.
        fire_step_hooks: Calls the step pre-hooks (``before=True``) or post-hooks of an optimizer, global ones included.
        is_elementwise: Whether an optimizer class is known to update every element on its own.
        norm: (tensor, p) -> its p-norm, 0-dim, bitwise as the framework's ``clip_grad_norm_`` takes it.
        clip_grad_norm: The framework's ``clip_grad_norm_``.
        own_storage: Makes a view a tensor whose storage holds nothing else.
        make_param: Makes a leaf parameter in the memory of a flat tensor.
        init_joinable: ``Joinable.__init__``.
        notify_join: Tells the framework's ``Join`` that this rank has inputs; returns work to wait for, or None.
        scale_into: Writes a multiple of a tensor into another one's memory.
        touch: Tells autograd that parameters were changed behind its back.
        autograd: Watches gradients as they are accumulated, or None.
        is_separable: Whether an optimizer class is known to update every parameter on its own, so that it may update some
            now and others later.
        outside_of_graphs: Makes a function that the framework's compiler of models leaves alone.
        saved_tensor: (local, shape, stride, boxes, is_live) -> what the framework's distributed checkpoints save of a tensor, or None
            where it has none.
        load_pickled: Reads a state dict that the framework's ``save`` has written, tensors on the CPU and mapped if possible,
            without running anything that is in it.
        shadow_step: Makes the framework's ``JoinHook`` of what takes part in a step and what ends it.
    """

    name: str
    is_tensor: Callable[[Any], bool]
    copy_all: CopyAll
    find_group: Callable[..., Group]
    reject_param: Callable[[Any], str | None]
    reject_overlap: Callable[[], str | None]
    reject_optimizer: Callable[[Any], str | None]
    enable_grad: Callable[[], AbstractContextManager[Any]]
    empty_on_cpu: Callable[[int, str], Any]
    fire_step_hooks: Callable[..., None]
    is_elementwise: Callable[[Any], bool]
    norm: Callable[[Any, float], Any]
    clip_grad_norm: Callable[..., Any]
    own_storage: OwnStorage
    make_param: Callable[[Any], Any]
    init_joinable: Callable[[Any], None]
    notify_join: Callable[[Any], Any]
    saved_tensor: Callable[..., Any] | None
    load_pickled: Callable[[Path], Any]
    shadow_step: Callable[[Callable[[], Any], Callable[[], None]], Any]
    scale_into: ScaleInto
    touch: Callable[[Iterable[Any]], None]
    autograd: Autograd | None
    is_separable: Callable[[Any], bool]
    outside_of_graphs: Callable[[Any], Any]
