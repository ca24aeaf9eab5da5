"""Buckets over real parameters, for ranks that are threads."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardopt.buffers import StagedBucket, StagingPool
from shardopt.frameworks.torch import TORCH
from shardopt.param_groups import read_specs
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
