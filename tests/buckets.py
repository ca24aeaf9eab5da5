"""Buckets over real parameters, for ranks that are threads."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardopt.arguments import read_specs
from shardopt.buffers import StagedBucket
from shardopt.collectives import Pending, StagingPool
from shardopt.frameworks.torch import TORCH
from shardopt.partition import plan_layout


@pytest.fixture
def make_buckets() -> Callable[..., list[StagedBucket]]:
    """Buckets of some parameters; by default each in buckets of its own."""

    def make(
        params: Sequence[torch.Tensor],
        owners: Sequence[int],
        *,
        world_size: int,
        bucket_nbytes: int = 1,
    ) -> list[StagedBucket]:
        layout = plan_layout(
            read_specs([{"params": list(params)}]),
            owners,
            world_size=world_size,
            bucket_nbytes=bucket_nbytes,
        )
        pool = StagingPool()
        return [
            StagedBucket(bucket, params, pool=pool, copy_all=TORCH.copy_all)
            for bucket in layout.buckets
        ]

    return make


class RecordingBucket:
    """Stands for a bucket; writes down what it was asked to do."""

    def __init__(self, bucket: StagedBucket) -> None:
        self._bucket = bucket
        self.plan = bucket.plan
        self.events: list[Any] = []

    def open(self, ranks: Sequence[int]) -> Any:
        self.events.append(("open", list(ranks)))
        opened = self._bucket.open(ranks)
        close = opened.close

        def recorded_close(received: Sequence[int]) -> None:
            self.events.append(("close", list(received)))
            close(received)

        opened.close = recorded_close
        return opened


@pytest.fixture
def recording() -> Callable[[StagedBucket], RecordingBucket]:
    return RecordingBucket


class ScriptedGroup:
    """Rank 0 of 2, whose gathers fail where told to: at their launch or where they are awaited, by number."""

    rank = 0
    world_size = num_members = 2
    is_first = is_first_replica = True

    def __init__(self, *, bad_launches: Sequence[int] = (), bad_waits: Sequence[int] = ()) -> None:
        self.bad_launches = bad_launches
        self.bad_waits = bad_waits
        self.launched: list[int] = []
        self.awaited: list[int] = []
        self.deepest = 0

    @property
    def num_in_flight(self) -> int:
        return len(self.launched) - len(self.awaited)

    def all_gather(self, sections: Any) -> Pending:
        return self._launch()

    def broadcast(self, tensor: Any) -> Pending:
        return self._launch()

    def _launch(self) -> Pending:
        number = len(self.launched)
        if number in self.bad_launches:
            raise RuntimeError(f"launch {number}")
        self.launched.append(number)
        self.deepest = max(self.deepest, self.num_in_flight)
        return Pending([ScriptedWork(self, number)])


class ScriptedWork:
    def __init__(self, group: ScriptedGroup, number: int) -> None:
        self._group = group
        self._number = number

    def wait(self) -> None:
        self._group.awaited.append(self._number)
        if self._number in self._group.bad_waits:
            raise RuntimeError(f"wait {self._number}")


@pytest.fixture
def scripted() -> type[ScriptedGroup]:
    return ScriptedGroup
