"""Processes that stay alive between tests, so that a rank test costs milliseconds and not an import of the framework.

Every call gets a process group of its own. Once a rank fails or the time is up, all processes are killed, and the next
call starts new ones.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0
"""How long the other ranks may take to report, once one has failed, before they are killed."""


class RankError(AssertionError):
    """A rank raised, died or did not answer in time; holds the traceback of each."""


class RankPool:
    """``world_size`` processes of one framework that run functions together."""

    def __init__(self, world_size: int, framework: str = "torch") -> None:
        """Start the processes; ``framework`` is the module that makes tensors, ``torch`` or ``tensorplay``."""
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, framework, theirs, list(sys.path)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, module: str, name: str, kwargs: dict[str, Any], *, timeout: float) -> list[Any]:
        """Call a function on all ranks and return what it returned on each.

        Args:
            module: The importable module that holds it.
            name: Its name there; a function wrapped by ``run_ranks`` stands for the function inside.
            kwargs: Picklable arguments.
            timeout: Seconds.

        Raises:
            RankError: After which the pool cannot be used again.
        """
        with tempfile.TemporaryDirectory() as folder:
            for connection in self._connections:
                connection.send((module, name, kwargs, str(Path(folder) / "store")))
            answers = self._collect(time.monotonic() + timeout)
        if all(answer is not None and answer[0] for answer in answers):
            return [answer[1] for answer in answers if answer is not None]
        self.kill()
        texts = [
            f"--- rank {rank}: "
            + (answer[1] if answer else f"no answer within {timeout} s, killed")
            for rank, answer in enumerate(answers)
            if not (answer and answer[0])
        ]
        raise RankError("\n".join(texts))

    def _collect(self, deadline: float) -> list[tuple[bool, Any] | None]:
        """One (succeeded, result or traceback) per rank; None for a rank that was not waited for any longer."""
        answers: list[tuple[bool, Any] | None] = [None] * len(self._connections)
        missing: dict[Any, int] = {c: rank for rank, c in enumerate(self._connections)}
        while missing:
            ready: list[Any] = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = missing.pop(connection)
                answer = self._answer(connection, rank)
                answers[rank] = answer
                if not answer[0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers

    def _answer(self, connection: Any, rank: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = connection.recv()
        except EOFError:
            self._processes[rank].join(GRACE_SECONDS)
            answer = (False, f"died with exit code {self._processes[rank].exitcode}")
        return answer

    def kill(self) -> None:
        """End all processes at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@functools.cache
def _pools() -> dict[tuple[int, str], RankPool]:
    """The living pools, by world size and framework."""
    pools: dict[tuple[int, str], RankPool] = {}

    @atexit.register
    def kill_all() -> None:
        for pool in pools.values():
            pool.kill()

    return pools


def run_ranks(
    *world_sizes: int, timeout: float = 120.0, framework: str = "torch"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a pytest test of a function that runs on every rank of a gloo group, once for each world size.

    The function can take pytest's parameters and fixtures as far as they can be pickled.

    Example::

        @run_ranks(1, 2, 3)
        def test_replicas_stay_equal():
            assert dist.is_initialized()
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        import pytest

        @functools.wraps(function)
        def test(*, world_size: int, **kwargs: Any) -> None:
            pools = _pools()
            key = world_size, framework
            if key not in pools:
                pools[key] = RankPool(*key)
            try:
                pools[key].run(function.__module__, function.__name__, kwargs, timeout=timeout)
            except RankError:
                del pools[key]
                raise

        signature = inspect.signature(function)
        parameter = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), parameter]
        )
        marked: Callable[..., Any] = pytest.mark.parametrize("world_size", world_sizes)(test)
        return marked

    return decorate


def _serve(
    rank: int, world_size: int, framework: str, connection: Connection, path: Sequence[str]
) -> None:
    """Run what is asked for until the parent is gone."""
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    tensors = importlib.import_module(framework)
    dist = importlib.import_module(f"{framework}.distributed")
    tensors.set_num_threads(1)
    while True:
        try:
            module, name, kwargs, store = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            warnings.resetwarnings()
            warnings.simplefilter("error")
            tensors.manual_seed(0)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=30),
            )
            dist.barrier()  # a rank that needs no other one must not be gone before all are connected
            function = inspect.unwrap(getattr(importlib.import_module(module), name))
            answer = (True, function(**kwargs))
            dist.destroy_process_group()
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except Exception:
            connection.send((False, f"result cannot be sent\n{traceback.format_exc()}"))
