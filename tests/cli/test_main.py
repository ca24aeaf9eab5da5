"""The command line as a whole: help, exit codes, one line for each error, and what has to be installed."""

import os
import pickle
import subprocess
import sys

import pytest
import torch

from shardopt.cli import main
from tests.cli.checkpoints import run_without, save_plain, trained


def error_of(capsys, *arguments):
    """What a command that fails prints, which is one line on stderr."""
    assert main(list(arguments)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardopt: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--help"], "checkpoint"),
        (["checkpoint", "--help"], "turn a checkpoint of one kind into one of another"),
        (["checkpoint", "inspect", "--help"], "--verify"),
        (["checkpoint", "convert", "--help"], "which takes memory for all of it"),
    ],
)
def test_help_tells_and_ends_well(capsys, arguments, text):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert text in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("arguments", [[], ["checkpoint"], ["checkpoint", "inspect"], ["other"]])
def test_arguments_that_do_not_fit_end_with_2(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: shardopt" in capsys.readouterr().err


def test_a_path_that_is_not_there_is_told_in_one_line(capsys, tmp_path):
    text = error_of(capsys, "checkpoint", "inspect", str(tmp_path / "nothing"))
    assert f"{tmp_path / 'nothing'}: cannot be read: No such file or directory" in text


def test_a_folder_that_is_no_checkpoint_is_told_in_one_line(capsys, tmp_path):
    text = error_of(capsys, "checkpoint", "inspect", str(tmp_path))
    assert "expected a folder that save() has written" in text


def test_a_file_of_something_else_is_told_in_one_line(capsys, tmp_path):
    path = tmp_path / "text"
    path.write_text("Once upon a time there were parameters.")
    assert "no file of tensors" in error_of(capsys, "checkpoint", "inspect", str(path))


def test_what_is_pickled_is_not_run(capsys, tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    torch.save({"state": Harmful(), "param_groups": []}, tmp_path / "zip.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harmful(), protocol=2))
    for name in ("zip.pt", "plain.pt"):
        assert "cannot be loaded" in error_of(capsys, "checkpoint", "inspect", str(tmp_path / name))
    assert not (tmp_path / "harm").exists()


def test_a_pickled_file_of_something_else_says_what_it_holds(capsys, tmp_path):
    torch.save({"model": {}, "optimizer": {}}, tmp_path / "all.pt")
    text = error_of(capsys, "checkpoint", "inspect", str(tmp_path / "all.pt"))
    assert "holds a dict with the keys ['model', 'optimizer'], expected the state dict" in text


def test_ctrl_c_ends_with_130(capsys, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    trained("SGD momentum").save_full(tmp_path / "full.safetensors")
    monkeypatch.setattr("shardopt.cli.inspect.describe", interrupt)
    assert main(["checkpoint", "inspect", str(tmp_path / "full.safetensors")]) == 130
    assert capsys.readouterr().err == "shardopt: error: interrupted\n"


def test_without_rich_the_way_to_get_it_is_told(tmp_path):
    trained("SGD momentum").save_full(tmp_path / "full.safetensors")
    for command in (["inspect"], ["convert", str(tmp_path / "folder")]):
        arguments = ["checkpoint", command[0], str(tmp_path / "full.safetensors"), *command[1:]]
        ended = run_without(["rich"], *arguments)
        assert ended.returncode == 1
        assert ended.stderr == (
            "shardopt: error: this needs rich; install it with: pip install 'shardopt[cli]'\n"
        )


def test_a_folder_is_inspected_without_a_framework_and_as_json_without_rich(tmp_path):
    trained("AdamW by element").save(tmp_path / "folder")
    ended = run_without(
        ["rich", "torch", "tensorplay", "numpy"],
        *("checkpoint", "inspect", str(tmp_path / "folder"), "--json", "--verify"),
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    assert '"step": 3,' in ended.stdout


def test_a_pickled_file_needs_torch(tmp_path):
    save_plain(tmp_path / "state.pt")
    ended = run_without(["torch"], "checkpoint", "inspect", str(tmp_path / "state.pt"))
    assert ended.returncode == 1
    assert ended.stderr == (
        "shardopt: error: files of torch.save() need torch; install it with: pip install 'shardopt[torch]'\n"
    )


def test_converting_needs_a_framework(tmp_path):
    trained("AdamW by element").save(tmp_path / "folder")
    source, target = str(tmp_path / "folder"), str(tmp_path / "full.safetensors")
    ended = run_without(["torch", "tensorplay"], "checkpoint", "convert", source, target)
    assert ended.returncode == 1
    assert "this needs torch or TensorPlay" in ended.stderr


def test_the_module_is_a_command_and_its_code_is_that_of_the_process(tmp_path):
    command = [sys.executable, "-m", "shardopt.cli", "checkpoint", "inspect", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr.startswith("shardopt: error: ")
