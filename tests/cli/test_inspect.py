"""``shardopt checkpoint inspect``: everything that a checkpoint says, and whether it is as it was written."""

from __future__ import annotations

import io
import json
import zipfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardopt.cli import main
from shardopt.testing import run_ranks
from tests.cli.checkpoints import CASES, damage, flip, make_optimizer, save_plain, trained
from tests.cli.checkpoints import take_steps as take_steps_with


def told(capsys: Any, path: Path, *options: str) -> str:
    """What the command prints."""
    assert main(["checkpoint", "inspect", str(path), *options]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def as_json(capsys: Any, path: Path, *options: str) -> Any:
    return json.loads(told(capsys, path, "--json", *options))


def save_all(folder: Path, case: str) -> list[Path]:
    """A checkpoint in each kind of file of ours."""
    optimizer = trained(case)
    optimizer.save(folder / "folder")
    optimizer.save_full(folder / "full.safetensors")
    return [folder / "folder", folder / "full.safetensors"]


ENTRY = {"dtype": "float32", "shape": [7, 5]}
STEP = {"dtype": "float32", "shape": []}


def test_json_says_everything_of_a_folder(capsys, tmp_path):
    folder, _ = save_all(tmp_path, "AdamW by parameter")
    found = as_json(capsys, folder)
    (path,) = folder.glob("*.safetensors")
    nbytes = {"conv.weight": 8 * 108 + 4, "head.weight": 8 * 35 + 4, "head.bias": 8 + 4}
    assert {key: found[key] for key in list(found)[:8]} == {
        "path": str(folder),
        "kind": "sharded",
        "optimizer": "AdamW",
        "world_size": 1,
        "step": 3,
        "num_params": 3,
        "state_nbytes": sum(nbytes.values()),
        "file_nbytes": path.stat().st_size,
    }
    (group,) = found["param_groups"]
    assert (group["number"], group["num_params"]) == (0, 3)
    assert group["options"]["lr"] == 0.01
    assert group["options"]["betas"] == [0.9, 0.999]
    assert {param["name"]: param["nbytes"] for param in found["params"]} == nbytes
    assert found["params"][1] == {
        "number": 1,
        "name": "head.weight",
        "shape": [7, 5],
        "dtype": "float32",
        "state": {"step": STEP, "exp_avg": ENTRY, "exp_avg_sq": ENTRY},
        "nbytes": nbytes["head.weight"],
        "ranks": [0],
    }
    assert found["files"] == [
        {
            "rank": 0,
            "file": path.name,
            "nbytes": path.stat().st_size,
            "state_nbytes": sum(nbytes.values()),
            "share": 1.0,
        }
    ]
    assert found["damages"] is None


@pytest.mark.parametrize("case", CASES)
def test_a_folder_and_a_full_file_of_one_state_say_the_same(capsys, tmp_path, case):
    folder, full = (as_json(capsys, path) for path in save_all(tmp_path, case))
    same = ("optimizer", "world_size", "step", "state_nbytes", "param_groups", "params")
    assert {key: folder[key] for key in same} == {key: full[key] for key in same}
    assert [folder["kind"], full["kind"]] == ["sharded", "full"]


def test_a_state_dict_says_the_same_but_for_what_it_does_not_know(capsys, tmp_path):
    _, full = save_all(tmp_path, "AdamW by parameter")
    save_plain(tmp_path / "state.pt")
    expected = as_json(capsys, full)
    found = as_json(capsys, tmp_path / "state.pt")
    assert (found["kind"], found["optimizer"], found["world_size"]) == ("torch", "unknown", None)
    assert found["step"] == 3
    assert found["param_groups"] == expected["param_groups"]
    assert found["params"] == [{**param, "name": None} for param in expected["params"]]


def test_a_state_dict_without_shapes_is_told_as_far_as_it_is_known(capsys, tmp_path):
    save_plain(tmp_path / "state.pt", torch.optim.Adafactor)
    matrix = as_json(capsys, tmp_path / "state.pt")["params"][1]
    assert (matrix["shape"], matrix["dtype"]) == (None, None)
    assert matrix["state"]["row_var"] == {"dtype": "float32", "shape": [7, 1]}


def test_options_that_are_tensors_are_told_by_their_number(capsys, tmp_path):
    optimizer = make_optimizer("AdamW by parameter")
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    optimizer.param_groups[0]["eps"] = float("inf")
    optimizer.save_full(tmp_path / "full.safetensors")
    found = as_json(capsys, tmp_path / "full.safetensors")
    options = found["param_groups"][0]["options"]
    assert (options["lr"], options["eps"]) == (0.5, "inf")
    assert found["step"] is None
    assert found["params"][0]["state"] == {}


def test_the_largest_step_is_told(capsys, tmp_path):
    optimizer = trained("AdamW by parameter")
    optimizer.param_groups[0]["params"][0].grad = None
    take_steps_with(optimizer)
    last = optimizer.param_groups[0]["params"][-1]
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param) if param is last else None
    optimizer.step()
    optimizer.save_full(tmp_path / "full.safetensors")
    assert as_json(capsys, tmp_path / "full.safetensors")["step"] == 7


def test_tables_hold_the_names_and_fit_a_page(capsys, tmp_path):
    for path in save_all(tmp_path, "AdamW by parameter"):
        text = told(capsys, path)
        lines = text.splitlines()
        assert max(map(len, lines)) <= 100
        assert "step            3" in text
        assert any(
            line.split()[:3] == ["1", "head.weight", "(7,"] and "step: float32 ()" in line
            for line in lines
        )
        assert "exp_avg, exp_avg_sq: float32" in text
        assert "betas=(0.9, 0.999)" in text
        assert "1.000" in text


def test_names_with_brackets_are_shown_as_they_are(capsys, tmp_path):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([("[bold]x[/bold]:smile:", param)], lr=0.1, momentum=0.9)
    param.grad = torch.ones(2)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    assert "[bold]x[/bold]:smile:" in told(capsys, tmp_path / "state.pt")


def test_state_within_state_is_told(capsys, tmp_path):
    state = {"history": [torch.ones(2), torch.ones(3)], "pair": (1, {"x": None})}
    group = {"params": [0], "lr": 0.1}
    torch.save({"state": {0: state}, "param_groups": [group]}, tmp_path / "state.pt")
    text = told(capsys, tmp_path / "state.pt")
    assert "history: [float32 (2,), float32 (3,)]" in text
    assert "pair: (1, {x: None})" in text
    (param,) = as_json(capsys, tmp_path / "state.pt")["params"]
    assert param["nbytes"] == 20
    assert param["state"]["history"][1] == {"dtype": "float32", "shape": [3]}
    assert param["state"]["pair"] == [1, {"x": None}]


def test_the_table_of_parameters_can_be_left_out(capsys, tmp_path):
    _, full = save_all(tmp_path, "AdamW by parameter")
    assert "head.weight" not in told(capsys, full, "--no-params")
    assert "params" not in as_json(capsys, full, "--no-params")


def test_files_that_are_as_they_were_written_are_ok(capsys, tmp_path):
    save_plain(tmp_path / "state.pt")
    for path in (*save_all(tmp_path, "AdamW by element"), tmp_path / "state.pt"):
        assert "OK: everything was read" in told(capsys, path, "--verify")
        assert as_json(capsys, path, "--verify")["damages"] == []


def test_a_damaged_file_is_named_with_the_tensor(capsys, tmp_path):
    folder, full = save_all(tmp_path, "AdamW by parameter")
    (in_folder,) = folder.glob("*.safetensors")
    for path, file in ((folder, in_folder), (full, full)):
        damage(file, "state.0.step")
        assert main(["checkpoint", "inspect", str(path), "--verify"]) == 1
        assert (
            f"shardopt: error: {file}: 'state.0.step' is damaged: its checksum is not"
            in capsys.readouterr().err
        )
        assert main(["checkpoint", "inspect", str(path), "--verify", "--json"]) == 1
        (text,) = json.loads(capsys.readouterr().out)["damages"]
        assert text.startswith(f"{file}: 'state.0.step' is damaged")


def test_a_damaged_pickled_file_is_named(capsys, tmp_path):
    path = tmp_path / "state.pt"
    save_plain(path)
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if "/data/" in i.filename and i.file_size > 99)
    flip(path, info.header_offset + 30 + len(info.filename) + info.file_size)
    assert main(["checkpoint", "inspect", str(path), "--verify"]) == 1
    assert f"{path}: {info.filename!r} is damaged" in capsys.readouterr().err


def test_a_rank_file_that_is_gone_is_named(capsys, tmp_path):
    folder, _ = save_all(tmp_path, "AdamW by parameter")
    (file,) = folder.glob("*.safetensors")
    file.unlink()
    assert main(["checkpoint", "inspect", str(folder)]) == 1
    assert f"{file}: cannot be read" in capsys.readouterr().err


@run_ranks(2)
def test_ranks_and_their_shares_are_told(tmp_path: Path) -> None:
    optimizer = make_optimizer("AdamW by element")
    take_steps_with(optimizer)
    optimizer.save(tmp_path / "folder")
    if dist.get_rank() == 0:
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert main(["checkpoint", "inspect", str(tmp_path / "folder"), "--json"]) == 0
        found = json.loads(printed.getvalue())
        assert found["world_size"] == 2
        assert {0, 1} == {rank for param in found["params"] for rank in param["ranks"]}
        assert [0, 1] in [param["ranks"] for param in found["params"]]
        assert sum(file["share"] for file in found["files"]) == pytest.approx(2)
        conv = found["params"][0]
        assert conv["state"]["exp_avg"] == {"dtype": "float32", "shape": [4, 3, 3, 3]}
