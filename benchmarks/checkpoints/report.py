"""Tables of the results, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints.variants import (
    ASYNC,
    FULL,
    LOAD,
    LOAD_RANKS,
    RETURNED,
    SAVE_RANKS,
    SAVED,
    SHARDED,
    SYNCHRONOUS,
    VARIANTS,
)
from benchmarks.train_step.launch import MAX_FOREIGN_CPU
from benchmarks.train_step.report import NONE, Sheet, number
from benchmarks.train_step.results import ByRound, ratio

MB = 1e6
Record = dict[str, Any]


@dataclass(frozen=True)
class Baseline:
    """What a table compares its rows with.

    Attributes:
        title: Of the column.
        find: The variant and phase to compare with, of a variant and phase.
    """

    title: str
    find: Callable[[str, str], tuple[str, str]]


def same_phase(variant: str) -> Baseline:
    return Baseline(f"/ {variant}", lambda _, phase: (variant, phase))


BASELINES = {
    FULL: [same_phase("shardopt save_full")],
    SHARDED: [same_phase("shardopt save"), same_phase("raw write")],
    ASYNC: [
        Baseline("/ its dcp.save", lambda v, _: (SYNCHRONOUS[VARIANTS[v].system or ""], SAVED))
    ],
    LOAD: [same_phase("shardopt load"), same_phase("raw read")],
}


class Results:
    """Launches by variant and round."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.runs: dict[str, dict[int, Record]] = {}
        self.failures: list[Record] = []
        for record in records:
            if "phases" in record:
                self.runs.setdefault(record["variant"], {})[record["round"]] = record
            else:
                self.failures.append(record)

    def phases(self, variant: str) -> list[str]:
        """The phases of a variant; what came back first comes first."""
        return list(next(iter(self.runs[variant].values()))["phases"])

    def seconds(self, variant: str, phase: str) -> ByRound:
        """Of the slowest rank, by round."""
        runs = self.runs.get(variant, {})
        return {n: max(run["phases"][phase]["seconds"]) for n, run in runs.items()}

    def growth(self, variant: str, phase: str, what: str) -> list[float]:
        """Median over rounds, by rank, in MB."""
        by_round = [run["phases"][phase][what] for run in self.runs[variant].values()]
        return [median(rounds) / MB for rounds in zip(*by_round, strict=True)]


def sheet(results: Results, kind: str) -> Sheet:
    """The table of one kind of variants."""
    baselines = BASELINES[kind]
    columns = ["variant", "s, by round", "median s", *(b.title for b in baselines)]
    columns += ["memory by rank, MB", "with mapped files"]
    columns += ["state"] if kind == LOAD else []
    names = [name for name in results.runs if VARIANTS[name].kind == kind]
    rows = [
        row(results, name, phase, baselines) for name in names for phase in results.phases(name)
    ]
    ranks = LOAD_RANKS if kind == LOAD else SAVE_RANKS
    return Sheet(f"{kind.capitalize()}, {ranks} ranks", columns, rows)


def row(results: Results, name: str, phase: str, baselines: Sequence[Baseline]) -> list[str]:
    seconds = results.seconds(name, phase)
    marks = {n: "*" if is_disturbed(run) else "" for n, run in results.runs[name].items()}
    cells = [
        name if phase in (SAVED, RETURNED) else f"{name}: {phase}",
        " ".join(f"{seconds[n]:.2f}{marks[n]}" for n in sorted(seconds)),
        number(median(seconds.values())),
    ]
    for baseline in baselines:
        cells.append(number(ratio(seconds, results.seconds(*baseline.find(name, phase)))))
    for what in ("own_growth", "rss_growth"):
        cells.append(" / ".join(number(mb, 0) for mb in results.growth(name, phase, what)))
    return cells + ([verdict(results.runs[name])] if VARIANTS[name].kind == LOAD else [])


def is_disturbed(run: Record) -> bool:
    return bool(run.get("foreign_cpu", 0.0) > MAX_FOREIGN_CPU)


def verdict(runs: dict[int, Record]) -> str:
    """Whether what was loaded is what was saved."""
    checks = [run["check"] for run in runs.values() if "check" in run]
    if not checks:
        return NONE
    bad = [name for check in checks for name in (*check["wrong"], *check["missing"])]
    return f"WRONG: {bad[0]}, ..." if bad else "bitwise what was saved"


def sheets(results: Results) -> list[Sheet]:
    """All tables that have rows."""
    return [one for kind in BASELINES if (one := sheet(results, kind)).rows]


def notes(records: Sequence[Record]) -> list[str]:
    """What is needed to read the tables, as lines."""
    measured = [record for record in records if "state_nbytes" in record]
    lines = [setting_note(measured[-1], records)] if measured else []
    return [
        *lines,
        "Seconds: of the slowest rank, which is how long training stalls; ratios: median of same-round ratios; *: others, "
        f"the kernel's writing included, used over {MAX_FOREIGN_CPU:.0%} of the CPUs. "
        "All saves end when the disk has the bytes; torch.save is followed by fsync for that.",
        "Memory: the peak, sampled every 5 ms by another process, of anonymous and shared memory (RssAnon + RssShmem) "
        "beyond what it was before the call; with mapped files: the growth of the kernel's peak (VmHWM), in which pages "
        "of files that are mapped count too.",
        "Async: both calls with one stager, whose memory stays from the first to the second; a call returns when state "
        "may change again, or staged in the background at once, and state may change when it is staged; written: until files are there, the call included. What that takes from training meanwhile is "
        "not measured.",
        "Load: into an optimizer that has not stepped, so memory grows by a rank's part of the state at least; touched: until "
        "each element was updated once in place, as the next step does, in case loading has only mapped a file.",
    ]


def setting_note(record: Record, records: Sequence[Record]) -> str:
    s, machine = record["settings"], record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    by_system = {
        (VARIANTS[r["variant"]].system, len(r["state_nbytes"])): r["state_nbytes"]
        for r in records
        if "state_nbytes" in r
    }
    held = "; ".join(
        f"{system} {' / '.join(number(nbytes / MB, 0) for nbytes in by_rank)}"
        for (system, _), by_rank in sorted(by_system.items(), key=lambda item: item[0][1])
    )
    return (
        f"{s['model']}, {record['numel'] / MB:.1f} M parameters, Adam's state in float32, MB by rank: {held}; "
        f"1 MB = 10^6 bytes. {s['granularity']} granularity; files to be loaded are {s['cache']} in the system's cache. "
        f"{machine['cpus']} CPUs ({machine['arch']}, {machine['memory_gib']} GiB), gloo over loopback, one thread per "
        f"rank; {versions}."
    )


def failures(results: Results) -> list[str]:
    """The error of each launch that had one."""
    return [
        f"{r['variant']}, round {r['round']}: {r['error'].splitlines()[0]}"
        for r in results.failures
    ]


def show(records: Sequence[Record], console: Console) -> None:
    """Print everything."""
    results = Results(records)
    for one in sheets(results):
        table = Table(title=one.title, box=box.SIMPLE)
        for position, column in enumerate(one.columns):
            table.add_column(column, justify="left" if position == 0 else "right")
        for cells in one.rows:
            table.add_row(*cells)
        console.print(table)
    for line in notes(records):
        console.print(line, highlight=False)
    for line in failures(results):
        console.print(f"FAILED {line}", style="red", markup=False)


def markdown(records: Sequence[Record]) -> str:
    """Everything as Markdown."""
    results = Results(records)
    lines: list[str] = []
    for one in sheets(results):
        lines += [f"## {one.title}", "", "| " + " | ".join(one.columns) + " |"]
        lines += ["|---" * len(one.columns) + "|"]
        lines += ["| " + " | ".join(cells) + " |" for cells in one.rows] + [""]
    lines += [f"* {line}" for line in notes(records)]
    lines += [f"* Failed: {line}" for line in failures(results)]
    return "\n".join(lines) + "\n"
