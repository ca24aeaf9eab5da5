"""What the README lets a reader copy runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

NAMES_OF_THREADS = """
from pathlib import Path
print("threads", [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()])
"""
README = Path(__file__).parents[2] / "README.md"


def blocks():
    """The blocks of Python code."""
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_every_block_is_python():
    for block in blocks():
        compile(block, str(README), "exec")


@pytest.mark.timeout(120)
def test_the_script_trains_on_two_processes(tmp_path):
    [script] = [block for block in blocks() if "init_process_group" in block]
    (tmp_path / "train.py").write_text(script + NAMES_OF_THREADS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert run.returncode == 0, run.stderr
    norms = re.findall(r"rank (\d): norm (\d\.\d+)", run.stdout)
    assert sorted(rank for rank, _ in norms) == ["0", "1"]
    assert len({norm for _, norm in norms}) == 1
    assert run.stdout.count("threads") == 2
    assert "gloo" not in run.stdout  # such threads may abort the process at its end
