"""Ranks that shard in groups, several groups holding replicas of one another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardopt.collectives.group import Group, Pending
from shardopt.collectives.staging import StagingPool

if TYPE_CHECKING:
    from torch import Tensor


class HybridGroup:
    """A grid of ranks: a row shards, and a column holds the same shard in every row.

    Parameters travel within rows. Gradients are summed within rows and then, shard by shard, within columns. What ranks
    agree on goes over the whole grid. Members are numbered row by row:

        members of 2 x 3    | 0 1 2 |    row 0: ranks 0, 1, 2 of a sharding group
                            | 3 4 5 |    row 1: ranks 0, 1, 2 of another
    """

    def __init__(self, row: Group, column: Group) -> None:
        """Bind this rank's row, the sharding group, and its column, the replicas of its shard."""
        self._row = row
        self._column = column
        self.rank = row.rank
        self.world_size = row.world_size
        self.num_members = row.world_size * column.world_size

    @property
    def process_group(self) -> Any:
        """The framework's process group of the row."""
        return self._row.process_group

    @property
    def pool(self) -> StagingPool:
        """Memory of the row."""
        return self._row.pool

    @property
    def shares_memory(self) -> bool:
        """Whether the row does."""
        return self._row.shares_memory

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the first row."""
        return self._row.is_first and self._column.is_first

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is in the first row."""
        return self._column.is_first

    def rank_of(self, member: int) -> int:
        """The rank of a member within its row."""
        return member % self.world_size

    def broadcast(self, tensor: Tensor) -> Pending:
        """Send down the first column, wait, and launch sending along the rows."""
        if self.rank == 0:
            self._column.broadcast(tensor).wait()
        return self._row.broadcast(tensor)

    def all_gather(self, sections: Mapping[int, Tensor]) -> Pending:
        """Launch it within the row."""
        return self._row.all_gather(sections)

    def reduce_scatter(
        self,
        parts: Sequence[Tensor],
        *,
        out: Tensor,
        scratch: Sequence[Tensor],
        scale: float = 1.0,
        adds: bool = False,
    ) -> Pending:
        """Launch it within the row; ``reduce_over_replicas`` does the rest."""
        return self._row.reduce_scatter(parts, out=out, scratch=scratch, scale=scale, adds=adds)

    def num_scratch(self, device_type: str, *, adds: bool, casts: bool) -> int:
        """What the row needs."""
        return self._row.num_scratch(device_type, adds=adds, casts=casts)

    def reduce_over_replicas(self, tensor: Tensor) -> None:
        """Sum within the column."""
        self._column.all_reduce(tensor)

    def broadcast_to_replicas(self, tensor: Tensor) -> None:
        """Send down the column."""
        self._column.broadcast(tensor).wait()

    def send(self, tensor: Tensor, *, dst: int) -> Pending:
        """Launch it within the row."""
        return self._row.send(tensor, dst=dst)

    def recv(self, tensor: Tensor, *, src: int) -> Pending:
        """Launch it within the row."""
        return self._row.recv(tensor, src=src)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        """Run it within the row: what is reduced is equal within columns."""
        self._row.all_reduce(tensor, maximum=maximum)

    def launch_all_gather_ints(self, values: Sequence[int]) -> Callable[[], list[list[int]]]:
        """Launch gathering within the row; waiting for it gathers the rows."""
        of_row = self._row.launch_all_gather_ints(values)

        def wait() -> list[list[int]]:
            mine = of_row()
            together = [value for theirs in mine for value in theirs]
            rows = self._column.all_gather_ints(together)
            length = len(values)
            return [
                row[rank * length : (rank + 1) * length]
                for row in rows
                for rank in range(self.world_size)
            ]

        return wait

    def all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Gather over the grid."""
        return self.launch_all_gather_ints(values)()

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gather over the grid."""
        rows = self._column.all_gather_object(self._row.all_gather_object(value))
        return [theirs for row in rows for theirs in row]
