"""Tables of the results, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.train_step.launch import MAX_FOREIGN_CPU
from benchmarks.train_step.results import ByRound, Results, foreign, ratio
from benchmarks.train_step.settings import EXCHANGE, REFERENCE

MB = 1e6
NONE = "-"


@dataclass(frozen=True)
class Sheet:
    """One table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def time_sheet(results: Results) -> Sheet:
    """How long a step takes, and beside what."""
    best = results.best_peer()
    columns = ["variant", "ms, by round", "median", "/ ddp", "/ ddp view", "/ torch zero"]
    columns += ["/ compute", "beyond compute", f"/ that of {best or 'a peer'}", "/ exchange limit"]
    rows = [time_row(results, name, best) for name in results.names]
    limit = results.limit()
    if limit:
        cells = time_cells(results, limit, best)
        rows.append(["exchange limit", by_round(limit, {}), *cells])
    return Sheet("Time of one step", columns, rows)


def time_row(results: Results, name: str, best: str | None) -> list[str]:
    times = results.times(name)
    if not times:
        failed = results.failures[name]
        return [name, failed.get("unavailable", "failed, see below"), *[NONE] * 8]
    return [name, by_round(times, results.runs[name]), *time_cells(results, times, best)]


def time_cells(results: Results, times: ByRound, best: str | None) -> list[str]:
    beyond = results.beyond_compute(times)
    best_beyond = results.beyond_compute(results.times(best)) if best else {}
    baselines = [results.times("ddp"), results.times("ddp view"), results.torch_zero()]
    baselines.append(results.times("compute"))
    return [
        number(median(times.values()), 1),
        *(number(ratio(times, baseline)) for baseline in baselines),
        number(median(beyond.values()) if beyond else None, 1),
        number(ratio(beyond, best_beyond)),
        number(ratio(times, results.limit())),
    ]


def by_round(times: ByRound, runs: dict[int, dict[str, Any]]) -> str:
    """The time of each round, with a star where others used the machine."""
    marks = {n: "*" if foreign(run) > MAX_FOREIGN_CPU else "" for n, run in runs.items()}
    return " ".join(f"{times[n]:.1f}{marks.get(n, '')}" for n in sorted(times))


def memory_sheet(results: Results) -> Sheet:
    """Bytes on the wire and in memory, and what was computed."""
    columns = ["variant", "wire, MB", "wire / S", "state, MB", "gradients, MB", "buffers, MB"]
    columns += ["resident, MB", "peak, MB", "loss", "parameters"]
    rows = [memory_row(results, name) for name in results.names if results.times(name)]
    return Sheet("Bytes of one rank, and what was computed", columns, rows)


def memory_row(results: Results, name: str) -> list[str]:
    run = results.any_run(name)
    wire = results.median_of(name, lambda r: r["wire_bytes"])
    assert wire is not None
    held = [
        results.median_of(name, lambda r, part=part: max(r["held"][part]))
        for part in ("state", "gradients", "buffers", "resident")
    ]
    peak = results.median_of(name, lambda r: max(r["peak_rss"]))
    return [
        name,
        number(wire / MB, 1),
        number(wire / run["nbytes"]),
        *(number(value / MB, 1) for value in (*held, peak) if value is not None),
        f"{run['loss']:.6f}",
        verdict(run, results),
    ]


def verdict(run: dict[str, Any], results: Results) -> str:
    """Whether parameters are the reference's."""
    check = run.get("check")
    if check is None:
        return NONE
    if not check["ranks_agree"]:
        return "RANKS DIFFER"
    if results.times(REFERENCE):
        reference = results.any_run(REFERENCE)["check"]["digest"]
        if check["digest"] == reference:
            return f"bitwise {REFERENCE}'s"
    difference = check["max_difference"]
    return "not compared" if difference is None else f"differ by {difference:.1e}"


def sheets(results: Results) -> list[Sheet]:
    """All tables."""
    return [time_sheet(results), memory_sheet(results)]


def notes(records: Sequence[dict[str, Any]], results: Results) -> list[str]:
    """What is needed to read the tables, as lines."""
    lines = []
    measured = [record for record in records if "step_ms" in record]
    if measured:
        lines += [setting_note(measured[-1])]
    nbytes = [record["nbytes"] for record in measured if "nbytes" in record]
    if nbytes:
        lines.append(f"S = {nbytes[0] / MB:.1f} MB, the parameters' bytes; 1 MB = 10^6 bytes.")
    lines += [
        "Times: median over steps of the slowest rank, then over rounds; ratios: median of same-round ratios; "
        f"torch zero: the better of its two in each round; *: others used over {MAX_FOREIGN_CPU:.0%} of the CPUs.",
        "Wire: what went over the loopback device per rank and step, headers and all other traffic included. "
        "State: with master weights. State, gradients (or what is kept of them) and buffers are "
        "tensors that Python can see after backward, touched or not, and the buckets of DDP where "
        "gradients are no views of them; resident (after backward) "
        "and peak: of the process, beyond what it was before the model was made. All of the largest rank.",
        "Loss: of rank 0 in the last timed step. Parameters: compared after the check steps, all "
        "ranks and the reference.",
    ]
    if results.runs.get(EXCHANGE):
        lines.append(limit_note(results))
    return lines


def setting_note(record: dict[str, Any]) -> str:
    s, machine = record["settings"], record["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"{s['model']} in {s['dtype']}, {s['ranks']} ranks on {machine['cpus']} CPUs ({machine['arch']}, "
        f"{machine['memory_gib']} GiB), gloo over loopback, one thread per rank; {s['check_steps']} check steps, "
        f"{s['warmup']} more to warm up, {s['steps']} timed; bucket_mb={s['bucket_mb']:g}; {versions}."
    )


def limit_note(results: Results) -> str:
    runs = results.runs[EXCHANGE].values()
    parts = {
        name.replace("_", "-"): median(run["parts_ms"][name] for run in runs)
        for name in next(iter(runs))["parts_ms"]
    }
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in parts.items())
    return (
        "Exchange limit: compute alone, then gradients to their owners, parameters from them (over the network, by "
        "the faster of two ways, or in memory) and the update of S / N bytes, nothing overlapped; ms of each part: "
        f"{told}."
    )


def failures(results: Results) -> list[str]:
    """The first error of each variant that had one."""
    failed = [record for record in results.failures.values() if "error" in record]
    return [f"{r['variant']}, round {r['round']}: {r['error'].splitlines()[0]}" for r in failed]


def show(records: Sequence[dict[str, Any]], console: Console) -> None:
    """Print everything."""
    results = Results(records)
    for sheet in sheets(results):
        table = Table(title=sheet.title, box=box.SIMPLE)
        for position, column in enumerate(sheet.columns):
            table.add_column(column, justify="left" if position == 0 else "right")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    for line in notes(records, results):
        console.print(line, highlight=False)
    for line in failures(results):
        console.print(f"FAILED {line}", style="red", markup=False)


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """Everything as Markdown."""
    results = Results(records)
    lines: list[str] = []
    for sheet in sheets(results):
        lines += [f"## {sheet.title}", "", "| " + " | ".join(sheet.columns) + " |"]
        lines += ["|---" * len(sheet.columns) + "|"]
        lines += ["| " + " | ".join(row) + " |" for row in sheet.rows] + [""]
    lines += [f"* {line}" for line in notes(records, results)]
    lines += [f"* Failed: {line}" for line in failures(results)]
    return "\n".join(lines) + "\n"
