"""One rank's parameters and buckets of gradients, for tests of what reduces them."""

import torch

from shardopt.arguments import read_specs
from shardopt.buffers import GradientBucket
from shardopt.collectives import Pending
from shardopt.frameworks.torch import TORCH
from shardopt.gradients import GradientFinalizer, GradientReducer
from shardopt.gradients.reducer import ignore
from shardopt.partition import parts_of, plan_element_layout, plan_layout, plan_owners
from tests.buffers.conftest import CountingPool, in_memory_order

SHAPES = [(5,), (2, 3), (), (2, 3, 2, 2), (7,), (0,)]
CHANNELS_LAST, EMPTY = 3, 5
FULL = range(5)
"""The parameters that have elements, and so lie in buckets."""

DESCENDING = (4, 3, 2, 1, 0)
"""The order in which backward about produces gradients."""


def make_param(index, *, seed):
    value = torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(seed))
    if index == CHANNELS_LAST:
        value = value.contiguous(memory_format=torch.channels_last)
    return value


def gradient_of(rank, index, number=0):
    """What a rank computes in backward ``number``."""
    return make_param(index, seed=1000 * number + 100 * rank + index)


def average(world_size, index, without_by_rank, number=0):
    """The average over ranks, taken in their order, in memory order; None if no rank has a gradient."""
    if all(index in without for without in without_by_rank):
        return None
    total = None
    for rank in range(world_size):
        is_missing = index in without_by_rank[rank]
        gradient = gradient_of(rank, index, number)
        share = torch.zeros_like(gradient) if is_missing else gradient * (1.0 / world_size)
        total = share if total is None else total + share
    return in_memory_order(total).tolist()


class LateGradients:
    """Stands for placeholders: some gradients that no round has taken."""

    def __init__(self, gradients):
        self._gradients = gradients

    def late(self):
        return self._gradients

    def give_up_late(self, late):
        pass

    def show(self, index, *, source):
        pass

    def hide(self, index):
        pass


class Rank:
    """Six parameters of one rank, with its gradient buckets and their reducer."""

    def __init__(
        self,
        group,
        *,
        granularity="parameter",
        bucket_nbytes=2**20,
        in_flight_nbytes=2**30,
        frozen=(),
        wire_dtype=None,
        sum_dtype=None,
    ):
        self.group = group
        self.params = [torch.nn.Parameter(make_param(i, seed=0)) for i in range(len(SHAPES))]
        for index in frozen:
            self.params[index].requires_grad_(False)
        self.specs = read_specs([{"params": self.params}], [granularity])
        options = {"world_size": group.world_size, "bucket_nbytes": bucket_nbytes}
        owners = plan_owners([spec.numel for spec in self.specs], [0] * group.world_size)
        if granularity == "element":
            owners = [0] * len(owners)
            layout = plan_element_layout(self.specs, **options, alignment_nbytes=8)
        else:
            layout = plan_layout(self.specs, owners, **options)
        self.parts = parts_of(self.specs, owners, layout.buckets, group.rank)
        self.pool = CountingPool()
        self.buckets = [
            GradientBucket(
                bucket,
                self.params,
                self.specs,
                rank=group.rank,
                num_members=group.num_members,
                wire_dtype=wire_dtype,
                sum_dtype=sum_dtype,
                pool=self.pool,
                scale_into=TORCH.scale_into,
            )
            for bucket in layout.buckets
        ]
        self.bucket_of = {p: n for n, b in enumerate(self.buckets) for p in b.plan.params}
        self.reducer = GradientReducer(
            group, self.buckets, self.params, self.specs, in_flight_nbytes=in_flight_nbytes
        )

    def backward(self, order=DESCENDING, *, number=0, launched=ignore):
        """One round: gradients of ``order`` arrive. Returns those that were not taken."""
        self.reducer.open()
        left = [
            index for index in order if not self.arrive(index, number=number, launched=launched)
        ]
        self.reducer.close(lambda param: None, launched=launched)
        return left

    def arrive(self, index, *, number=0, launched=ignore):
        gradient = gradient_of(self.group.rank, index, number)
        return self.reducer.arrive(index, self.bucket_of[index], gradient, launched=launched)

    def finalize(self, gradients=None):
        """Finalize with all ranks; returns which parameters any of them had a gradient for."""
        late = LateGradients({} if gradients is None else gradients)
        finalizer = GradientFinalizer(
            self.group,
            self.reducer,
            late,
            params=self.params,
            bucket_of=self.bucket_of,
            owned=lambda index: None,
            norms=lambda norm_type, used: None,
            is_paused=lambda: False,
        )
        finalizer.finalize(self.group.all_gather_ints(finalizer.report()))
        self.reducer.complete_all()
        return self.reducer.used

    def finalize_all(self, *, without=(), number=0):
        """Finalize with gradients that no round has taken."""
        rank = self.group.rank
        return self.finalize({i: gradient_of(rank, i, number) for i in FULL if i not in without})

    @property
    def averages(self):
        """Offset and values, in memory order, of what this rank holds of each parameter's average."""
        found = {}
        for part in self.parts:
            if part.numel:
                bucket = self.buckets[self.bucket_of[part.param]]
                reduced = bucket.reduced(part.param, is_whole=part.is_whole)
                flat = in_memory_order(reduced) if part.is_whole else reduced
                found[part.param] = (part.offset, flat.tolist())
        return found


def collected(averages_by_rank):
    """The average of each parameter from the parts of all ranks."""
    by_param = {}
    for averages in averages_by_rank:
        for index, part in averages.items():
            by_param.setdefault(index, []).append(part)
    return {
        index: [value for _, values in sorted(parts) for value in values]
        for index, parts in sorted(by_param.items())
    }


class CountingGroup:
    """Rank 0 of 2, whose reductions fail where told to, by number, and are counted."""

    rank = 0
    world_size = num_members = 2
    is_first = is_first_replica = True

    def __init__(self, *, bad_launches=(), bad_waits=()):
        self.bad_launches = bad_launches
        self.bad_waits = bad_waits
        self.awaited = []
        self.numels = []
        self.nbytes_in_flight = 0
        self.most_nbytes = 0
        self.deepest = 0

    @property
    def num_launched(self):
        return len(self.numels)

    def num_scratch(self, device_type, *, adds, casts):
        return 1

    def reduce_over_replicas(self, tensor):
        pass

    def all_gather_ints(self, values):
        return [list(values)] * 2

    def reduce_scatter(self, parts, *, out, scratch, scale=1.0, adds=False):
        number = len(self.numels)
        if number in self.bad_launches:
            raise RuntimeError(f"launch {number}")
        numel = sum(part.numel() for part in parts)
        self.numels.append(numel)
        self.nbytes_in_flight += 4 * numel
        self.most_nbytes = max(self.most_nbytes, self.nbytes_in_flight)
        self.deepest = max(self.deepest, len(self.numels) - len(self.awaited))
        return Pending([Finishing(self, number)])


class Finishing:
    def __init__(self, group, number):
        self._group = group
        self._number = number

    def wait(self):
        self._group.awaited.append(self._number)
        self._group.nbytes_in_flight -= 4 * self._group.numels[self._number]
        if self._number in self._group.bad_waits:
            raise RuntimeError(f"wait {self._number}")
