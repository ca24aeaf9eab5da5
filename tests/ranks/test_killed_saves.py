"""Ranks killed (``kill -9``) in ``save()``: what loads afterwards is one save, whole, and none older than the last that was done.

Two tests kill at every call that reaches files or other ranks, one after the other; one kills at random moments. That one
interrupts 40 saves, or as many as the environment says::

    SHARDOPT_KILLED_SAVES=200 python -m pytest tests/ranks/test_killed_saves.py

Ranks are forks of one process that has imported everything and then has neither threads nor a process group, so they
start in milliseconds. That process is the head of a session, all of which is killed at the end, whatever happens.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from shardopt import Sharding, ZeroRedundancyOptimizer

NUM_KILLED_SAVES = int(os.environ.get("SHARDOPT_KILLED_SAVES", "40"))
SHAPES = [(40, 30), (7,), (3, 5)]

OUTSIDE = ("posix", "io", "_io", "torch._C._distributed_c10d")
"""Modules in C through which a process changes what is on the disk, or what other ranks know."""

INSIDE = {"fspath", "stat", "urandom", "fileno", "getvalue", "size"}
"""Functions there that change nothing."""

MAX_SPINS = 1_000_000
"""Turns of an empty loop, which take as long as a few saves."""

PATIENCE_SECONDS = 20.0
"""How long a rank waits for another; in vain only if something is broken, since the system says when one has died."""


# --- What is saved --------------------------------------------------------------------------------------------------


def make_optimizer(*, shared_memory: bool = True) -> ZeroRedundancyOptimizer:
    params = [torch.zeros(shape, requires_grad=True) for shape in SHAPES]
    zero = ZeroRedundancyOptimizer(
        params,
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        sharding=Sharding(granularity="element", shared_memory=shared_memory),
        lr=0.1,
    )
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    return zero


def fill(zero: ZeroRedundancyOptimizer, number: int) -> None:
    """Make every tensor of the state, and an option, say which save it is."""
    for entry in zero.optim.state.values():
        for tensor in entry.values():
            tensor.fill_(number)
    for group in zero.param_groups:
        group["lr"] = float(number)


def number_in(folder: Path) -> int:
    """Load at world size 1 and return the one save that everything belongs to."""
    zero = make_optimizer()
    zero.load(folder)
    tensors = [tensor for entry in zero.state.values() for tensor in entry.values()]
    assert len(tensors) == 3 * len(SHAPES)
    found = {value for tensor in tensors for value in tensor.unique().tolist()}
    found |= {group["lr"] for group in zero.param_groups}
    assert len(found) == 1, f"parts of several saves: {sorted(found)}"
    return int(found.pop())


# --- Processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_in_forkable() -> Iterator[Callable[..., Any]]:
    """Return what a function returns in a process that can be forked."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()

    def end() -> None:
        process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()

    def run(function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        ours.send((function, args))
        if not ours.poll(timeout):
            end()
            pytest.fail(f"no answer within {timeout} s")
        is_result, value = ours.recv()
        assert is_result, value
        return value

    try:
        yield run
    finally:
        end()
        ours.close()


def serve(connection: Any) -> None:
    """Run what is asked for, as the head of a session, until the parent is gone."""
    os.setsid()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            function, args = connection.recv()
            try:
                connection.send((True, function(*args)))
            except BaseException:
                connection.send((False, traceback.format_exc()))


class Worker:
    """A fork of this process, which reports line by line."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(report, *args)`` there."""
        reading, writing = os.pipe()
        self.lines: list[str] = []
        self._pid = os.fork()
        if not self._pid:
            os.close(reading)
            run_and_exit(function, lambda text: os.write(writing, f"{text}\n".encode()), *args)
        os.close(writing)
        self._file = open(reading)  # noqa: SIM115 - closed by end()

    def read_line(self) -> str:
        """Wait for the next line; empty if there will be none."""
        line = self._file.readline().strip()
        self.lines += [line] if line else []
        return line

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)

    def end(self) -> int:
        """Read all lines, and return the exit status once there is one: -9 if it was killed, 1 if it raised."""
        while self.read_line():
            pass
        self._file.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def last(self, word: str) -> int:
        """The highest save of which it has said ``word``, 0 for none."""
        return max((int(n) for w, n, *_ in map(str.split, self.lines) if w == word), default=0)


def run_and_exit(
    function: Callable[..., Any], report: Callable[[str], Any], *args: Any
) -> NoReturn:
    """Never return to what the parent was doing."""
    status = 1
    try:
        function(report, *args)
        status = 0
    except BaseException:
        report("raised 0 " + traceback.format_exc().replace("\n", " | "))
    finally:
        os._exit(status)


def die_at(call: int) -> None:
    """Let this process be killed on its way into a call to the outside, which is as good as after the one before it.

    Args:
        call: How many such calls to let pass.
    """
    left = call

    def count(frame: Any, event: str, called: Any) -> None:
        nonlocal left
        if event == "c_call" and is_outside(called):
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.setprofile(count)


def is_outside(called: Any) -> bool:
    """Whether a function in C is of one of the modules, or a method of a type of theirs."""
    owner = type(getattr(called, "__self__", None))
    modules = (getattr(called, "__module__", None), owner.__module__)
    return (
        any(str(module).startswith(OUTSIDE) for module in modules)
        and called.__name__ not in INSIDE
        and owner.__name__ != "BytesIO"
    )


def save_once(
    report: Callable[[str], Any], zero: Any, folder: Path, number: int, call: int
) -> None:
    """Save in a process without a process group, and be killed in it."""
    fill(zero, number)
    die_at(call)
    zero.save(folder)
    sys.setprofile(None)


@dataclass(frozen=True)
class Ranks:
    """What the ranks of one run share.

    Attributes:
        folder: Where they save.
        number: Of their first save.
        world_size: How many they are.
        shared_memory: Whether they talk through memory, or only through sockets.
    """

    folder: Path
    number: int
    world_size: int
    shared_memory: bool = True

    def start(self, *, victim: int | None = None, call: int = 0) -> list[Worker]:
        """Start them all; ``victim`` dies at a call."""
        calls = [call if rank == victim else None for rank in range(self.world_size)]
        return [Worker(save_on_and_on, self, rank, calls[rank]) for rank in range(self.world_size)]


def save_on_and_on(report: Callable[[str], Any], ranks: Ranks, rank: int, call: int | None) -> None:
    """Save until something ends this rank."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{ranks.folder}-store-{ranks.number}",
        rank=rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=PATIENCE_SECONDS),
    )
    zero = make_optimizer(shared_memory=ranks.shared_memory)
    if call is not None:
        die_at(call)
    for number in itertools.count(ranks.number):
        fill(zero, number)
        report(f"saving {number}")
        zero.save(ranks.folder)
        report(f"saved {number}")


# --- Killed at every call -------------------------------------------------------------------------------------------


def save_alone(folder: Path, number: int) -> ZeroRedundancyOptimizer:
    """Save in this process, which has no process group."""
    zero = make_optimizer()
    fill(zero, number)
    zero.save(folder)
    return zero


def kill_alone_at_every_call(folder: Path) -> list[bool]:
    """Return for each call whether what loads after a kill there is the new save."""
    zero = save_alone(folder, 1)
    is_new: list[bool] = []
    for call in itertools.count():
        old, new = number_in(folder), call + 2
        worker = Worker(save_once, zero, folder, new, call)
        status = worker.end()
        if not status:
            assert number_in(folder) == new
            return is_new
        assert status == -signal.SIGKILL, worker.lines
        found = number_in(folder)
        assert found in (old, new), f"killed at call {call} of save {new}: found {found}, not {old}"
        is_new.append(found == new)
    raise AssertionError("never done")


@pytest.mark.timeout(150)
def test_a_save_killed_at_any_call_leaves_the_old_state_or_the_new_one(
    run_in_forkable: Callable[..., Any], tmp_path: Path
) -> None:
    """And what killed saves have left behind is gone after one that was not killed."""
    folder = tmp_path / "saved"
    is_new = run_in_forkable(kill_alone_at_every_call, folder, timeout=120)
    assert is_new == sorted(is_new)  # there is one call that makes it current
    assert is_new.count(False) > 10
    assert is_new.count(True) > 1
    names = [path.name for path in folder.iterdir()]
    assert len(names) == 2, names


def kill_a_rank_at_every_call(folder: Path, victim: int, world_size: int) -> list[bool]:
    """As ``kill_alone_at_every_call``, in the first of the saves that ranks make; the others are left to themselves."""
    save_alone(folder, 1)
    is_new: list[bool] = []
    for call in itertools.count():
        old, new = number_in(folder), 2 + 2 * call
        ranks = Ranks(folder, new, world_size).start(victim=victim, call=call)
        statuses = [rank.end() for rank in ranks]
        expected = [-signal.SIGKILL if rank == victim else 1 for rank in range(world_size)]
        texts = [rank.lines[-1:] for rank in ranks]
        assert statuses == expected, (statuses, texts)
        done = max(rank.last("saved") for rank in ranks)
        found = number_in(folder)
        assert max(old, done) <= found <= new + 1, (found, texts)
        if ranks[victim].last("saved"):  # it was killed in its second save
            return is_new
        is_new.append(found == new)
    raise AssertionError("never done")


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("victim", "world_size"), [(0, 2), (1, 2), (2, 3)])
def test_a_rank_killed_at_any_call_leaves_the_old_state_or_the_new_one(
    run_in_forkable: Callable[..., Any], victim: int, world_size: int, tmp_path: Path
) -> None:
    """And the others raise, and do no harm while they do."""
    folder = tmp_path / "saved"
    is_new = run_in_forkable(kill_a_rank_at_every_call, folder, victim, world_size, timeout=180)
    assert is_new.count(False) > 10
    assert is_new.count(True) > 1


# --- Killed at random -----------------------------------------------------------------------------------------------


def kill_at_random(folder: Path, num_kills: int) -> dict[str, int]:
    """Interrupt saves; return how many, and after how many kills the newest save that was begun was there."""
    save_alone(folder, 0)
    generator = random.Random(0)
    counts = {"kills": 0, "interrupted": 0, "newest": 0}
    number = 1
    while counts["interrupted"] < num_kills:
        ranks = Ranks(folder, number, generator.choice((2, 3)), generator.random() < 0.5).start()
        victim = generator.choice(ranks)
        for _ in range(generator.randrange(1, 6)):
            assert victim.read_line().startswith("sav"), victim.lines
        for _ in range(generator.randrange(MAX_SPINS)):
            pass
        everyone_at_once = generator.random() < 0.5  # else the others are left to themselves
        for rank in ranks if everyone_at_once else [victim]:
            rank.kill()
        statuses = [rank.end() for rank in ranks]
        assert all(status in (1, -signal.SIGKILL) for status in statuses), statuses
        done = max(rank.last("saved") for rank in ranks)
        begun = max(rank.last("saving") for rank in ranks)
        found = number_in(folder)
        assert max(done, number - 1) <= found <= begun, (found, [rank.lines[-2:] for rank in ranks])
        counts["kills"] += 1
        counts["interrupted"] += victim.last("saving") > victim.last("saved")
        counts["newest"] += found == begun
        save_alone(folder, begun + 1)
        number = begun + 2
    return counts


@pytest.mark.timeout(120 + 3 * NUM_KILLED_SAVES)
def test_ranks_killed_at_random_leave_a_save_that_is_whole_and_not_older_than_one_that_was_done(
    run_in_forkable: Callable[..., Any], tmp_path: Path
) -> None:
    folder, timeout = tmp_path / "saved", 90 + 3 * NUM_KILLED_SAVES
    counts = run_in_forkable(kill_at_random, folder, NUM_KILLED_SAVES, timeout=timeout)
    assert counts["interrupted"] == NUM_KILLED_SAVES
