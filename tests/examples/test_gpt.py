"""The parts of the demo that need no other process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``import gpt`` work as it does for the script."""
    monkeypatch.syspath_prepend(EXAMPLES)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)


def refusal(capsys: Any, *arguments: str) -> str:
    from gpt.options import parse_options

    with pytest.raises(SystemExit) as exit_:
        parse_options(arguments)
    assert exit_.value.code == 2
    return str(capsys.readouterr().err).partition("error: ")[2].strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "Muon"], "cannot train this model: ValueError: Muon only supports 2D"),
        (["--optimizer", "LBFGS"], "cannot train this model: TypeError: LBFGS.step()"),
        (["--optimizer", "SparseAdam"], "SparseAdam does not support dense gradients"),
        (["--optimizer", "nosuch.Adam"], "--optimizer nosuch.Adam: No module named 'nosuch'"),
        (["--optimizer", "Optimizer"], "torch.optim has no optimizer 'Optimizer'; it has"),
        (["--ranks", "0"], "--ranks: expected a number above 0, got 0"),
        (["--ranks", "9", "--batch-size", "8"], "leaves some of 9 ranks without a sequence"),
        (["--width", "100", "--heads", "8"], "use a multiple of 16"),
        (["--prompt", ""], "use at least one letter"),
        (["--resume", "nowhere.pt"], "--resume: there is no checkpoint nowhere.pt"),
        (["--resume", __file__], "is no checkpoint of train_gpt.py"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], message: str, capsys: Any) -> None:
    assert message in refusal(capsys, *arguments)


def test_ranks_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "--ranks 2, but torchrun started 4" in refusal(capsys, "--ranks", "2")
    from gpt.options import parse_options

    assert parse_options([]).ranks == 4


def test_resume_takes_the_recipe_from_the_checkpoint(tmp_path: Path, capsys: Any) -> None:
    from dataclasses import asdict

    from gpt.checkpoint import write_checkpoint
    from gpt.options import Recipe, parse_options

    path = tmp_path / "some" / "run.pt"
    write_checkpoint(path, {"recipe": asdict(Recipe(width=64, steps=9)), "step": 5})
    assert [file.name for file in path.parent.iterdir()] == ["run.pt"]

    options = parse_options(["--resume", str(path), "--steps", "20"])
    assert options.recipe == Recipe(width=64, steps=20)
    assert options.resume == options.out == path
    assert "was trained with --width 64; leave the flag out" in refusal(
        capsys, "--resume", "--out", str(path), "--width", "32"
    )
    assert "--steps 4: " in refusal(capsys, "--resume", str(path), "--steps", "4")


def test_ranks_share_the_same_sequences() -> None:
    from gpt.text import Sampler, Text

    text = Text(bytes(range(200)), b"", "numbers")
    device = torch.device("cpu")

    def batches(rank: int, world_size: int) -> torch.Tensor:
        sampler = Sampler(text, context=4, batch_size=5, seed=0)
        both = [sampler.next_batch(rank, world_size, device) for _ in range(2)]
        assert all(torch.equal(batch.inputs + 1, batch.targets) for batch in both)
        return both[1].inputs

    everything = batches(0, 1)
    for world_size in (2, 3):
        parts = [batches(rank, world_size) for rank in range(world_size)]
        assert sum(len(part) for part in parts) == len(everything) == 5
        for rank, part in enumerate(parts):
            assert torch.equal(part, everything[rank::world_size])


def test_splits_are_whole_modules_and_the_same_each_time() -> None:
    from gpt.text import MAX_TEXT_BYTES, read_text

    text = read_text()
    assert 1_000_000 < len(text.train) + len(text.validation) < 1.25 * MAX_TEXT_BYTES
    assert len(text.validation) > 50_000
    assert text.digest == read_text().digest


def test_memory_behind_views_is_counted_once() -> None:
    from gpt.memory import count_bytes, find_tensors

    bucket = torch.zeros(100)
    state = {0: {"step": torch.zeros(()), "moments": [bucket[:60], bucket[60:]], "name": "x"}}
    assert count_bytes(find_tensors(state)) == 404


def test_model_sees_the_past_only() -> None:
    from gpt.model import GPT, GPTShape, generate

    torch.manual_seed(0)
    model = GPT(GPTShape(width=8, layers=2, heads=2, context=6)).eval()
    inputs = torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = inputs.clone()
    changed[0, 4] = 99
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])

    written = generate(model, b"a long prompt", num_bytes=3, seed=0, temperature=1.0)
    assert written.startswith(b"a long prompt")
    assert len(written) == len(b"a long prompt") + 3
