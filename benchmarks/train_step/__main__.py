"""The driver: lets variants take turns, shows what runs, and reports."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.train_step import __doc__ as question
from benchmarks.train_step.launch import MAX_FOREIGN_CPU, attempts
from benchmarks.train_step.models import MODELS
from benchmarks.train_step.report import markdown, show
from benchmarks.train_step.settings import EXCHANGE, REFERENCE, Settings
from benchmarks.train_step.variants import VARIANTS

Record = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step",
        description=question,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="10m")
    add("--ranks", type=int, default=2)
    add("--rounds", type=int, default=3, help="times that each variant takes its turn")
    add("--steps", type=int, default=10, help="timed steps of a launch")
    add("--warmup", type=int, default=2, help="steps between the check and the timed ones")
    add("--check-steps", type=int, default=10, help="steps after which parameters are compared")
    add("--variants", type=names, default=list(VARIANTS), help="comma list; default: all")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--bucket-mb", type=float, default=25.0, help="of the variants of shardopt")
    add("--out", type=Path, help="new file of JSON lines, one for each launch")
    add("--markdown", type=Path, help="file for the tables")
    add("--repeats", type=int, default=2, help="of a launch that others disturbed, at most")
    add("--timeout", type=float, default=900.0, help="seconds after which a launch is given up")
    add("--show", type=Path, help="measure nothing; report on a file that --out has made")
    options = parser.parse_args()
    if options.out and options.out.exists():
        parser.error(f"--out: {options.out} exists; results are not overwritten")
    return options


def names(text: str) -> list[str]:
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in VARIANTS:
            raise argparse.ArgumentTypeError(
                f"no variant {name!r}; there are: {', '.join(VARIANTS)}"
            )
    return sorted(chosen, key=lambda name: name != REFERENCE)  # others are compared with it


def measure(options: argparse.Namespace, console: Console, keep: Callable[[Record], None]) -> None:
    """Run all launches, and hand each result to ``keep``."""
    turns = [*options.variants, EXCHANGE]
    hopeless: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, progress(console) as bar:
        task = bar.add_task("", total=options.rounds * len(turns))
        for number in range(1, options.rounds + 1):
            for name in turns:
                bar.update(task, description=f"round {number}/{options.rounds}  {name}")
                if name not in hopeless:
                    settings = settings_of(options, name, folder)
                    for result in take_turn(settings, options):
                        keep({"round": number, **result})
                        console.print(f"round {number}  {name:<20} {summary(result)}", markup=False)
                        if result.get("is_hopeless"):
                            hopeless.add(name)
                bar.advance(task)


def take_turn(settings: Settings, options: argparse.Namespace) -> Iterator[Record]:
    """Launch one variant, again if it was disturbed."""
    asked = asdict(settings)
    del asked["folder"]
    for result in attempts(settings, max_repeats=options.repeats, timeout=options.timeout):
        yield {"variant": settings.variant, **result, "settings": asked}


def settings_of(options: argparse.Namespace, variant: str, folder: str) -> Settings:
    shared = ("model", "ranks", "warmup", "steps", "check_steps", "dtype", "bucket_mb")
    values = {name: getattr(options, name) for name in shared}
    return Settings(variant=variant, folder=folder, **values)


def summary(result: Record) -> str:
    """One line about one launch."""
    if "step_ms" not in result:
        return str(result.get("unavailable") or f"failed: {result['error'].splitlines()[0]}")
    foreign = result.get("foreign_cpu", 0.0)
    told = f"{result['step_ms']:9.1f} ms"
    if foreign > MAX_FOREIGN_CPU:
        told += f"   disturbed: others used {foreign:.0%} of the CPUs"
    return told


def progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<36}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def recorder(path: Path | None, records: list[Record]) -> Iterator[Callable[[Record], None]]:
    """Collects records, and writes each to a file as soon as it is there."""
    file = path.open("x") if path else None

    def keep(record: Record) -> None:
        records.append(record)
        if file:
            print(json.dumps(record), file=file, flush=True)

    try:
        yield keep
    finally:
        if file:
            file.close()


def main() -> None:
    options = parse()
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    records: list[Record] = []
    if options.show:
        records = [json.loads(line) for line in options.show.read_text().splitlines()]
    else:
        with recorder(options.out, records) as keep:
            try:
                measure(options, console, keep)
            except KeyboardInterrupt:
                console.print("interrupted; here is what there is")
    if options.markdown:
        options.markdown.write_text(markdown(records))
    show(records, console)


if __name__ == "__main__":
    main()
