"""Parameters of every kind, laid out for two ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardopt.arguments import read_specs
from shardopt.buffers import GradientBucket
from shardopt.collectives import StagingPool
from shardopt.frameworks.torch import TORCH
from shardopt.partition import Bucket, Layout, ParamSpec, plan_element_layout, plan_layout

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int64,
]


def make_values(shape: Sequence[int], dtype: torch.dtype, *, seed: int) -> torch.Tensor:
    """Random bits that are valid numbers of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex or dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator).to(dtype)


def make_params(dtype: torch.dtype, *, seed: int = 0) -> list[torch.Tensor]:
    """A contiguous, a 0-dim, a channels-last, a transposed, a gappy and another contiguous parameter."""
    wide = make_values((3, 8), dtype, seed=seed + 4)
    return [
        make_values((3, 5), dtype, seed=seed),
        make_values((), dtype, seed=seed + 1),
        make_values((2, 3, 4, 5), dtype, seed=seed + 2).contiguous(
            memory_format=torch.channels_last
        ),
        make_values((4, 6), dtype, seed=seed + 3).t(),
        wide[:, ::2],
        make_values((7,), dtype, seed=seed + 5),
    ]


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: Any) -> torch.dtype:
    return request.param


@pytest.fixture
def params(dtype: torch.dtype) -> list[torch.Tensor]:
    return make_params(dtype)


@pytest.fixture
def others(dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameters like ``params``, with other values."""
    return make_params(dtype, seed=100)


@pytest.fixture
def plan_for() -> Callable[..., tuple[list[ParamSpec], Layout]]:
    """Plan parameters, by default alternating between two ranks and in one bucket."""

    def plan(
        params: Sequence[torch.Tensor],
        *,
        owners: Sequence[int] | None = None,
        alignment_nbytes: int = 1,
    ) -> tuple[list[ParamSpec], Layout]:
        specs = read_specs([{"params": list(params)}])
        layout = plan_layout(
            specs,
            [spec.index % 2 for spec in specs] if owners is None else owners,
            world_size=2,
            bucket_nbytes=2**20,
            alignment_nbytes=alignment_nbytes,
        )
        return specs, layout

    return plan


@pytest.fixture
def cut_bucket() -> Callable[..., tuple[list[ParamSpec], Bucket]]:
    """The one bucket of parameters that are cut by element, by default for two ranks."""

    def cut(
        params: Sequence[torch.Tensor], *, world_size: int = 2, alignment_nbytes: int = 1
    ) -> tuple[list[ParamSpec], Bucket]:
        specs = read_specs([{"params": list(params)}])
        layout = plan_element_layout(
            specs,
            world_size=world_size,
            bucket_nbytes=2**20,
            alignment_nbytes=alignment_nbytes,
        )
        [bucket] = layout.buckets
        return specs, bucket

    return cut


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """(numel,) the elements of a dense tensor as they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class CountingPool(StagingPool):
    """Knows how much of its memory is out."""

    num_out = 0

    def take(self, numel: int, *, like: torch.Tensor) -> torch.Tensor:
        self.num_out += 1
        return super().take(numel, like=like)

    def give_back(self, tensor: torch.Tensor) -> None:
        self.num_out -= 1
        super().give_back(tensor)


@pytest.fixture
def pool() -> CountingPool:
    return CountingPool()


@pytest.fixture
def make_gradients(
    plan_for: Any, cut_bucket: Any, pool: CountingPool
) -> Callable[..., GradientBucket]:
    """The gradients of some parameters, of which rank 0 of 2 keeps its part, unless told otherwise."""

    def make(
        params: Sequence[torch.Tensor],
        *,
        granularity: str = "parameter",
        owners: Sequence[int] | None = None,
        alignment_nbytes: int = 1,
        rank: int = 0,
        num_members: int = 2,
        wire_dtype: torch.dtype | None = None,
        sum_dtype: torch.dtype | None = None,
    ) -> GradientBucket:
        if granularity == "element":
            specs, plan = cut_bucket(params, alignment_nbytes=alignment_nbytes)
        else:
            specs, layout = plan_for(params, owners=owners, alignment_nbytes=alignment_nbytes)
            [plan] = layout.buckets
        return GradientBucket(
            plan,
            params,
            specs,
            rank=rank,
            num_members=num_members,
            wire_dtype=wire_dtype,
            sum_dtype=sum_dtype,
            pool=pool,
            scale_into=TORCH.scale_into,
        )

    return make


@pytest.fixture
def copy_all() -> Callable[..., None]:
    return TORCH.copy_all


@pytest.fixture
def assert_equal() -> Callable[..., None]:
    """Equal values, bit by bit, with equal shape and dtype."""

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(
            actual.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True
        )

    return check
