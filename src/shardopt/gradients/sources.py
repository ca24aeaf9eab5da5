"""The gradients that this rank's update is made with: in ``param.grad``, or reduced by us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from shardopt.gradients.reducer import GradientReducer
from shardopt.partition import Part
from shardopt.shards import Shards

if TYPE_CHECKING:
    from torch import Tensor


class GradientSource(Protocol):
    """Averaged gradients of what this rank owns."""

    stays_in_params: bool
    """Whether they are in ``param.grad``, and stay there after the update."""

    def take(self, number: int) -> dict[int, Tensor]:
        """Those of one bucket, by parameter, parts as flat tensors; waits until they are there. Collective."""

    def take_empty(self, param: int) -> Tensor | None:
        """That of a parameter without elements."""

    def everything(self) -> list[Tensor]:
        """All that a loss scale is to be divided out of; waits until they are there. Collective."""


class AveragedGradients:
    """DDP or the user has averaged them: this rank uses what is in ``param.grad``."""

    stays_in_params = True

    def __init__(self, shards: Shards) -> None:
        """Bind the parameters."""
        self._shards = shards

    def take(self, number: int) -> dict[int, Tensor]:
        """What is in ``param.grad``, cut to this rank's parts."""
        bucket = self._shards.buckets[number].plan
        gradients: dict[int, Tensor] = {}
        for slot in bucket.sections[self._shards.group.rank].slots:
            gradient = self._shards.params[slot.param].grad
            if gradient is not None and bucket.is_cut:
                part = Part(slot.param, slot.offset, slot.numel, False)
                gradients[slot.param] = self._cut(gradient, part)
            elif gradient is not None:
                gradients[slot.param] = gradient
        return gradients

    def take_empty(self, param: int) -> Tensor | None:
        """What is in ``param.grad``."""
        return self._shards.params[param].grad

    def everything(self) -> list[Tensor]:
        """Gradients of all parameters, also of those that other ranks own."""
        return [param.grad for param in self._shards.params if param.grad is not None]

    def updating_sections(self) -> list[bool]:
        """For each bucket whether a parameter in this rank's section has a gradient."""
        rank = self._shards.group.rank
        return [
            any(self._shards.params[s.param].grad is not None for s in b.plan.sections[rank].slots)
            for b in self._shards.buckets
        ]

    def _cut(self, gradient: Tensor, part: Part) -> Tensor:
        """(part.numel,) of a gradient, in the memory order of its parameter."""
        param = self._shards.params[part.param]
        if gradient.stride() != param.stride():
            ordered = param.detach().clone()
            ordered.copy_(gradient.detach())
            gradient = ordered
        flat = gradient.detach().as_strided((param.numel(),), (1,), gradient.storage_offset())
        return flat.narrow(0, part.offset, part.numel)


class ReducedGradients:
    """This optimizer averages them: this rank holds those of what it owns, in the shards of gradient buckets."""

    stays_in_params = False

    def __init__(self, shards: Shards, reducer: GradientReducer) -> None:
        """Bind the parameters and what reduces their gradients."""
        self._shards = shards
        self._reducer = reducer

    def take(self, number: int) -> dict[int, Tensor]:
        """The averages, as views of the memory they are kept in."""
        self._reducer.complete(number)
        return self.held(number, self._reducer.used)

    def take_empty(self, param: int) -> Tensor | None:
        """Any gradient of an empty parameter is the average."""
        return self._shards.params[param].detach().clone() if self._reducer.used[param] else None

    def everything(self) -> list[Tensor]:
        """All averages that this rank holds."""
        self._reducer.complete_all()
        return list(self.held_of_all(self._reducer.used).values())

    def held(self, number: int, used: Sequence[bool]) -> dict[int, Tensor]:
        """The averages of ``used`` parameters in a bucket, by parameter, as views of the memory they are kept in."""
        plan = self._shards.buckets[number].plan
        rank = self._shards.group.rank
        owned = [slot.param for slot in plan.sections[rank].slots if used[slot.param]]
        return {param: self._view(param) for param in owned}

    def held_of_all(self, used: Sequence[bool]) -> dict[int, Tensor]:
        """The same of all buckets."""
        return {
            param: gradient
            for number in range(len(self._shards.buckets))
            for param, gradient in self.held(number, used).items()
        }

    def part(self, param: int) -> Tensor | None:
        """The average of this rank's part of a parameter; None where it owns nothing of it."""
        plan = self._shards.buckets[self._shards.bucket_of[param]].plan
        slots = plan.sections[self._shards.group.rank].slots
        return self._view(param) if any(slot.param == param for slot in slots) else None

    def _view(self, param: int) -> Tensor:
        number = self._shards.bucket_of[param]
        is_whole = not self._shards.buckets[number].plan.is_cut
        return self._shards.gradient_buckets[number].reduced(param, is_whole=is_whole)
