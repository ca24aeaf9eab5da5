"""The driver: lets variants take turns, shows what runs, and reports."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.checkpoints import __doc__ as question
from benchmarks.checkpoints.job import SHAPES, Job
from benchmarks.checkpoints.launch import empty, launch, set_cache
from benchmarks.checkpoints.report import is_disturbed, markdown, show
from benchmarks.checkpoints.variants import VARIANTS
from benchmarks.train_step.__main__ import progress, recorder
from benchmarks.train_step.launch import ROOT

Record = dict[str, Any]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoints",
        description=question,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=SHAPES, default="gpt2")
    add("--rounds", type=int, default=3, help="times that each variant takes its turn")
    add("--variants", type=names, default=list(VARIANTS), help="comma list; default: all")
    add("--granularity", choices=("element", "parameter"), default="element", help="of shardopt")
    add("--cache", choices=("cold", "warm"), default="cold", help="for files that are loaded")
    add("--folder", type=Path, default=ROOT / "runs", help="on the disk to be measured")
    add("--out", type=Path, help="new file of JSON lines, one for each launch")
    add("--markdown", type=Path, help="file for the tables")
    add("--timeout", type=float, default=600.0, help="seconds after which a launch is given up")
    add("--show", type=Path, help="measure nothing; report on a file that --out has made")
    options = parser.parse_args()
    if options.out and options.out.exists():
        parser.error(f"--out: {options.out} exists; results are not overwritten")
    return options


def names(text: str) -> list[str]:
    chosen = {name.strip() for name in text.split(",")}
    for name in chosen - VARIANTS.keys():
        raise argparse.ArgumentTypeError(f"no variant {name!r}; there are: {', '.join(VARIANTS)}")
    return [name for name in VARIANTS if name in chosen]


class Driver:
    """Launches variants, and keeps those files that others are going to load."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._is_saved: set[str] = set()
        self._sources = {VARIANTS[name].source for name in options.variants}

    def take_turn(self, name: str) -> Record:
        """Launch one variant; first another, if that is to save what this one loads and has not."""
        source = VARIANTS[name].source
        if source and source not in self._is_saved:
            made = self.take_turn(source)
            if source not in self._is_saved:
                return {"error": f"{source}: {made['error']}", "traceback": made["traceback"]}
        if source:
            set_cache(self._files(source), is_warm=self._options.cache == "warm")
        self._is_saved.discard(name)
        output = empty(self._files(name))
        result = launch(self._job(name, output), timeout=self._options.timeout)
        if name in self._sources and "error" not in result:
            self._is_saved.add(name)
        else:
            shutil.rmtree(output)
        os.sync()
        return result

    def _files(self, name: str) -> Path:
        return self._folder / str(list(VARIANTS).index(name))

    def _job(self, name: str, output: Path) -> Job:
        options, source = self._options, VARIANTS[name].source
        return Job(
            variant=name,
            model=options.model,
            granularity=options.granularity,
            folder=str(self._folder),
            output=str(output),
            source=str(self._files(source)) if source else "",
        )


def measure(options: argparse.Namespace, console: Console, keep: Callable[[Record], None]) -> None:
    """Run all launches, and hand each result to ``keep``."""
    settings = {name: getattr(options, name) for name in ("model", "granularity", "cache")}
    options.folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as folder,
        progress(console) as bar,
    ):
        driver = Driver(options, Path(folder).resolve())
        task = bar.add_task("", total=options.rounds * len(options.variants))
        for number in range(1, options.rounds + 1):
            for name in options.variants:
                bar.update(task, description=f"round {number}/{options.rounds}  {name}")
                result = driver.take_turn(name)
                keep({"variant": name, "round": number, **result, "settings": settings})
                console.print(f"round {number}  {name:<36} {summary(result)}", markup=False)
                bar.advance(task)


def summary(result: Record) -> str:
    """One line about one launch."""
    if "phases" not in result:
        return f"failed: {result['error'].splitlines()[0]}"
    told = [f"{max(phase['seconds']):7.2f} s" for phase in result["phases"].values()]
    if is_disturbed(result):
        told.append(f"  others used {result['foreign_cpu']:.0%} of the CPUs")
    check = result.get("check")
    if check and (check["wrong"] or check["missing"]):
        told.append("  WRONG STATE")
    return " ".join(told)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # files are removed
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
