"""Tables and progress bars, for people."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from shardopt.cli.description import (
    Description,
    FileDescription,
    GroupDescription,
    ParamDescription,
)
from shardopt.files import TensorEntry

PAGE_COLUMNS = 100
"""Width of what goes to a file or a pipe instead of a terminal."""

KINDS = {
    "full": "full file of save_full()",
    "sharded": "folder of save(), one file per rank",
    "torch": "state dict of torch.save()",
}


def make_console() -> Console:
    """Stdout; what is printed there is shown as it is."""
    return Console(
        width=None if sys.stdout.isatty() else PAGE_COLUMNS,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=False,
    )


@contextmanager
def progress_bar(what: str, nbytes: int) -> Iterator[Any]:
    """Show on stderr, if that is a terminal, how many of ``nbytes`` were told to what this yields, and how fast."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=nbytes)
        yield lambda count: bar.advance(task, count)


def show(console: Console, description: Description, *, with_params: bool) -> None:
    """Print what a checkpoint holds."""
    tables = [_summary(description), _groups(description.param_groups)]
    if with_params:
        tables.append(_params(description.params))
    for table in (*tables, _files(description.files)):
        console.print(table)
        console.print()


def _table(title: str, *headings: str, right: Sequence[str] = ()) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        collapse_padding=True,
        pad_edge=False,
    )
    for heading in headings:
        justify = "right" if heading in right else "left"
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def _summary(description: Description) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    world_size = description.world_size
    step = "none" if description.step is None else f"{description.step:,}"
    rows = {
        "checkpoint": description.path,
        "kind": KINDS[description.kind],
        "optimizer": description.optimizer,
        "world size": "unknown" if world_size is None else str(world_size),
        "step": step,
        "parameters": f"{description.num_params:,}",
        "bytes of state": f"{description.state_nbytes:,}",
        "bytes of files": f"{description.file_nbytes:,}",
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table


def _groups(groups: Sequence[GroupDescription]) -> Table:
    table = _table("Param groups", "group", "parameters", "options", right=("group", "parameters"))
    for group in groups:
        options = ", ".join(f"{key}={_short(value)}" for key, value in group.options.items())
        table.add_row(str(group.number), f"{group.num_params:,}", options)
    return table


def _params(params: Sequence[ParamDescription]) -> Table:
    table = _table(
        "Parameters",
        "param",
        "name",
        "shape",
        "dtype",
        "state",
        "bytes",
        "ranks",
        right=("param", "bytes"),
    )
    for param in params:
        table.add_row(
            str(param.number),
            param.name or "",
            "?" if param.shape is None else str(param.shape),
            param.dtype or "?",
            _state(param),
            f"{param.nbytes:,}",
            _ranges(param.ranks),
        )
    if params:
        table.caption = "State without a shape has that of its parameter."
        table.caption_justify = "left"
    return table


def _files(files: Sequence[FileDescription]) -> Table:
    right = ("rank", "bytes", "bytes of state", "of the mean")
    table = _table("Files", "rank", "file", *right[1:], right=right)
    for file in files:
        table.add_row(
            str(file.rank),
            file.file,
            f"{file.nbytes:,}",
            f"{file.state_nbytes:,}",
            f"{file.share:.3f}",
        )
    return table


def _state(param: ParamDescription) -> str:
    """The state of a parameter, a line for each run of keys with values of one kind."""
    told = [(key, _kind(value, param)) for key, value in param.state.items()]
    return "\n".join(
        f"{', '.join(key for key, _ in run)}: {kind}"
        for kind, run in ((kind, list(run)) for kind, run in groupby(told, lambda item: item[1]))
    )


def _kind(value: Any, param: ParamDescription) -> str:
    if isinstance(value, TensorEntry) and value.shape == param.shape and value.shape:
        return value.dtype
    return _short(value)


def _short(value: Any) -> str:
    if isinstance(value, TensorEntry):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_short(item)}' for key, item in value.items())}}}"
    if isinstance(value, (list, tuple, deque)):
        items = ", ".join(map(_short, value))
        return f"({items})" if isinstance(value, tuple) else f"[{items}]"
    return repr(value)


def _ranges(ranks: Sequence[int]) -> str:
    """Ranks in short. Example: ``[0, 1, 2, 5]`` is ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
