"""Run the local optimizer on the parameters this rank owns; all ranks finish the step, or all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from shardopt.buffers import ParamBucket
from shardopt.collectives import Group, raise_as_settled
from shardopt.step.exchange import exchange
from shardopt.step.flags import pack_flags, ranks_by_flag, unpack_flags

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class ShardUpdate:
    """One run of the local optimizer over the parameters of some buckets.

    Notices which parameters it changed, by their gradients and version counters, and keeps its exception until every
    rank knows of it.
    """

    def __init__(
        self, rank: int, buckets: Sequence[ParamBucket], params: Mapping[int, Tensor]
    ) -> None:
        """Remember the versions of what this rank updates: its parameters, or parts of them, by parameter index."""
        self._rank = rank
        self._buckets = buckets
        self._params = params
        self._versions = self._owned_versions()
        self.error: Exception | None = None

    def run(self, update: Callable[[], T]) -> T | None:
        """Call ``update`` and keep what it raises."""
        try:
            return update()
        except Exception as raised:
            self.error = raised
            return None

    @property
    def has_moved_params(self) -> bool:
        """Whether a version counter moved."""
        return self._owned_versions() != self._versions

    def finish(
        self, group: Group, *, expected: Sequence[Sequence[int]] | None = None, doing: str
    ) -> None:
        """Exchange what any rank changed, then raise on all ranks if ``run`` failed on one. Collective.

        The exchange comes first, so that the replicas are equal even after an exception.

        Args:
            group: The sharding group.
            expected: For each bucket the ranks whose sections are known to be updated, equal on every rank; they travel
                while the ranks report on what else changed. None where nothing is known.
            doing: What was being done, for messages on other ranks.
        """
        known = expected if expected is not None else [()] * len(self._buckets)
        now = self._owned_versions()
        flags = [
            self._rank not in ranks
            and any(now[p] != self._versions[p] or self._params[p].grad is not None for p in owned)
            for ranks, owned in zip(known, self._owned(), strict=True)
        ]
        reported = group.launch_all_gather_ints([int(self.error is not None), *pack_flags(flags)])
        try:
            exchange(group, self._buckets, known)
        finally:
            reports = reported()
        exchange(
            group,
            self._buckets,
            ranks_by_flag([unpack_flags(packed, len(flags)) for _, *packed in reports]),
        )
        if any(report[0] for report in reports):
            raise_as_settled(group, self.error, doing=doing)

    def _owned(self) -> Iterator[list[int]]:
        """For each bucket, the parameters this rank owns in it."""
        for bucket in self._buckets:
            yield [slot.param for slot in bucket.plan.sections[self._rank].slots]

    def _owned_versions(self) -> dict[int, int]:
        return {p: self._params[p]._version for owned in self._owned() for p in owned}


@contextmanager
def only_params(groups: Sequence[dict[str, Any]], chosen: Mapping[int, Tensor]) -> Iterator[None]:
    """Let param groups hold only the parameters whose ``id`` is in ``chosen``, for the length of the block."""
    kept = [(group["params"], group.get("param_names")) for group in groups]
    try:
        for group in groups:
            places = [i for i, p in enumerate(group["params"]) if id(p) in chosen]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i in places]
            group["params"] = [group["params"][i] for i in places]
        yield
    finally:
        for group, (params, names) in zip(groups, kept, strict=True):
            group["params"] = params
            if names is not None:
                group["param_names"] = names
