"""``shardopt checkpoint convert``: bit for bit between all kinds, out of core, and never half there."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardopt import Sharding, ZeroRedundancyOptimizer
from shardopt.checkpoint import open_contents
from shardopt.cli import main
from shardopt.files import read_manifest
from shardopt.frameworks.torch import TORCH
from shardopt.testing import run_ranks
from tests.cli.checkpoints import (
    CASES,
    damage,
    make_optimizer,
    make_params,
    run_without,
    save_plain,
    state_dict_of,
    take_steps,
    tensors_in,
    trained,
)
from tests.ranks.training import assert_equal, full_state_dict


def convert(source: Path, target: Path, *options: str) -> Path:
    assert main(["checkpoint", "convert", str(source), str(target), *options]) == 0
    return target


def refused(capsys: Any, source: Path, target: Path, *options: str) -> str:
    capsys.readouterr()
    assert main(["checkpoint", "convert", str(source), str(target), *options]) == 1
    text: str = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def loaded(case: str, path: Path) -> dict[str, Any]:
    """The state of a fresh optimizer that has loaded a checkpoint."""
    optimizer = make_optimizer(case)
    optimizer.load(path)
    return state_dict_of(optimizer)


@pytest.mark.parametrize("case", CASES)
def test_folder_to_file_to_folder_to_file_is_equal_bit_for_bit_and_loads(tmp_path, case):
    optimizer = trained(case)
    expected = state_dict_of(optimizer)
    optimizer.save(tmp_path / "saved")
    optimizer.save_full(tmp_path / "saved.safetensors")
    full = convert(tmp_path / "saved", tmp_path / "full.safetensors")
    three = convert(full, tmp_path / "three", "--ranks", "3")
    again = convert(three, tmp_path / "again.safetensors")
    assert tensors_in(full) == tensors_in(again) == tensors_in(tmp_path / "saved.safetensors")
    assert len(files_of(three)) == 3
    for path in (full, three, again):
        assert_equal(loaded(case, path), expected)
    fresh = make_optimizer(case)
    fresh.load_full(again)
    assert_equal(state_dict_of(fresh), expected)


@pytest.mark.parametrize("case", CASES)
def test_a_state_dict_is_written_as_the_unsharded_optimizers(tmp_path, case):
    optimizer = trained(case)
    expected = state_dict_of(optimizer)
    optimizer.save(tmp_path / "saved")
    found = torch.load(convert(tmp_path / "saved", tmp_path / "state.pt"), weights_only=True)
    assert_equal(found, expected)
    assert list(found["state"]) == list(expected["state"])


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_state_dict_to_file_to_state_dict_is_equal(tmp_path, optimizer_class, options):
    expected = save_plain(tmp_path / "state.pt", optimizer_class, **options)
    full = convert(tmp_path / "state.pt", tmp_path / "full.safetensors")
    found = torch.load(convert(full, tmp_path / "back.pt"), weights_only=True)
    assert_equal(found, expected)
    key = "exp_avg" if optimizer_class is torch.optim.AdamW else "momentum_buffer"
    assert found["state"][0][key].is_contiguous(memory_format=torch.channels_last)
    two = convert(tmp_path / "state.pt", tmp_path / "two", "--ranks", "2")
    params = [param for _, param in make_params("")]
    fresh = ZeroRedundancyOptimizer(params, optimizer_class, lr=0.01, **options)
    fresh.load(two)
    assert_equal(state_dict_of(fresh), expected)


def test_what_belongs_to_no_parameter_comes_along(tmp_path):
    state = save_plain(tmp_path / "plain.pt")
    state["state"]["shared"] = {"running": torch.arange(3), "note": ("a", float("inf"))}
    state["version"] = torch.tensor(7)
    state["param_groups"][0]["lr"] = torch.tensor(0.25)
    torch.save(state, tmp_path / "state.pt")
    two = convert(tmp_path / "state.pt", tmp_path / "two", "--ranks", "2")
    assert_equal(torch.load(convert(two, tmp_path / "back.pt"), weights_only=True), state)


def test_state_within_state_comes_along(tmp_path):
    state = save_plain(tmp_path / "plain.pt")
    state["state"][1]["history"] = [torch.arange(2), {7: torch.arange(3)}]
    state["state"][1][5] = torch.ones(4)
    torch.save(state, tmp_path / "state.pt")
    two = convert(tmp_path / "state.pt", tmp_path / "two", "--ranks", "2")
    assert_equal(torch.load(convert(two, tmp_path / "back.pt"), weights_only=True), state)


def test_the_first_rank_alone_holds_the_param_groups(tmp_path):
    optimizer = trained("AdamW by parameter")
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    optimizer.save_full(tmp_path / "full.safetensors")
    two = convert(tmp_path / "full.safetensors", tmp_path / "two", "--ranks", "2")
    names = read_manifest(two)["files"]
    held = [list(tensors_in(two / names[rank])) for rank in ("0", "1")]
    assert [any(name.startswith("param_groups") for name in found) for found in held] == [
        True,
        False,
    ]


def test_parameters_are_packed_evenly_by_bytes_of_state(tmp_path):
    trained("AdamW by parameter").save_full(tmp_path / "full.safetensors")
    two = convert(tmp_path / "full.safetensors", tmp_path / "two", "--ranks", "2")
    assert [part[:2] for part in read_manifest(two)["parts"]] == [[0, 0], [1, 1], [1, 2]]


def test_more_ranks_than_parameters_leave_files_without_state(tmp_path):
    trained("AdamW by parameter").save_full(tmp_path / "full.safetensors")
    five = convert(tmp_path / "full.safetensors", tmp_path / "five", "--ranks", "5")
    again = convert(five, tmp_path / "again.safetensors")
    assert len(files_of(five)) == 5
    assert tensors_in(again) == tensors_in(tmp_path / "full.safetensors")


def test_a_folder_gets_as_many_files_as_ranks_have_saved(tmp_path):
    trained("AdamW by parameter").save_full(tmp_path / "full.safetensors")
    three = convert(tmp_path / "full.safetensors", tmp_path / "three", "--ranks", "3")
    full = convert(three, tmp_path / "again.safetensors")
    assert len(files_of(convert(full, tmp_path / "as many"))) == 3


def test_an_optimizer_that_was_never_stepped_is_converted(tmp_path):
    optimizer = make_optimizer("AdamW by parameter")
    optimizer.save(tmp_path / "saved")
    full = convert(tmp_path / "saved", tmp_path / "full.safetensors")
    assert_equal(loaded("AdamW by parameter", full), state_dict_of(optimizer))


def test_the_kind_of_a_target_without_suffix_can_be_said(tmp_path):
    trained("AdamW by parameter").save(tmp_path / "saved")
    full = convert(tmp_path / "saved", tmp_path / "full", "--to", "full")
    state = convert(full, tmp_path / "state", "--to", "torch")
    folder = convert(state, tmp_path / "folder.pt", "--to", "sharded")
    assert folder.is_dir()
    assert tensors_in(*files_of(folder)) == tensors_in(full)


def test_what_was_written_is_told(capsys, tmp_path):
    trained("AdamW by parameter").save(tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "two", "--ranks", "2")
    captured = capsys.readouterr()
    assert captured.out == (
        f"{tmp_path / 'two'}: folder of 2 files, 3 parameters, 1,164 bytes of state\n"
    )
    assert captured.err == ""


# --- Out of core ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_small_ranges_give_the_same_file(monkeypatch, tmp_path, case):
    trained(case).save(tmp_path / "saved")
    expected = tensors_in(convert(tmp_path / "saved", tmp_path / "full.safetensors"))
    monkeypatch.setattr("shardopt.checkpoint.contents.CHUNK_NBYTES", 24)
    two = convert(tmp_path / "saved", tmp_path / "two", "--ranks", "2")
    assert tensors_in(convert(two, tmp_path / "again.safetensors")) == expected
    state = convert(two, tmp_path / "state.pt")
    if case != "Adafactor":
        assert tensors_in(convert(state, tmp_path / "third.safetensors")) == expected


def test_ranges_are_bounded_but_for_tensors_in_another_order(monkeypatch, tmp_path):
    trained("AdamW by element").save(tmp_path / "saved")
    monkeypatch.setattr("shardopt.checkpoint.contents.CHUNK_NBYTES", 24)
    with open_contents(tmp_path / "saved", TORCH.empty_on_cpu, lambda: TORCH) as contents:
        numels = {
            entry.name: [flat.numel() for flat in contents.flats(entry)]
            for state in contents.state.values()
            for entry in state.tensors
        }
    assert numels["state.0.exp_avg"] == [108]
    assert numels["state.1.exp_avg"] == [6, 6, 6, 6, 6, 5]
    assert numels["state.1.step"] == [1]


def test_progress_is_told_in_bytes_and_ends_at_all_of_them(monkeypatch, tmp_path):
    from shardopt.checkpoint import write_full_file

    trained("AdamW by parameter").save(tmp_path / "saved")
    monkeypatch.setattr("shardopt.checkpoint.contents.CHUNK_NBYTES", 400)
    told: list[int] = []
    with open_contents(tmp_path / "saved", TORCH.empty_on_cpu, lambda: TORCH) as contents:
        write_full_file(contents, tmp_path / "full.safetensors", told.append)
        assert sum(told) == contents.nbytes
    assert max(told) == 400


# --- Targets --------------------------------------------------------------------------------------


def test_a_target_of_the_same_kind_is_replaced(tmp_path):
    optimizer = trained("AdamW by parameter")
    optimizer.save(tmp_path / "source")
    take_steps(optimizer)
    optimizer.save(tmp_path / "folder")
    optimizer.save_full(tmp_path / "full.safetensors")
    save_plain(tmp_path / "state.pt")
    for name in ("folder", "full.safetensors", "state.pt"):
        convert(tmp_path / "source", tmp_path / name)
    expected = tensors_in(*files_of(tmp_path / "source"))
    assert tensors_in(*files_of(tmp_path / "folder")) == expected
    assert tensors_in(tmp_path / "full.safetensors") == expected
    assert tensors_in(convert(tmp_path / "state.pt", tmp_path / "x.safetensors")) == expected


def test_a_folder_is_converted_in_place(tmp_path):
    trained("AdamW by element").save(tmp_path / "folder")
    expected = tensors_in(convert(tmp_path / "folder", tmp_path / "full.safetensors"))
    convert(tmp_path / "folder", tmp_path / "folder", "--ranks", "3")
    assert len(files_of(tmp_path / "folder")) == 3
    assert tensors_in(convert(tmp_path / "folder", tmp_path / "full.safetensors")) == expected


def test_a_target_of_another_kind_is_refused_and_stays(capsys, tmp_path):
    optimizer = trained("AdamW by parameter")
    optimizer.save(tmp_path / "folder")
    optimizer.save_full(tmp_path / "full.safetensors")
    save_plain(tmp_path / "state.pt")
    torch.save({"weight": torch.ones(3)}, tmp_path / "model.pt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    source = tmp_path / "full.safetensors"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target, kind, text in [
        ("folder", "full", "is a folder, as save() writes it; to write a full file"),
        ("full.safetensors", "sharded", "is a full file, as save_full() writes it; to write a"),
        ("state.pt", "full", "is a state dict of an optimizer"),
        ("model.pt", "torch", "is no checkpoint"),
        ("other", "sharded", "is no checkpoint"),
        ("other/notes", "full", "is no checkpoint"),
    ]:
        found = refused(capsys, source, tmp_path / target, "--to", kind)
        assert f"{tmp_path / target}: is there already and {text}" in found
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_an_empty_folder_is_filled(tmp_path):
    trained("AdamW by parameter").save_full(tmp_path / "full.safetensors")
    (tmp_path / "folder").mkdir()
    convert(tmp_path / "full.safetensors", tmp_path / "folder")
    assert len(files_of(tmp_path / "folder")) == 1


def test_a_folder_that_is_not_there_is_named(capsys, tmp_path):
    trained("AdamW by parameter").save(tmp_path / "saved")
    text = refused(capsys, tmp_path / "saved", tmp_path / "none" / "full.safetensors")
    assert f"{tmp_path / 'none'}: no such folder; make it first" in text


@pytest.mark.parametrize("target", ["full.safetensors", "folder", "state.pt"])
def test_a_damaged_source_leaves_the_target_as_it_was(capsys, tmp_path, target):
    trained("AdamW by parameter").save(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / target)
    (file,) = files_of(tmp_path / "source")
    damage(file, "state.2.exp_avg")
    paths = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    before = {path: path.read_bytes() for path in paths}
    text = refused(capsys, tmp_path / "source", tmp_path / target)
    assert f"{file}: 'state." in text
    assert "is damaged: its checksum" in text
    paths = [path for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert {path: path.read_bytes() for path in paths} == before


def test_a_part_that_is_missing_is_named(capsys, tmp_path):
    trained("AdamW by element").save_full(tmp_path / "full.safetensors")
    folder = tmp_path / "folder"
    trained("AdamW by element").save(folder)
    manifest = json.loads((folder / "checkpoint.json").read_text())
    contents = json.loads(manifest["contents"])
    contents["parts"] = [[*part[:2], 1, *part[3:]] for part in contents["parts"]]
    from shardopt.files import commit

    commit(folder, contents)
    text = refused(capsys, folder, tmp_path / "out.safetensors")
    assert "param 0: 'state.0." in text
    assert "is not the part of it that belongs behind element 0" in text


# --- What cannot be converted ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer_class", "keys"),
    [(torch.optim.Adafactor, "['step', 'row_var', 'col_var']"), (torch.optim.SGD, "[]")],
)
def test_a_state_dict_without_shapes_is_refused(capsys, tmp_path, optimizer_class, keys):
    save_plain(tmp_path / "state.pt", optimizer_class)
    for target in ("full.safetensors", "folder"):
        text = refused(capsys, tmp_path / "state.pt", tmp_path / target)
        assert f"param 0: its shape is not known, since none of its state ({keys})" in text
        assert "load_full()" in text
        assert not (tmp_path / target).exists()


def test_values_that_files_cannot_hold_are_named(capsys, tmp_path):
    state = save_plain(tmp_path / "plain.pt")
    state["state"][1]["wave"] = torch.ones(2, dtype=torch.complex128)
    torch.save(state, tmp_path / "state.pt")
    text = refused(capsys, tmp_path / "state.pt", tmp_path / "full.safetensors")
    assert "state.1.wave: dtype torch.complex128 cannot be written to a checkpoint" in text


def test_ranks_that_make_no_sense_are_refused(capsys, tmp_path):
    trained("AdamW by parameter").save(tmp_path / "saved")
    text = refused(capsys, tmp_path / "saved", tmp_path / "x.safetensors", "--ranks", "2")
    assert "--ranks 2: only --to sharded writes a file per rank, but this is --to full" in text
    text = refused(capsys, tmp_path / "saved", tmp_path / "x", "--ranks", "0")
    assert "--ranks 0: expected 1 or more" in text


# --- Several ranks, other frameworks --------------------------------------------------------------


def test_tensorplay_converts_where_torch_is_not_installed(tmp_path):
    pytest.importorskip("tensorplay")
    trained("AdamW by element").save(tmp_path / "saved")
    expected = tensors_in(convert(tmp_path / "saved", tmp_path / "expected.safetensors"))
    source, target = str(tmp_path / "saved"), str(tmp_path / "full.safetensors")
    ended = run_without(["torch"], "checkpoint", "convert", source, target)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert tensors_in(tmp_path / "full.safetensors") == expected


@pytest.mark.parametrize("case", CASES)
@run_ranks(2)
def test_what_ranks_have_saved_is_converted_and_loads_on_ranks(case: str, tmp_path: Path) -> None:
    optimizer = make_optimizer(case)
    take_steps(optimizer)
    optimizer.save(tmp_path / "saved")
    optimizer.save_full(tmp_path / "saved.safetensors")
    expected = full_state_dict(optimizer)
    steps = ["saved", "full.safetensors", "three", "again.safetensors", "state.pt"]
    if dist.get_rank() == 0:
        for source, target in pairwise(steps):
            ranks = ["--ranks", "3"] if target == "three" else []
            convert(tmp_path / source, tmp_path / target, *ranks)
        found = [tensors_in(tmp_path / name) for name in (steps[1], steps[3], "saved.safetensors")]
        assert found[0] == found[1] == found[2]
    dist.barrier()
    assert_equal(torch.load(tmp_path / "state.pt", weights_only=True), expected)
    for name in steps[1:4]:
        fresh = make_optimizer(case)
        fresh.load(tmp_path / name)
        assert_equal(full_state_dict(fresh), expected)


@run_ranks(2)
def test_cut_parts_are_read_across_files_in_small_ranges(tmp_path: Path) -> None:
    from shardopt.checkpoint import contents

    params = [torch.nn.Parameter(torch.randn(n)) for n in (50, 7, 31)]
    optimizer = ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        sharding=Sharding(granularity="element"),
    )
    take_steps(optimizer)
    optimizer.save(tmp_path / "saved")
    optimizer.save_full(tmp_path / "full.safetensors")
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(contents, "CHUNK_NBYTES", 12)
            out = convert(tmp_path / "saved", tmp_path / "out.safetensors")
        assert tensors_in(out) == tensors_in(tmp_path / "full.safetensors")
