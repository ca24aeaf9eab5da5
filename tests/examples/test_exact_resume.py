"""The example of an exact resume, as a user starts it."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "exact_resume.py"
OPTIONS = ["--steps", "12", "--save-every", "4"]
PATIENCE_SECONDS = 120.0

pytestmark = pytest.mark.timeout(3 * PATIENCE_SECONDS)


@dataclass(frozen=True)
class Finished:
    status: int
    stdout: str
    stderr: str

    @property
    def loss(self) -> float:
        """The final loss, to the last bit."""
        found = re.search(r"to the last bit: (\S+)", self.stdout)
        assert found, f"no final loss in:\n{self.stdout}\n{self.stderr}"
        return float.fromhex(found[1])

    @property
    def saved_steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"step +(\d+) .* saved", self.stdout)]


def torchrun(num_ranks: int, folder: Path, *options: str) -> Finished:
    """Run the script; end all that it has started if it takes too long."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    process = subprocess.Popen(
        [sys.executable, *launcher, SCRIPT, "--folder", folder, *OPTIONS, *options],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return Finished(process.returncode, stdout, stderr)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on 2 ranks of which one was killed after step 10, and parts of a save that never ended."""
    folder = tmp_path_factory.mktemp("resume") / "killed"
    finished = torchrun(2, folder, "--kill-at", "10")
    assert finished.status != 0
    assert "rank 1 kills itself" in finished.stdout
    assert "to the last bit" not in finished.stdout
    assert finished.saved_steps == [4, 8]
    shutil.copytree(folder / "step-000008", folder / "step-000012")
    (folder / "step-000012" / "rest.pt").write_bytes(b"half")
    (folder / "latest.unfinished").write_text("step-0000")
    return folder


def resume(num_ranks: int, killed: Path, tmp_path: Path) -> Finished:
    folder = tmp_path / "resumed"
    shutil.copytree(killed, folder)
    finished = torchrun(num_ranks, folder)
    assert finished.status == 0, finished.stderr
    assert f"ranks: {num_ranks}, go on from {folder / 'step-000008'}, saved by 2" in finished.stdout
    assert finished.saved_steps == [12]
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000012"]
    return finished


def test_a_killed_run_ends_with_the_loss_of_one_that_was_not_to_the_last_bit(
    killed: Path, tmp_path: Path
) -> None:
    whole = torchrun(2, tmp_path / "whole")
    assert whole.status == 0, whole.stderr
    assert "start anew" in whole.stdout
    assert whole.saved_steps == [4, 8, 12]
    assert resume(2, killed, tmp_path).loss.hex() == whole.loss.hex()


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_killed_run_goes_on_at_another_number_of_ranks(
    num_ranks: int, killed: Path, tmp_path: Path
) -> None:
    assert math.isfinite(resume(num_ranks, killed, tmp_path).loss)
