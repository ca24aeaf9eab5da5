"""Run the local optimizer on what this rank owns; all ranks finish the step, or all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from shardopt.buffers import ParamBucket
from shardopt.collectives import Group, pack_flags, raise_failures, ranks_by_flag, unpack_flags
from shardopt.shards import Exchange

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class ShardUpdate:
    """One step of the local optimizer, in one run over all buckets or in several over some of them each.

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
        self._had_gradient: set[int] = set()
        self.error: Exception | None = None

    def run(self, update: Callable[[], T], tensors: Sequence[Tensor] = ()) -> T | None:
        """Call ``update``, which may change ``tensors``, and keep what it raises; nothing once it has raised."""
        if self.error is not None:
            return None
        self._had_gradient |= {id(tensor) for tensor in tensors if tensor.grad is not None}
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
        self, group: Group, exchange: Exchange, *, launched: Sequence[Sequence[int]], doing: str
    ) -> None:
        """Exchange what any rank changed beyond what was launched; raise on all if ``run`` failed on one. Collective.

        The exchange comes first, so that the replicas are equal even after an exception. What was launched may still be
        on its way afterwards, unless something is raised.

        Args:
            group: The sharding group.
            exchange: Of the same buckets.
            launched: For each bucket the ranks whose sections are travelling already, equal on every rank.
            doing: What was being done, for messages on other ranks.
        """
        flags = [
            self._rank not in ranks and any(self._may_have_changed(p) for p in owned)
            for ranks, owned in zip(launched, self._owned(), strict=True)
        ]
        reports = group.all_gather_ints([int(self.error is not None), *pack_flags(flags)])
        changed = ranks_by_flag(
            [unpack_flags(packed, len(flags)) for _, *packed in reports], group.rank_of
        )
        for number, ranks in enumerate(changed):
            exchange.launch(number, ranks)
        if any(report[0] for report in reports):
            exchange.drain()
            raise_failures(group, self.error, doing=doing)

    def _may_have_changed(self, param: int) -> bool:
        has_moved = self._params[param]._version != self._versions[param]
        return has_moved or id(self._params[param]) in self._had_gradient

    def _owned(self) -> Iterator[list[int]]:
        """For each bucket, the parameters this rank owns in it."""
        for bucket in self._buckets:
            yield [slot.param for slot in bucket.plan.sections[self._rank].slots]

    def _owned_versions(self) -> dict[int, int]:
        return {p: self._params[p]._version for owned in self._owned() for p in owned}


@contextmanager
def only_params(groups: Sequence[dict[str, Any]], chosen: Iterable[Tensor]) -> Iterator[None]:
    """Let param groups hold only the parameters in ``chosen``, for the length of the block."""
    ids = {id(param) for param in chosen}
    kept = [(group["params"], group.get("param_names")) for group in groups]
    try:
        for group in groups:
            places = [i for i, p in enumerate(group["params"]) if id(p) in ids]
            if "param_names" in group:
                group["param_names"] = [group["param_names"][i] for i in places]
            group["params"] = [group["params"][i] for i in places]
        yield
    finally:
        for group, (params, names) in zip(groups, kept, strict=True):
            group["params"] = params
            if names is not None:
                group["param_names"] = names
