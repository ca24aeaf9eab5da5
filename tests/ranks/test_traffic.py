"""How many messages and collectives a step takes, and how many bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import Sharding
from shardopt.testing import run_ranks
from tests.ranks.traffic import counted
from tests.ranks.training import sharded

TRANSPORTS = pytest.mark.parametrize("shared_memory", [True, False])


def _params(num: int, numel: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(numel)) for _ in range(num)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def _total(nbytes: int) -> int:
    total = torch.tensor(nbytes)
    dist.all_reduce(total)
    return int(total)


@TRANSPORTS
@run_ranks(2, 3)
def test_300_small_params_take_one_message_per_receiver(shared_memory: bool) -> None:
    num_peers = dist.get_world_size() - 1
    for view in (False, True):
        zero = sharded(
            _params(300, 64),
            torch.optim.SGD,
            parameters_as_bucket_view=view,
            sharding=Sharding(shared_memory=shared_memory),
        )
        with counted() as traffic:
            zero.step()
        assert traffic.count("isend") == traffic.count("irecv") == num_peers
        assert traffic.num_broadcasts == traffic.count("all_reduce") == 0
        assert traffic.count("all_gather") == 2
        assert traffic.count("all_gather_object") == 0


@TRANSPORTS
@run_ranks(2, 3)
def test_a_step_sends_each_byte_once_from_its_owner(shared_memory: bool) -> None:
    """N - 1 peers receive each of the S bytes: S * (N - 1) / N per rank, on average over the ranks."""
    world_size = dist.get_world_size()
    for view in (False, True):
        params = _params(60 * world_size, 96)
        sharding = Sharding(shared_memory=shared_memory)
        zero = sharded(params, torch.optim.SGD, parameters_as_bucket_view=view, sharding=sharding)
        with counted() as traffic:
            zero.step()
        size = sum(param.nbytes for param in params)
        assert _total(traffic.nbytes("isend")) == size * (world_size - 1)
        assert traffic.nbytes("isend") == size * (world_size - 1) // world_size
        assert traffic.nbytes("irecv") == size * (world_size - 1) // world_size


@TRANSPORTS
@run_ranks(2, 3)
def test_a_bucket_takes_at_most_one_message_per_receiver(shared_memory: bool) -> None:
    world_size = dist.get_world_size()
    for view in (False, True):
        params = _params(40 * world_size, 1024)
        sharding = Sharding(bucket_mb=10 * world_size * 4096 / 2**20, shared_memory=shared_memory)
        zero = sharded(params, torch.optim.SGD, parameters_as_bucket_view=view, sharding=sharding)
        with counted() as traffic:
            zero.step()
        num_buckets = 4
        assert traffic.count("isend") == num_buckets * (world_size - 1)
        assert all(n <= 10 * 4096 for kind, n in traffic.messages if kind == "isend")


@TRANSPORTS
@run_ranks(2, 3)
def test_what_was_not_updated_is_not_sent(shared_memory: bool) -> None:
    for view in (False, True):
        params = _params(6, 50)
        sharding = Sharding(shared_memory=shared_memory)
        zero = sharded(params, torch.optim.SGD, parameters_as_bucket_view=view, sharding=sharding)
        for param in params:
            param.grad = None
        with counted() as traffic:
            zero.step()
        assert traffic.count("isend") == traffic.num_broadcasts == 0
        params[0].grad = torch.ones_like(params[0])
        with counted() as traffic:
            zero.step()
        assert _total(traffic.count("isend")) == dist.get_world_size() - 1
        assert traffic.num_broadcasts == 0


@TRANSPORTS
@run_ranks(2, 3)
def test_mixed_dtypes_take_one_message_per_receiver_and_dtype(shared_memory: bool) -> None:
    params = [
        nn.Parameter(torch.ones(32, dtype=d))
        for d in (torch.float32, torch.bfloat16)
        for _ in range(6)
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    zero = sharded(params, torch.optim.SGD, sharding=Sharding(shared_memory=shared_memory))
    with counted() as traffic:
        zero.step()
    assert traffic.count("isend") == 2 * (dist.get_world_size() - 1)


@run_ranks(1)
def test_one_rank_sends_nothing() -> None:
    zero = sharded(_params(6, 50), torch.optim.SGD)
    with counted() as traffic:
        zero.step()
        zero.consolidate_state_dict()
    assert traffic.messages == []
    assert traffic.num_broadcasts == 0


@TRANSPORTS
@run_ranks(2, 3)
def test_gradients_and_params_take_one_message_each_per_bucket_and_receiver(
    shared_memory: bool,
) -> None:
    """With 10 params of each rank in each of 4 buckets; plus two small gathers, in whose integers gradients are agreed on."""
    world_size = dist.get_world_size()
    for granularity in ("parameter", "element"):
        params = [nn.Parameter(torch.ones(1024)) for _ in range(40 * world_size)]
        sharding = Sharding(
            gradients=True,
            granularity=granularity,
            bucket_mb=10 * world_size * 4096 / 2**20,
            shared_memory=shared_memory,
        )
        zero = sharded(params, torch.optim.SGD, sharding=sharding, parameters_as_bucket_view=True)
        with counted() as backward:
            sum(param.sum() for param in params).backward()
        with counted() as step:
            zero.step()
        for traffic in (backward, step):
            assert traffic.count("isend") == 4 * (world_size - 1)
            assert traffic.nbytes("isend") == 40 * 4096 * (world_size - 1)
            assert traffic.num_broadcasts == traffic.count("all_reduce") == 0
        assert backward.count("irecv") + step.count("irecv") == 8 * (world_size - 1)
        assert backward.count("all_gather") == 0
        assert step.count("all_gather") == 2


@run_ranks(2, 3)
def test_consolidation_sends_each_byte_of_state_once_and_to_the_target_only() -> None:
    params = _params(30, 4096)
    sharding = Sharding(bucket_mb=0.125)
    zero = sharded(params, torch.optim.Adam, sharding=sharding)
    zero.step()
    own = sum(t.nbytes for entry in zero.state.values() for t in entry.values())
    target = dist.get_world_size() - 1
    with counted() as traffic:
        zero.consolidate_state_dict(to=target)
    if dist.get_rank() == target:
        assert traffic.nbytes("isend") == 0
    else:
        assert traffic.nbytes("isend") == own
        assert traffic.nbytes("irecv") == 0
        assert max(n for kind, n in traffic.messages if kind == "isend") <= sharding.bucket_nbytes
    assert traffic.num_broadcasts == 0
