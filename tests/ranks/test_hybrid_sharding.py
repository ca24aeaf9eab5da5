"""Grids of ranks: sharded along rows, replicated along columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardopt import Sharding
from shardopt.errors import OverlapError
from shardopt.testing import run_ranks
from tests.ranks.traffic import counted
from tests.ranks.training import (
    assert_equal,
    assert_replicas_equal,
    assert_same_params,
    ddp,
    loss_of,
    make_model,
    raises_everywhere,
    sharded,
    train,
)

POLICIES = {
    "by parameter": Sharding(gradients=True),
    "by element": Sharding(gradients=True, granularity="element"),
    "small buckets": Sharding(gradients=True, granularity="element", bucket_mb=0.0005),
    "in backward": Sharding(gradients=True, granularity="element", step_in_backward=True),
}


def grid(rows: int) -> DeviceMesh:
    shape = (rows, dist.get_world_size() // rows)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def make(model: nn.Module, mesh: Any, policy: str) -> Any:
    return sharded(
        model.parameters(),
        torch.optim.AdamW,
        mesh,
        parameters_as_bucket_view=True,
        sharding=POLICIES[policy],
        lr=0.01,
    )


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(2)
def test_one_column_of_two_ranks_equals_ddp_to_the_bit(policy: str) -> None:
    """Two summands, so there is one order of summation only."""
    reference, model = ddp(make_model()), make_model()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(6))
    train(model, make(model, grid(rows=2), policy), range(6))
    assert_same_params(model, reference.module)


@pytest.mark.parametrize("policy", POLICIES)
@run_ranks(4)
def test_two_rows_of_two_ranks_equal_ddp_up_to_the_order_of_sums(policy: str) -> None:
    """Averages of 4 gradients differ by 3 roundings, 3 eps relative to the largest summand. Adam divides a gradient by
    its own size, so a step moves by at most lr; where gradients cancel, that relative error grows, within 1e-3 here."""
    reference, model = ddp(make_model()), make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(dist.get_rank())  # replicas start as those of the first rank of all
    train(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), range(6))
    zero = make(model, grid(rows=2), policy)
    train(model, zero, range(6))
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=0, atol=6 * 0.01 * 1e-3)
    assert_replicas_equal(model.parameters())


@run_ranks(4)
def test_a_pair_of_groups_is_the_same_as_a_mesh() -> None:
    mesh = grid(rows=2)
    models = [make_model(), make_model()]
    groups = [mesh, (mesh.get_group("shard"), mesh.get_group("replicate"))]
    for model, group in zip(models, groups, strict=True):
        train(model, make(model, group, "by element"), range(3))
    assert_same_params(*models)


@run_ranks(4)
def test_backwards_add_up_within_rows_and_columns_reduce_once() -> None:
    one, other = make_model(), make_model()
    for model, num_backwards in ((one, 1), (other, 3)):
        zero = make(model, grid(rows=2), "by element")
        for step in range(num_backwards):
            loss_of(model, step).backward()
        with counted() as traffic:
            zero.step()
        assert traffic.count("all_reduce") == len(zero.shards.buckets)


@run_ranks(4)
def test_a_backward_after_clipping_counts_what_was_clipped_once() -> None:
    """All numbers are small whole ones, so that nothing rounds."""
    model = nn.Linear(4, 4, bias=False)
    zero = sharded(
        model.parameters(),
        torch.optim.SGD,
        grid(rows=2),
        sharding=Sharding(gradients=True),
        lr=1.0,
    )
    before = model.weight.detach().clone().zero_()
    with torch.no_grad():
        model.weight.zero_()
    for _ in range(2):
        (model.weight * 4.0).sum().backward()
        assert_equal(zero.clip_grad_norm_(1e6), torch.tensor(16.0 * (1 + _)))
    zero.step()
    assert_equal(model.weight.detach(), before - 8.0)


@run_ranks(4)
def test_each_row_collects_the_whole_state_on_its_own_target() -> None:
    model = make_model()
    mesh = grid(rows=2)
    zero = make(model, mesh, "by element")
    train(model, zero, range(2))
    zero.consolidate_state_dict(to=1)
    if mesh.get_local_rank("shard") == 1:
        state = zero.state_dict()["state"]
        assert [tuple(state[i]["exp_avg"].shape) for i in range(6)] == [
            tuple(param.shape) for param in model.parameters()
        ]


@run_ranks(4)
def test_a_rate_that_differs_in_one_row_raises_on_every_rank_of_the_grid() -> None:
    model = make_model()
    zero = make(model, grid(rows=2), "by element")
    loss_of(model, 0).backward()
    if dist.get_rank() == 3:
        zero.param_groups[0]["lr"] = 0.5
    texts = raises_everywhere(zero.step)
    assert all("RankMismatchError" in text and "'lr'" in text for text in texts)


@run_ranks(4)
def test_join_and_meshes_of_three_dimensions_are_refused() -> None:
    zero = make(make_model(), grid(rows=2), "by element")
    with pytest.raises(OverlapError, match="or with a grid of ranks"):
        Join([zero])
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match="DeviceMesh of 3 dimensions, expected 1, or 2 to shard"):
        make(make_model(), cube, "by element")
