"""Lets the forward of a module wait for its parameters, so that ``step()`` need not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shardopt.collectives import Group, raise_together, require_equal
from shardopt.shards import Exchange, Shards


class IdleHook:
    """What is left of a hook in a copy of its module: nothing travels to that one's parameters."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""


class ModuleHook:
    """A hook that does not hinder its module from being copied, pickled and loaded elsewhere."""

    def __init__(self, function: Callable[..., None]) -> None:
        """Bind what is called."""
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call it."""
        self._function(*args)

    def __reduce__(self) -> Any:
        return IdleHook, ()


class Attachment:
    """Hooks on a module and its submodules, each of which waits for the parameters it holds itself.

    Note [Waiting in forward]: after a step parameters are on their way, and a submodule's forward waits for those it
    holds. A parameter that is used without its submodule being called (``F.linear(x, self.embedding.weight)``) has to be
    there before; which submodules are called is seen in the first forward, and for the others the outermost forward
    waits. Where it ends everything is waited for, and so it is before a state dict is read. What arrives moves the version
    counters of parameters, so that autograd raises if it finds it saved one too early.
    """

    def __init__(
        self,
        module: Any,
        exchange: Exchange,
        shards: Shards,
        outside_of_graphs: Callable[[Any], Any],
    ) -> None:
        """Hook into ``module``.

        Args:
            module: The outermost module.
            exchange: What is to be waited for.
            shards: Know the bucket of a parameter.
            outside_of_graphs: Makes a function that a compiler of models leaves alone.

        Raises:
            ValueError: Parameters are no bucket views, which the exchange could write to meanwhile.
        """
        if not shards.has_views:
            raise ValueError(
                "attach() lets parameters arrive during forward, for which they have to be bucket views; pass "
                "parameters_as_bucket_view=True, and overlap_with_ddp=False"
            )
        self._exchange = exchange
        self._shards = shards
        self._called: set[int] = set()
        self._waits: dict[int, list[int]] = {}
        self._early: list[int] = []
        self.is_ready: bool
        """Whether a forward has shown which submodules are called."""
        module.register_forward_pre_hook(ModuleHook(outside_of_graphs(self._begin)))
        module.register_forward_hook(ModuleHook(outside_of_graphs(self._end)), always_call=True)
        self._holders = [(held, params) for held, params in _holders(module) if params]
        for number, (submodule, _) in enumerate(self._holders):
            wait = ModuleHook(outside_of_graphs(self._hook(number)))
            submodule.register_forward_pre_hook(wait)
        for submodule in module.modules():
            submodule.register_state_dict_pre_hook(ModuleHook(lambda *_: exchange.drain()))
        self.read()

    def read(self) -> None:
        """Look up the buckets of parameters, anew after some were added. Everything has to be there."""
        shards = self._shards
        bucket_of = {id(shards.params[p]): number for p, number in shards.bucket_of.items()}
        for number, (_, params) in enumerate(self._holders):
            known = {bucket_of[id(param)] for param in params if id(param) in bucket_of}
            self._waits[number] = sorted(known)
        self._called.clear()
        self.is_ready = False

    def _begin(self, *_: Any) -> None:
        for number in self._early:
            self._exchange.wait(number)

    def _hook(self, number: int) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            self._called.add(number)
            for bucket in self._waits[number]:
                self._exchange.wait(bucket)

        return wait

    def _end(self, *_: Any) -> None:
        self._exchange.drain()
        never = [self._waits[number] for number in self._waits if number not in self._called]
        self._early = sorted({bucket for buckets in never for bucket in buckets})
        self.is_ready = True


def _holders(module: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Submodules with the parameters they hold themselves; a compiled one stands for all that is in it."""
    if hasattr(module, "_orig_mod"):
        yield module, list(module.parameters())
        return
    yield module, list(module.parameters(recurse=False))
    for child in module.children():
        yield from _holders(child)


def equalize_buffers(group: Group, module: Any) -> None:
    """Make the buffers of a module those of the group's first rank. Collective.

    Raises:
        RankMismatchError: Ranks have different ones.
    """
    with raise_together(group, doing="reading the module's buffers"):
        buffers = [(name, buffer) for name, buffer in module.named_buffers() if buffer is not None]
    fingerprint = [(f"buffer {name!r}", f"{tuple(b.shape)} {b.dtype}") for name, b in buffers]
    require_equal(group, fingerprint, subject="every rank must attach the same module")
    for _, buffer in buffers:
        flat = buffer.detach().contiguous().view(-1)
        if flat.numel():
            group.broadcast(flat).wait()
            buffer.detach().copy_(flat.view(buffer.shape))
