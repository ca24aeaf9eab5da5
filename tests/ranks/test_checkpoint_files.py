"""Checkpoints in files: saved in one way at one world size, loaded in any way at any other, to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardopt import CheckpointError, StateMismatchError
from shardopt.files import TensorFile
from shardopt.testing import run_ranks
from tests.ranks.checkpointing import (
    WAYS,
    Way,
    full_state,
    groups_of,
    is_member,
    make,
    make_model,
    train,
)
from tests.ranks.training import assert_equal, assert_same_params, raises_everywhere

ELEMENT = Way("element", True)
PARAMETER = Way("parameter", False)


@pytest.mark.parametrize("way", WAYS, ids=str)
@run_ranks(5)
def test_saved_at_4_ranks_training_goes_on_in_any_way_at_any_world_size(
    way: Way, tmp_path: Path
) -> None:
    """As an optimizer of that world size goes on which was given the whole state as a dict; and, at stage 1 and without
    masters, as the unsharded optimizer does."""
    groups = groups_of([1, 2, 3, 4, 5])
    model, state = make_model(way.dtype), None
    if is_member(groups[4]):
        zero = make(model, way, groups[4])
        train(model, zero, range(3))
        zero.save(tmp_path / "folder")
        zero.save_full(tmp_path / "full.safetensors", to=3)
        state = full_state(zero)
    found = [(state, model.state_dict())]
    dist.broadcast_object_list(found, src=0)
    state, weights = found[0]
    others = [other for other in WAYS if other.has_masters == way.has_masters]
    for size in (1, 2, 3, 5):
        if not is_member(groups[size]):
            continue
        for other in others:
            runs = []
            for source in ("folder", "dict"):
                again = make_model(way.dtype, seed=0)
                again.load_state_dict(weights)
                loaded = make(again, other, groups[size])
                if source == "dict":
                    loaded.load_state_dict(copy.deepcopy(state))
                else:
                    loaded.load(tmp_path / "full.safetensors")
                    assert_equal(full_state(loaded), state)
                    loaded.load(tmp_path / "folder")
                    assert_equal(full_state(loaded), state)
                train(again, loaded, range(3, 5))
                runs.append((again, full_state(loaded)))
            assert_same_params(runs[0][0], runs[1][0])
            assert_equal(runs[0][1], runs[1][1])
        if not way.gradients and not way.has_masters:
            reference = make_model()
            plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
            train(reference, plain, range(3))
            assert_equal(state["state"], plain.state_dict()["state"])
            train(reference, plain, range(3, 5))
            stage_1 = make_model()
            stage_1.load_state_dict(weights)
            loaded = make(stage_1, PARAMETER, groups[size])
            loaded.load(tmp_path / "folder")
            train(stage_1, loaded, range(3, 5))
            assert_same_params(stage_1, reference)


@pytest.mark.parametrize("way", WAYS, ids=str)
@run_ranks(3)
def test_a_full_state_that_one_rank_has_is_loaded_on_all(way: Way, tmp_path: Path) -> None:
    model = make_model(way.dtype)
    zero = make(model, way)
    train(model, zero, range(3))
    state = full_state(zero)
    zero.save_full(tmp_path / "full.safetensors", to=1)
    zero.save(tmp_path / "folder")
    if dist.get_rank() == 1:
        torch.save(state, tmp_path / "pickled.pt")
    for source in (
        tmp_path / "full.safetensors",
        tmp_path / "folder",
        tmp_path / "pickled.pt",
        state,
    ):
        loaded = make(make_model(way.dtype), way)
        loaded.load_full(source if dist.get_rank() == 1 else "elsewhere", src=1)
        assert_equal(full_state(loaded), state)


@run_ranks(4)
def test_hybrid_shards_are_saved_once_and_loaded_on_all_replicas(tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = make_model()
    zero = make(model, ELEMENT, mesh)
    train(model, zero, range(3))
    zero.consolidate_state_dict()
    state = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state, src=0)
    zero.save(tmp_path / "folder")
    zero.save_full(tmp_path / "full.safetensors", to=1)
    assert len(list((tmp_path / "folder").glob("*.safetensors"))) == 2
    for method, source, src in (
        ("load", tmp_path / "folder", None),
        ("load", tmp_path / "full.safetensors", None),
        ("load_full", tmp_path / "full.safetensors", 1),
    ):
        loaded = make(make_model(), ELEMENT, mesh)
        getattr(loaded, method)(source, *([] if src is None else [src]))
        loaded.consolidate_state_dict()
        again = [loaded.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(again, src=0)
        assert_equal(again[0], state[0])
        for mine, theirs in zip(loaded.state.values(), zero.state.values(), strict=True):
            assert_equal(dict(mine), dict(theirs))


@pytest.mark.parametrize("way", [PARAMETER, ELEMENT], ids=str)
@run_ranks(2, 3)
def test_a_rank_reads_just_its_part(way: Way, tmp_path: Path) -> None:
    model = make_model()
    zero = make(model, way)
    train(model, zero, range(2))
    zero.save(tmp_path)
    read: list[int] = []
    original = TensorFile.read

    def counting(file: Any, name: str, start: int, flat: Any) -> None:
        read.append(flat.nbytes)
        original(file, name, start, flat)

    loaded = make(make_model(), Way(way.granularity, not way.gradients))
    with mock.patch.object(TensorFile, "read", counting):
        loaded.load(tmp_path)
    trained = [p for p in loaded.shards.parts if loaded.shards.params[p.param].requires_grad]
    assert sum(read) == sum(2 * 4 * part.numel + 4 for part in trained)


# --- what goes wrong ------------------------------------------------------------------------------


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "cut short":
        del data[len(data) >> 1 :]
    elif kind == "one bit":
        data[-200] ^= 1
    elif kind == "foreign":
        data[:] = b"hello" * 100
    path.unlink()
    if kind != "missing":
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["cut short", "one bit", "foreign", "missing"])
@pytest.mark.parametrize("way", [PARAMETER, ELEMENT], ids=str)
@run_ranks(1, 3)
def test_a_damaged_file_is_named_on_every_rank_and_nothing_is_loaded(
    kind: str, way: Way, tmp_path: Path
) -> None:
    model = make_model()
    zero = make(model, way)
    train(model, zero, range(2))
    zero.save(tmp_path / "folder")
    zero.save_full(tmp_path / "full.safetensors")
    [file] = (tmp_path / "folder").glob("*-rank00000.safetensors")
    dist.barrier()
    if dist.get_rank() == 0:
        damage(file, kind)
        damage(tmp_path / "full.safetensors", kind)
    dist.barrier()
    train(model, zero, range(2, 3))
    state = full_state(zero)
    for action, name in (
        (lambda: zero.load(tmp_path / "folder"), file.name),
        (lambda: zero.load(tmp_path / "full.safetensors"), "full.safetensors"),
        (lambda: zero.load_full(tmp_path / "full.safetensors"), "full.safetensors"),
    ):
        texts = raises_everywhere(action)
        assert all(name in text for text in texts), texts
        assert any(text.startswith("CheckpointError") for text in texts), texts
        assert_equal(full_state(zero), state)
    train(model, zero, range(3, 4))


@run_ranks(1, 2)
def test_no_checkpoint_is_an_error_that_says_what_was_expected(tmp_path: Path) -> None:
    zero = make(make_model(), PARAMETER)
    with pytest.raises(
        CheckpointError, match=r"checkpoint.json: cannot be read.*save\(\) has written"
    ):
        zero.load(tmp_path)


@run_ranks(1, 2)
def test_a_checkpoint_of_another_model_names_the_parameter(tmp_path: Path) -> None:
    model = make_model()
    zero = make(model, PARAMETER)
    train(model, zero, range(1))
    zero.save(tmp_path / "folder")
    zero.save_full(tmp_path / "full.safetensors")
    other = torch.nn.Sequential(*list(make_model()[:4]), torch.nn.Linear(11, 4))
    loaded = make(other, PARAMETER)
    for name in ("folder", "full.safetensors"):
        with pytest.raises(
            StateMismatchError, match=r"param 4: was of shape \(3, 11\).*expected \(4, 11\)"
        ):
            loaded.load(tmp_path / name)
    shorter = make(torch.nn.Sequential(*list(make_model()[:3])), PARAMETER)
    with pytest.raises(StateMismatchError, match="state of 6 parameters, but the optimizer has 4"):
        shorter.load(tmp_path / "folder")


@run_ranks(1, 3)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(tmp_path: Path) -> None:
    model = make_model()
    zero = make(model, PARAMETER)
    train(model, zero, range(1))
    zero.save(tmp_path / "folder")
    zero.save_full(tmp_path / "full.safetensors")
    kept = full_state(zero)
    before = sorted(path.name for path in (tmp_path / "folder").iterdir())
    train(model, zero, range(1, 2))
    part = zero.shards.parts[0]
    if dist.get_rank() == 0:
        zero.optim.state[zero.shards.tensors[part.param]]["odd"] = object()
    for action in (
        lambda: zero.save(tmp_path / "folder"),
        lambda: zero.save_full(tmp_path / "full.safetensors"),
    ):
        texts = raises_everywhere(action)
        label = f"param {part.param}: state.{part.param}.odd" if dist.get_rank() == 0 else ".odd"
        assert all(label in text for text in texts), texts
        assert all("object cannot be written to a checkpoint" in text for text in texts), texts
    dist.barrier()
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == before
    for name in ("folder", "full.safetensors"):
        loaded = make(make_model(), PARAMETER)
        loaded.load(tmp_path / name)
        assert_equal(full_state(loaded), kept)


@run_ranks(2)
def test_a_disk_that_fills_up_while_the_file_is_streamed_raises_on_all(tmp_path: Path) -> None:
    model = make_model()
    zero = make(model, ELEMENT)
    train(model, zero, range(1))
    zero.save_full(tmp_path / "full.safetensors")
    kept = full_state(zero)
    train(model, zero, range(1, 2))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch("shardopt.files.tensor_file.TensorFileWriter.append", full):
        texts = raises_everywhere(lambda: zero.save_full(tmp_path / "full.safetensors"))
    assert all("No space left on device" in text for text in texts), texts
    assert [path.name for path in tmp_path.iterdir()] == ["full.safetensors"]
    loaded = make(make_model(), ELEMENT)
    loaded.load(tmp_path / "full.safetensors")
    assert_equal(full_state(loaded), kept)


@run_ranks(2)
def test_folders_that_are_not_one_are_refused(tmp_path: Path) -> None:
    """As on hosts that do not share storage."""
    model = make_model()
    zero = make(model, PARAMETER)
    train(model, zero, range(1))
    texts = raises_everywhere(lambda: zero.save(tmp_path / f"of rank {dist.get_rank()}"))
    assert all(
        "rank 0 does not see" in text and "storage that they share" in text for text in texts
    )


@run_ranks(2)
def test_ranks_that_load_different_checkpoints_raise(tmp_path: Path) -> None:
    model = make_model()
    zero = make(model, PARAMETER)
    train(model, zero, range(1))
    zero.save(tmp_path / "0")
    zero.save(tmp_path / "1")
    texts = raises_everywhere(lambda: zero.load(tmp_path / str(dist.get_rank())))
    assert all("every rank must load the same checkpoint" in text for text in texts), texts


@run_ranks(2)
def test_a_pickled_file_runs_nothing(tmp_path: Path) -> None:
    class Odd:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "has run",))

    if dist.get_rank() == 0:
        torch.save({"state": {0: {"step": Odd()}}, "param_groups": []}, tmp_path / "odd.pt")
    zero = make(make_model(), PARAMETER)
    texts = raises_everywhere(lambda: zero.load_full(tmp_path / "odd.pt"))
    assert all("odd.pt: cannot be loaded" in text for text in texts), texts
    assert not (tmp_path / "has run").exists()
