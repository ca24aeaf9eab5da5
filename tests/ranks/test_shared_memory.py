"""Ranks of one host read what others send where it lies; all of them do, or none."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardopt import Sharding
from shardopt.collectives import host
from shardopt.testing import run_ranks
from shardopt.testing.ranks import RankError
from tests.ranks.arrivals import arriving_when_awaited
from tests.ranks.training import (
    assert_equal,
    assert_same_params,
    ddp,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
    train,
)

ELEMENTS: dict[str, Any] = {"granularity": "element", "gradients": True}


def _made(params: Any, *, views: bool = True, **policy: Any) -> Any:
    return sharded(
        params,
        torch.optim.AdamW,
        lr=0.01,
        parameters_as_bucket_view=views,
        sharding=Sharding(**policy),
    )


def _shares_memory(**policy: Any) -> bool:
    return _made(make_model().parameters(), **policy).shards.group.shares_memory


@run_ranks(2, 3)
def test_ranks_of_one_host_share_memory_unless_told_otherwise() -> None:
    assert _shares_memory()
    assert not _shares_memory(shared_memory=False)


@pytest.mark.parametrize(
    "policy",
    [
        {"views": False},
        {"views": True},
        {"views": False, "bucket_mb": 0.0005},
        ELEMENTS,
        {**ELEMENTS, "bucket_mb": 0.0005, "step_in_backward": True},
        {**ELEMENTS, "master_dtype": torch.float64, "reduce_dtype": torch.bfloat16},
        {"gradients": True, "sum_dtype": torch.float64},
    ],
    ids=str,
)
@run_ranks(2, 3, 4)
def test_training_is_bitwise_that_over_the_network(policy: dict[str, Any]) -> None:
    models = [make_model(), make_model()]
    for model, shared_memory in zip(models, (True, False), strict=True):
        trained = model if policy.get("gradients") else ddp(model)
        zero = _made(model.parameters(), shared_memory=shared_memory, **policy)
        train(trained, zero, range(6))
    assert_same_params(*models)


@run_ranks(2, 3)
def test_accumulated_gradients_are_bitwise_those_over_the_network() -> None:
    models = [make_model(), make_model()]
    for model, shared_memory in zip(models, (True, False), strict=True):
        zero = _made(model.parameters(), shared_memory=shared_memory, bucket_mb=0.0005, **ELEMENTS)
        for step in range(4):
            for part in range(3):
                loss_of(model, 10 * step + part).backward()
            zero.step()
    assert_same_params(*models)


READ_AFTER: dict[str, Any] = {
    "step()": lambda zero: None,
    "wait()": lambda zero: zero.wait(),
    "consolidate_state_dict()": lambda zero: zero.consolidate_state_dict(),
}


@pytest.mark.parametrize(
    ("shared_memory", "then"),
    [(True, "step()"), (True, "wait()"), (False, "wait()"), (False, "consolidate_state_dict()")],
)
@run_ranks(2, 3)
def test_parameters_of_an_attached_module_are_those_of_a_step_that_waits(
    shared_memory: bool, then: str
) -> None:
    """Through shared memory nothing travels by itself, so they are there when ``step()`` returns."""
    models = [make_model(), make_model()]
    for model, attaches in zip(models, (True, False), strict=True):
        zero = _made(model.parameters(), bucket_mb=0.0005, shared_memory=shared_memory, **ELEMENTS)
        if attaches:
            zero.attach(model)
        with arriving_when_awaited():
            train(model, zero, range(6))
            READ_AFTER[then](zero)
    assert_same_params(*models)


@run_ranks(2, 3)
def test_a_parameter_that_is_changed_right_after_the_step_is_changed_once() -> None:
    """What others still read of the step is a copy."""
    models = [make_model(), make_model()]
    for model, shared_memory in zip(models, (True, False), strict=True):
        zero = _made(model.parameters(), shared_memory=shared_memory, **ELEMENTS)

        def decay(step: int, model: nn.Module = model) -> None:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.5)

        train(model, zero, range(6), after_step=decay)
    assert_same_params(*models)


# --- all or none ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError("no such thing"), AttributeError("memfd_create")])
@run_ranks(2, 3)
def test_a_rank_that_has_nothing_to_share_makes_all_use_the_network(error: Exception) -> None:
    if dist.get_rank() == 0:
        with mock.patch.object(os, "memfd_create", side_effect=error):
            shares = _shares_memory()
    else:
        shares = _shares_memory()
    assert not shares


@run_ranks(2, 3)
def test_a_rank_that_may_not_read_others_makes_all_use_the_network() -> None:
    reference, model = make_model(), make_model()
    if dist.get_rank() == dist.get_world_size() - 1:
        with mock.patch.object(host, "PeerFile", side_effect=PermissionError("not yours")):
            zero = _made(model.parameters(), **ELEMENTS)
    else:
        zero = _made(model.parameters(), **ELEMENTS)
    assert not zero.shards.group.shares_memory
    train(reference, _made(reference.parameters(), **ELEMENTS), range(3))
    train(model, zero, range(3))
    assert_same_params(model, reference)


@run_ranks(2, 3)
def test_ranks_that_are_told_different_things_all_raise() -> None:
    texts = raises_everywhere(lambda: _shares_memory(shared_memory=dist.get_rank() != 1))
    assert all(text.startswith("RankMismatchError") for text in texts)
    assert all("shared_memory=False" in text for text in texts)


# --- memory and files -----------------------------------------------------------------------------


@run_ranks(2, 3)
def test_memory_does_not_grow_with_steps_or_buckets() -> None:
    """A sender is at most two launches ahead of what its peers have launched, and they two ahead of what they read."""
    params = [nn.Parameter(torch.ones(1024)) for _ in range(60)]
    sharding = {**ELEMENTS, "bucket_mb": 4096 * dist.get_world_size() / 2**20}
    zero = _made(params, **sharding)
    assert len(zero.shards.buckets) == 60 // dist.get_world_size()
    for _ in range(30):
        sum(param.sum() for param in params).backward()
        zero.step()
    bucket_nbytes = 4096 * dist.get_world_size()
    assert zero.shards.group.pool.nbytes <= 8 * bucket_nbytes


def _num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@run_ranks(2)
def test_optimizers_that_are_gone_leave_no_files_open() -> None:
    nums = []
    for _ in range(3):
        for _ in range(4):
            model = make_model()
            zero = _made(model.parameters(), **ELEMENTS)
            train(model, zero, range(2))
            del zero, model
        gc.collect()
        dist.barrier()
        nums.append(_num_open_files())
    assert nums[1] == nums[2]


@run_ranks(2)
def _train_beside_a_rank_that_ends() -> None:
    model = make_model()
    zero = _made(model.parameters(), **ELEMENTS)
    train(model, zero, range(2))
    if dist.get_rank() == 1:
        os._exit(3)
    train(model, zero, range(2))


def test_a_rank_that_ends_is_named_by_those_that_wait_for_it() -> None:
    with pytest.raises(RankError, match="rank 1 has ended") as caught:
        _train_beside_a_rank_that_ends(world_size=2)
    assert "died with exit code 3" in str(caught.value)


@run_ranks(2, 3)
def test_two_optimizers_do_not_mix_up_what_they_send() -> None:
    """Though their gradients arrive in different order on different ranks; over the network they have tags."""
    for shared_memory in (True, False):
        torch.manual_seed(3)
        values = [torch.randn(7, 5), torch.randn(5, 7)]
        results = []
        for in_order in (True, False):
            params = [nn.Parameter(value.clone()) for value in values]
            zeros = [
                _made([param], shared_memory=shared_memory, gradients=True) for param in params
            ]
            order = [0, 1] if in_order or dist.get_rank() == 0 else [1, 0]
            for step in range(3):
                for number in order:
                    weight = 1.0 + dist.get_rank() + step
                    (params[number].square().sum() * weight).backward()
                for zero in zeros:
                    zero.step()
            results.append([param.detach() for param in params])
        assert_equal(results[0], results[1])
