"""What the numbers of several rounds say, all of it as medians, ratios within rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

from benchmarks.train_step.settings import EXCHANGE
from benchmarks.train_step.variants import VARIANTS

TORCH_ZERO = ("torch zero", "torch zero view")
ByRound = dict[int, float]


class Results:
    """Launches by variant and round; of repeated ones that which was disturbed least."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.runs: dict[str, dict[int, dict[str, Any]]] = {}
        self.failures: dict[str, dict[str, Any]] = {}
        self.names: list[str] = []
        for record in records:
            name, number = record["variant"], record["round"]
            if name not in self.names and name != EXCHANGE:
                self.names.append(name)
            if "step_ms" not in record:
                self.failures.setdefault(name, record)
                continue
            runs = self.runs.setdefault(name, {})
            if number not in runs or foreign(record) < foreign(runs[number]):
                runs[number] = record

    def times(self, name: str) -> ByRound:
        """Step time in ms by round."""
        return {number: run["step_ms"] for number, run in self.runs.get(name, {}).items()}

    def limit(self) -> ByRound:
        """Compute alone and the bare exchange, one after the other, by round."""
        return combine(self.times("compute"), self.times(EXCHANGE), lambda a, b: a + b)

    def torch_zero(self) -> ByRound:
        """The better of torch's two, in each round."""
        both = [self.times(name) for name in TORCH_ZERO if self.times(name)]
        if len(both) < 2:
            return both[0] if both else {}
        return combine(*both, min)

    def beyond_compute(self, times: ByRound) -> ByRound:
        """What a step takes longer than forward and backward alone."""
        return combine(times, self.times("compute"), lambda a, b: a - b)

    def best_peer(self) -> str | None:
        """The peer with the shortest median step."""
        peers = [name for name in self.names if VARIANTS[name].is_peer and self.times(name)]
        return min(peers, key=lambda name: median(self.times(name).values()), default=None)

    def median_of(self, name: str, read: Callable[[dict[str, Any]], float]) -> float | None:
        """Median over rounds of something that was measured."""
        values = [read(run) for run in self.runs.get(name, {}).values()]
        return median(values) if values else None

    def any_run(self, name: str) -> dict[str, Any]:
        """The run of the first round."""
        runs = self.runs[name]
        return runs[min(runs)]


def foreign(record: dict[str, Any]) -> float:
    """The share of the CPUs that others used."""
    return float(record.get("foreign_cpu", 0.0))


def combine(a: ByRound, b: ByRound, function: Callable[[float, float], float]) -> ByRound:
    """Apply a function to the values of the same round."""
    return {number: function(a[number], b[number]) for number in sorted(a.keys() & b.keys())}


def ratio(a: ByRound, b: ByRound) -> float | None:
    """Median of same-round ratios."""
    ratios = [x for x in combine(a, b, lambda x, y: x / y if y > 0 else float("nan")).values()]
    return median(ratios) if ratios else None
