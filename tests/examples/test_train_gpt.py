"""The demo, run as a user runs it, on a model so small that starting the processes takes most of the time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("rich")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TINY = [
    *["--width", "16", "--layers", "1", "--heads", "2", "--context", "16"],
    *["--batch-size", "5", "--steps", "6", "--eval-every", "2", "--lr", "0.03"],
]
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Finished:
    status: int
    stdout: str
    stderr: str

    @property
    def loss_hex(self) -> str:
        """The final validation loss, to the last bit."""
        found = re.search(r"to the last bit: (\S+)", self.stdout)
        assert found, f"no final loss in:\n{self.stdout}\n{self.stderr}"
        return found[1]

    @property
    def table(self) -> list[list[int]]:
        """The numbers in the rows of the table of bytes."""
        rows = re.findall(r"^ +(\d(?:[\d,]* +)+)$", self.stdout, flags=re.MULTILINE)
        return [[int(cell.replace(",", "")) for cell in row.split()] for row in rows]


def python(folder: Path, *arguments: str | Path) -> Finished:
    """Run Python in ``folder``; end all that it started if it takes too long."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Finished(process.returncode, stdout, stderr)


def demo(folder: Path, *arguments: str | Path) -> Finished:
    finished = python(folder, SCRIPT, *arguments)
    assert finished.status == 0, finished.stderr
    return finished


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Six steps on two ranks, without interruption."""
    folder = tmp_path_factory.mktemp("sharded")
    finished = demo(folder, "--ranks", "2", *TINY)
    assert (folder / "runs" / "train_gpt.pt").is_file()
    return finished


def test_loss_falls_and_the_model_writes(sharded: Finished) -> None:
    found = re.search(r"went from (\S+) to (\S+) nats", sharded.stdout)
    assert found
    assert float(found[2]) < float(found[1]) - 0.5
    assert re.search(r"The model writes ─+\s+def ", sharded.stdout)


def test_ranks_together_hold_the_unsharded_state_once(sharded: Finished) -> None:
    rows = sharded.table
    assert [row[0] for row in rows] == [0, 1]
    for _, params, gradients, state, unsharded, total, unsharded_total in rows:
        assert gradients == params
        assert unsharded > 2 * params - 1  # Adam's two moments
        assert total == params + gradients + state
        assert unsharded_total == params + gradients + unsharded
    assert sum(row[3] for row in rows) == rows[0][4]
    assert max(row[3] for row in rows) < 0.6 * rows[0][4]


def test_unsharded_run_ends_in_the_same_bits(sharded: Finished, tmp_path: Path) -> None:
    plain = demo(tmp_path, "--ranks", "2", "--unsharded", *TINY)
    assert plain.loss_hex == sharded.loss_hex
    assert [row[3] for row in plain.table] == [row[4] for row in sharded.table]


def test_interrupted_run_under_torchrun_resumes_to_the_same_bits(
    sharded: Finished, tmp_path: Path
) -> None:
    stopped = python(tmp_path, *TORCHRUN, SCRIPT, *TINY, "--stop-at", "3", "--out", "half.pt")
    assert stopped.status == 0, stopped.stderr
    assert stopped.stdout.count("Stopped at step 3") == 1  # only the first rank prints

    resumed = demo(tmp_path, "--ranks", "2", "--resume", "half.pt", "--out", "whole.pt")
    assert "steps 3 to 6 of 6" in resumed.stdout
    assert resumed.loss_hex == sharded.loss_hex

    alone = demo(tmp_path, "--ranks", "1", "--resume", "half.pt", "--unsharded")
    assert float.fromhex(alone.loss_hex) == pytest.approx(
        float.fromhex(sharded.loss_hex), rel=1e-5
    )  # one rank sums the gradients in another order


def test_unknown_optimizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    refused = python(tmp_path, SCRIPT, "--optimizer", "NoSuch")
    assert refused.status == 2
    assert refused.stdout == ""
    assert (
        "error: --optimizer NoSuch: torch.optim has no optimizer 'NoSuch'; it has "
        in refused.stderr
    )
    assert "Traceback" not in refused.stderr
