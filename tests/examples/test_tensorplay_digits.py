"""The TensorPlay example, as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorplay")

SCRIPT = Path(__file__).parents[2] / "examples" / "tensorplay_digits.py"


def test_digits_are_learned_on_two_processes_with_half_of_the_state_on_each():
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--ranks", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    accuracy = re.search(r"test accuracy: ([\d.]+) %", run.stdout)
    assert accuracy is not None, run.stdout
    assert float(accuracy[1]) > 95
    rows = re.findall(r"│ (\d) +│ +(\d+) KiB │ +(\d+) KiB │", run.stdout)
    assert [rank for rank, _, _ in rows] == ["0", "1"]
    assert all(abs(2 * int(sharded) - int(unsharded)) <= 2 for _, sharded, unsharded in rows)
