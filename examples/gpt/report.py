"""What the first rank prints; the other ranks call the same and print nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.rule import Rule
from rich.table import Table

from gpt.memory import Memory

UNSHARDED_NOTE = (
    "unsharded: a plain optimizer on the same model, after it loaded this run's checkpoint\n"
)

PAGE_COLUMNS = 100
"""Width of what goes to a file or a pipe instead of a terminal."""


class Report:
    """A console with a progress bar at its foot while used as a context."""

    def __init__(self, *, is_shown: bool, step: int, steps: int) -> None:
        self._console = Console(
            quiet=not is_shown,
            highlight=False,
            width=None if sys.stdout.isatty() else PAGE_COLUMNS,
        )
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("train {task.fields[train]}  validation {task.fields[validation]}"),
            console=self._console,
            disable=not is_shown,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(
            "", total=steps, completed=step, train="...", validation="..."
        )

    def __enter__(self) -> Report:
        """Show the progress bar."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the progress bar as it stands."""
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show_step(self, step: int, recent_losses: Sequence[float]) -> None:
        """Move the bar; ``recent_losses`` are the training losses since the last evaluation."""
        self._progress.update(self._task, completed=step, train=f"{fmean(recent_losses):.3f}")

    def show_validation(
        self, step: int, validation_loss: float, recent_losses: Sequence[float]
    ) -> None:
        """Print a line that stays."""
        self._progress.update(self._task, validation=f"{validation_loss:.3f}")
        train = f"   train loss {fmean(recent_losses):.3f}" if recent_losses else ""
        self.say(f"step {step:>5}   validation loss {validation_loss:.3f}{train}")

    def show_sample(self, text: str) -> None:
        """Print what the model wrote."""
        self._console.print(Rule("The model writes"))
        self._console.print(text, markup=False, soft_wrap=True)
        self._console.print(Rule())

    def show_memory(self, by_rank: Sequence[Memory], *, unsharded: Memory | None = None) -> None:
        """Print the table of bytes, one row a rank.

        Args:
            by_rank: Of this run.
            unsharded: Of the plain optimizer, to stand beside it; None where this run is the plain one.
        """
        table = Table(
            title="Bytes of the tensors that each rank holds",
            box=SIMPLE_HEAD,
            title_justify="left",
            collapse_padding=True,
            pad_edge=False,
        )
        for heading in ["rank", "parameters", "gradients", *_state_headings(unsharded)]:
            table.add_column(heading, justify="right", overflow="fold")
        for rank, memory in enumerate(by_rank):
            cells = [rank, memory.params, memory.gradients, memory.optimizer_state, memory.total]
            if unsharded is not None:
                cells[4:4] = [unsharded.optimizer_state]
                cells += [unsharded.total]
            table.add_row(*(f"{cell:,}" for cell in cells))
        self._console.print(table)
        if unsharded is not None:
            self.say(UNSHARDED_NOTE)


def _state_headings(unsharded: Memory | None) -> list[str]:
    if unsharded is None:
        return ["optimizer\nunsharded", "total\nunsharded"]
    return ["optimizer\nsharded", "optimizer\nunsharded", "total\nsharded", "total\nunsharded"]
