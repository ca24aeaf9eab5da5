"""Runs the local optimizer on what this rank owns of some buckets, with the gradients that are theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from shardopt.gradients import GradientSource
from shardopt.shards import Shards
from shardopt.step.update import ShardUpdate, only_params


class LocalUpdater:
    """The wrapped optimizer of this rank, run over some of its parameters at a time."""

    def __init__(self, shards: Shards, local_optimizer: Any, gradients: GradientSource) -> None:
        """Bind the pieces."""
        self._shards = shards
        self._local_optimizer = local_optimizer
        self._gradients = gradients

    def start(self) -> ShardUpdate:
        """Note what this rank's tensors are before they are updated."""
        shards = self._shards
        return ShardUpdate(shards.group.rank, shards.buckets, shards.tensors)

    def run(
        self,
        update: ShardUpdate,
        step_local: Callable[[], Any],
        batch: Sequence[int],
        *,
        with_empty: bool = False,
    ) -> Any:
        """Update what this rank owns in the buckets of ``batch``, and empty parameters. Collective.

        Args:
            update: Notes what changes, and what is raised.
            step_local: Runs the local optimizer.
            batch: Numbers of buckets.
            with_empty: Update parameters without elements too, which lie in no bucket.

        Returns:
            What ``step_local`` returned.
        """
        stays = self._gradients.stays_in_params
        sections = [self._shards.sections[number] for number in batch]
        tensors = [tensor for section in sections for tensor in section.tensors.values()]
        if with_empty:
            tensors += self._bind_empty()
        try:
            for number, section in zip(batch, sections, strict=True):
                gradients = self._gradients.take(number)
                if not stays:
                    section.unbind(keep=False)
                section.bind(gradients)
            groups = self._local_optimizer.param_groups
            is_part = len(tensors) < sum(len(group["params"]) for group in groups)
            with only_params(groups, tensors) if is_part else nullcontext():
                loss = update.run(step_local, tensors)
            for section in sections:
                section.write_back()
        finally:
            for section in sections:
                section.unbind(keep=stays)
        return loss

    def _bind_empty(self) -> list[Any]:
        """Empty parameters that this rank owns, with their gradients."""
        shards = self._shards
        empty = [part.param for part in shards.parts if part.param not in shards.bucket_of]
        for param in empty:
            shards.tensors[param].grad = self._gradients.take_empty(param)
        return [shards.tensors[param] for param in empty]
