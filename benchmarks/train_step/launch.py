"""Runs measurements in fresh processes, again where others used the machine meanwhile."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.train_step.settings import EXCHANGE, Settings
from benchmarks.train_step.variants import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
WORKER = "benchmarks.train_step.worker"
MAX_FOREIGN_CPU = 0.1
TIMED_OUT = "no end after"


def attempts(settings: Settings, *, max_repeats: int, timeout: float) -> Iterator[dict[str, Any]]:
    """Launch until a measurement was undisturbed, failed for good, or there were enough of them."""
    for number in range(1, max_repeats + 2):
        result = launch(settings, timeout=timeout)
        yield result | {"attempt": number}
        if result.get("foreign_cpu", 0.0) <= MAX_FOREIGN_CPU:
            return


def launch(settings: Settings, *, timeout: float) -> dict[str, Any]:
    """Run one job; return what it measured, or why not, as ``error`` or ``unavailable``.

    The latter two have ``is_hopeless`` if it is no use to try again.
    """
    package = None
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ)
    if settings.variant != EXCHANGE:
        package = VARIANTS[settings.variant].package
        environment |= VARIANTS[settings.variant].environment
    if package and importlib.util.find_spec(package) is None:
        return {"unavailable": f"{package} is not installed", "is_hopeless": True}
    paths = [str(ROOT), environment.get("PYTHONPATH", "")]
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    clear(settings)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={settings.ranks}", "--module", WORKER, settings.dumps()]
    log = Path(settings.folder) / "log.txt"
    error = run(command, environment, log, timeout=timeout)
    if settings.result_path.exists() and error is None:
        result: dict[str, Any] = json.loads(settings.result_path.read_text())
        return result
    return failure(settings, log, error or "no result")


def run(
    command: list[str], environment: dict[str, str], log: Path, *, timeout: float
) -> str | None:
    """Run a command to its end, in a process group of its own; return what went wrong."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"{TIMED_OUT} {timeout:.0f} s"
        finally:
            if process.poll() is None:
                stop(process)
    return None if code == 0 else f"exit code {code}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its workers."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(40)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clear(settings: Settings) -> None:
    """Remove what an earlier launch left, but the reference."""
    for path in Path(settings.folder).glob("*.json"):
        path.unlink()


def failure(settings: Settings, log: Path, what: str) -> dict[str, Any]:
    """The first error that a rank wrote, else the end of the log."""
    paths = [settings.error_path(rank) for rank in range(settings.ranks)]
    written = sorted((p for p in paths if p.exists()), key=lambda path: path.stat().st_mtime)
    if written:
        found: dict[str, Any] = json.loads(written[0].read_text())
        return found
    text = log.read_text(errors="replace")
    said = [line for line in text.splitlines() if re.search(r"\b\w*(Error|Exception): ", line)]
    what = ": ".join([what, *said[:1]])
    is_hopeless = what.startswith(TIMED_OUT)
    return {
        "error": what,
        "is_hopeless": is_hopeless,
        "traceback": text[-3000:],
    }
