"""State for ``torch.distributed.checkpoint``: to and from ours, DDP with an unsharded optimizer, and FSDP2, to the bit."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from shardopt import Sharding, ZeroRedundancyOptimizer
from shardopt.testing import run_ranks
from tests.ranks.checkpointing import WAYS, Way, full_state, make, make_model, train
from tests.ranks.traffic import counted
from tests.ranks.training import assert_equal, assert_same_params, ddp, raises_everywhere

pytestmark = pytest.mark.filterwarnings("ignore")

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "Muon": (torch.optim.Muon, {"lr": 0.01}),
}
OURS = {
    "parameter": Way("parameter", False),
    "parameter, gradients": Way("parameter", True),
    "element, gradients": Way("element", True),
}


def make_matrices(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 13, bias=False), nn.Tanh(), nn.Linear(13, 9, bias=False))


def make_mixed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.LayerNorm(13), nn.Linear(13, 9))


class Job:
    """A model with its optimizer, and how its state is saved and loaded."""

    def __init__(self, kind: str, name: str, seed: int) -> None:
        self.kind = kind
        self.module = (make_matrices if name == "Muon" else make_mixed)(seed)
        optimizer_class, options = OPTIMIZERS[name]
        self.model: Any = self.module
        if kind == "DDP":
            self.model = ddp(self.module)
        elif kind == "FSDP2":
            fully_shard(self.model)
        if kind in OURS:
            way = OURS[kind]
            self.optimizer: Any = ZeroRedundancyOptimizer(
                self.model.parameters(),
                optimizer_class,
                parameters_as_bucket_view=way.granularity == "element",
                sharding=Sharding(granularity=way.granularity, gradients=way.gradients),
                **options,
            )
        else:
            self.optimizer = optimizer_class(self.model.parameters(), **options)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 6, generator=generator)).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        if self.kind in OURS:
            return self.optimizer.sharded_state_dict(self.model)
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load(self, state: dict[str, Any]) -> None:
        if self.kind in OURS:
            self.optimizer.load_sharded_state_dict(state, self.model)
        else:
            set_optimizer_state_dict(self.model, self.optimizer, state)

    def whole(self) -> dict[str, Any]:
        """The whole state by names, on every rank."""
        if self.kind in OURS:
            names = [name for name, _ in self.module.named_parameters()]
            state = full_state(self.optimizer)["state"]
            return {f"{names[i]}.{k}": v for i, entry in state.items() for k, v in entry.items()}
        state = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        return {
            f"{name}.{key}": value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, entry in state.items()
            for key, value in entry.items()
        }


@pytest.mark.parametrize("name", OPTIMIZERS)
@run_ranks(2, 3)
def test_files_go_both_ways_between_ours_ddp_and_fsdp2(name: str, tmp_path: Path) -> None:
    kinds = ["DDP", "FSDP2", *[k for k in OURS if name != "Muon" or "element" not in k]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for source in kinds:
            job = Job(source, name, seed=0)
            job.train(range(3))
            folder = tmp_path / source
            dcp.save({"optim": job.state()}, checkpoint_id=folder)
            expected = job.whole()
            for target in kinds:
                if source not in OURS and target not in OURS:
                    continue
                other = Job(target, name, seed=1)
                state = {"optim": other.state()}
                dcp.load(state, checkpoint_id=folder)
                other.load(state["optim"])
                assert_equal(dict(sorted(other.whole().items())), dict(sorted(expected.items())))


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@run_ranks(2)
def test_keys_groups_and_shapes_are_those_of_torch(name: str) -> None:
    plain, ours = Job("DDP", name, seed=0), Job("parameter", name, seed=0)
    for job in (plain, ours):
        job.train(range(2))
    expected = plain.state()
    everyone: list[Any] = [None] * 2
    state = ours.state()
    shapes = {
        name: {k: (tuple(v.shape), v.dtype) for k, v in entry.items()}
        for name, entry in state["state"].items()
    }
    dist.all_gather_object(everyone, shapes)
    assert {**everyone[0], **everyone[1]} == {
        name: {k: (tuple(v.shape), v.dtype) for k, v in entry.items()}
        for name, entry in expected["state"].items()
    }
    assert_equal(state["param_groups"], expected["param_groups"])


@pytest.mark.parametrize("way", WAYS, ids=str)
@run_ranks(3)
def test_building_it_takes_no_communication_and_copies_no_state(way: Way) -> None:
    model = make_model(way.dtype)
    zero = make(model, way)
    train(model, zero, range(2))
    with counted() as traffic:
        state = zero.sharded_state_dict(model)
    assert traffic.messages == []
    live = {t.untyped_storage().data_ptr() for e in zero.optim.state.values() for t in e.values()}
    live |= {m.untyped_storage().data_ptr() for m in zero.shards.masters().values()}
    saved = [value for entry in state["state"].values() for value in entry.values()]
    assert saved
    assert all(value.local.untyped_storage().data_ptr() in live for value in saved)


@pytest.mark.parametrize("way", WAYS, ids=str)
@run_ranks(4)
def test_saved_at_4_ranks_a_stateful_is_loaded_at_3(way: Way, tmp_path: Path) -> None:
    three = dist.new_group([0, 1, 2])
    model = make_model(way.dtype)
    zero = make(model, way)
    train(model, zero, range(3))
    dcp.save({"model": model, "optim": zero.as_stateful(model)}, checkpoint_id=tmp_path)
    state = full_state(zero)
    if dist.get_rank() == 3:
        return
    again = make_model(way.dtype, seed=0)
    loaded = make(again, Way("parameter", not way.gradients, way.has_masters), three)
    dcp.load(
        {"model": again, "optim": loaded.as_stateful(again)},
        checkpoint_id=tmp_path,
        process_group=three,
    )
    assert_same_params(again, model)
    assert_equal(full_state(loaded), state)
    reference = make_model(way.dtype, seed=0)
    reference.load_state_dict(again.state_dict())
    same = make(reference, Way("parameter", not way.gradients, way.has_masters), three)
    same.load_state_dict(state)
    train(again, loaded, range(3, 5))
    train(reference, same, range(3, 5))
    assert_same_params(again, reference)


@pytest.mark.parametrize("way", [Way("parameter", False), Way("element", True)], ids=str)
@run_ranks(2)
def test_an_async_save_holds_what_was_there_when_it_was_called(way: Way, tmp_path: Path) -> None:
    group = dist.new_group([0, 1])
    model = make_model()
    zero = make(model, way)
    train(model, zero, range(2))
    state = copy.deepcopy(full_state(zero))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saving = dcp.async_save(
            {"optim": zero.as_stateful(model)}, checkpoint_id=tmp_path, process_group=group
        )
        train(model, zero, range(2, 5))
        saving.result()
    again = make_model(seed=0)
    loaded = make(again, way)
    dcp.load({"optim": loaded.as_stateful(again)}, checkpoint_id=tmp_path)
    assert_equal(full_state(loaded), state)


@run_ranks(2)
def test_a_load_that_fails_in_the_middle_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    model = make_model()
    zero = make(model, Way("element", True))
    train(model, zero, range(2))
    dcp.save({"optim": zero.as_stateful(model)}, checkpoint_id=tmp_path)
    train(model, zero, range(2, 4))
    state = full_state(zero)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in tmp_path.glob("__1_*.distcp"):
            path.write_bytes(path.read_bytes()[:100])
    dist.barrier()
    with pytest.raises(CheckpointException):
        dcp.load({"optim": zero.as_stateful(model)}, checkpoint_id=tmp_path)
    assert_equal(full_state(zero), state)


@run_ranks(2)
def test_master_weights_may_be_missing_from_what_is_loaded(tmp_path: Path) -> None:
    """A checkpoint without them, saved by an unsharded optimizer, say: they follow the parameters."""
    model = make_model(torch.bfloat16)
    without = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    train(model, without, range(2))
    dcp.save({"optim": without.as_stateful(model)}, checkpoint_id=tmp_path)
    zero = make(model, Way("parameter", False, True))
    state = {"optim": zero.sharded_state_dict(model)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, planner=planner)
    zero.load_sharded_state_dict(state["optim"], model)
    for param, master in zero.shards.masters().items():
        assert_equal(master.detach().to(torch.bfloat16), zero.shards.params[param].detach())


@run_ranks(1, 2)
def test_names_come_from_the_model_without_its_wrappers_or_from_the_optimizer() -> None:
    model = make_mixed(0)
    wrapped = ddp(model)
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    assert zero.sharded_state_dict(wrapped)["param_groups"][0]["params"] == names
    assert zero.sharded_state_dict(model)["param_groups"][0]["params"] == names
    with pytest.raises(ValueError, match="param 0: is no parameter of the model that was given"):
        zero.sharded_state_dict(make_mixed(0))
    with pytest.raises(ValueError, match=r"or make it from model.named_parameters\(\)"):
        zero.sharded_state_dict()
    named = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    assert named.sharded_state_dict()["param_groups"][0]["params"] == names


@run_ranks(2)
def test_state_of_other_parameters_is_refused_on_all_ranks() -> None:
    model = make_mixed(0)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    state = zero.sharded_state_dict(model)
    if dist.get_rank() == 1:
        state["param_groups"][0]["params"][1] = "other"
    texts = raises_everywhere(lambda: zero.load_sharded_state_dict(state, model))
    assert all("StateMismatchError" in text for text in texts), texts
    assert all("found ['other'], expected ['0.bias']" in text for text in texts), texts


@run_ranks(1)
def test_what_is_saved_of_a_tensor_is_nothing_to_calculate_with_or_to_pickle() -> None:
    model = make_model()
    zero = make(model, Way("element", True))
    train(model, zero, range(1))
    saved = zero.sharded_state_dict(model)["state"]["0.weight"]["exp_avg"]
    assert "elements here" in repr(saved)
    with pytest.raises(NotImplementedError, match="a part of a tensor, which is there to be saved"):
        saved + 1
    with pytest.raises(TypeError, match=r"to pickle state use Sharding\(state_dict='sharded'\)"):
        torch.save(saved, "/dev/null")
    assert torch.equal(copy.deepcopy(saved).local, saved.local)
