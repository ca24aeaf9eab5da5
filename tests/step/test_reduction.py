import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.buffers import GradientBucket, StagingPool
from shardopt.collectives import LoneRank
from shardopt.frameworks.torch import TORCH
from shardopt.param_groups import read_specs
from shardopt.partition import (
    element_parts,
    plan_element_layout,
    plan_layout,
    plan_owners,
    whole_parts,
)
from shardopt.step import agree_on_gradients, reduce_gradients
from shardopt.step.exchange import DEPTH
from shardopt.step.flags import FLAGS_PER_INT

SHAPES = [(5,), (2, 3), (), (2, 3, 2, 2), (7,), (0,)]
CHANNELS_LAST, EMPTY = 3, 5


def make_param(index, *, seed):
    value = torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(seed))
    if index == CHANNELS_LAST:
        value = value.contiguous(memory_format=torch.channels_last)
    return value


def gradient_of(rank, index):
    return make_param(index, seed=100 * rank + index)


class CountingPool(StagingPool):
    """Knows how much of its memory is out."""

    num_out = 0

    def take(self, numel, *, like):
        self.num_out += 1
        return super().take(numel, like=like)

    def give_back(self, tensor):
        self.num_out -= 1
        super().give_back(tensor)


class Rank:
    """What one rank reduces: parameters, those of its gradients that are not in ``without``, buckets and parts."""

    def __init__(self, group, *, granularity="parameter", without=(), bucket_nbytes=2**20):
        world_size = group.world_size
        self.group = group
        self.params = [torch.nn.Parameter(make_param(i, seed=0)) for i in range(len(SHAPES))]
        for index, param in enumerate(self.params):
            if index not in without:
                param.grad = gradient_of(group.rank, index)
        specs = read_specs([{"params": self.params}])
        options = {"world_size": world_size, "bucket_nbytes": bucket_nbytes}
        if granularity == "element":
            layout = plan_element_layout(specs, **options, alignment_nbytes=8)
            self.parts = element_parts(specs, layout, group.rank)
        else:
            owners = plan_owners([spec.numel for spec in specs], [0] * world_size)
            layout = plan_layout(specs, owners, **options)
            self.parts = whole_parts(specs, owners, group.rank)
        self.pool = CountingPool()
        self.buckets = [
            GradientBucket(
                bucket,
                self.params,
                specs,
                rank=group.rank,
                pool=self.pool,
                copy_all=TORCH.copy_all,
            )
            for bucket in layout.buckets
        ]
        self.tensors = {
            part.param: self.params[part.param]
            if part.is_whole
            else torch.nn.Parameter(torch.zeros(part.numel))
            for part in self.parts
        }

    def reduce(self, *, has_inputs=True):
        reduce_gradients(
            self.group, self.buckets, self.params, self.parts, self.tensors, has_inputs=has_inputs
        )
        return self

    @property
    def gradients(self):
        """Offset and values, in memory order, of the gradient of each part; None where there is none."""
        found = {}
        for part in self.parts:
            gradient = self.tensors[part.param].grad
            flat = None if gradient is None else in_memory_order(gradient)
            found[part.param] = (part.offset, flat)
        return found


def in_memory_order(tensor):
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset()).tolist()


def average(world_size, index, without_by_rank):
    """The average over ranks, taken in their order, in memory order; None if no rank has a gradient."""
    if all(index in without for without in without_by_rank):
        return None
    total = None
    for rank in range(world_size):
        is_missing = index in without_by_rank[rank]
        gradient = gradient_of(rank, index)
        share = torch.zeros_like(gradient) if is_missing else gradient * (1.0 / world_size)
        total = share if total is None else total + share
    return in_memory_order(total)


def collected(results):
    """The gradient of each parameter from the parts of all ranks; None if it has none anywhere."""
    by_param = {}
    for rank in results:
        for index, part in rank.gradients.items():
            by_param.setdefault(index, []).append(part)
    whole = {}
    for index, parts in by_param.items():
        if all(values is None for _, values in parts):
            whole[index] = None
        else:
            whole[index] = [value for _, values in sorted(parts) for value in values]
    return whole


granularities = pytest.mark.parametrize("granularity", ["parameter", "element"])


# --- agree_on_gradients ---------------------------------------------------------------------------


def test_a_gradient_of_any_rank_counts_for_all(run_threads):
    present = [[True, False, False, True], [False, False, True, True], [False] * 4]
    run = run_threads(3, lambda group: agree_on_gradients(group, present[group.rank]))
    assert run.results == [[True, False, True, True]] * 3


def test_agreeing_on_gradients_costs_one_gather_of_ints(run_threads):
    run = run_threads(2, lambda group: agree_on_gradients(group, [True]))
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


@given(
    st.lists(st.booleans(), max_size=5)
    | st.lists(st.booleans(), min_size=FLAGS_PER_INT, max_size=2 * FLAGS_PER_INT + 1)
)
def test_a_lone_rank_agrees_with_itself(present):
    assert agree_on_gradients(LoneRank(), present) == present


# --- reduce_gradients -----------------------------------------------------------------------------


@granularities
@pytest.mark.parametrize("bucket_nbytes", [1, 64, 2**20])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_bits_of_the_average_of_what_it_owns(
    run_threads, granularity, bucket_nbytes, world_size
):
    def serve(group):
        return Rank(group, granularity=granularity, bucket_nbytes=bucket_nbytes).reduce()

    run = run_threads(world_size, serve)
    expected = {i: average(world_size, i, [()] * world_size) for i in range(len(SHAPES))}
    assert (run.texts, collected(run.results)) == ([""] * world_size, expected)


@given(
    st.lists(st.sets(st.integers(0, 4)), min_size=2, max_size=3),
    st.sampled_from(["parameter", "element"]),
    st.sampled_from([1, 64, 2**20]),
)
def test_missing_gradients_count_as_zeros_unless_they_are_missing_everywhere(
    run_threads, without, granularity, bucket_nbytes
):
    def serve(group):
        return Rank(
            group,
            granularity=granularity,
            without=without[group.rank],
            bucket_nbytes=bucket_nbytes,
        ).reduce()

    run = run_threads(len(without), serve)
    expected = {i: average(len(without), i, without) for i in range(len(SHAPES))}
    assert (run.texts, collected(run.results)) == ([""] * len(without), expected)


@granularities
def test_a_lone_rank_keeps_its_own_gradients(granularity):
    rank = Rank(LoneRank(), granularity=granularity, without={1}).reduce()
    expected = {i: average(1, i, [{1}]) for i in range(len(SHAPES))}
    assert collected([rank]) == expected


@granularities
def test_every_gradient_but_those_of_what_this_rank_updates_is_consumed(run_threads, granularity):
    run = run_threads(2, lambda group: Rank(group, granularity=granularity).reduce())
    for rank in run.results:
        updated = {id(tensor) for tensor in rank.tensors.values()}
        left = [i for i, p in enumerate(rank.params) if p.grad is not None and id(p) not in updated]
        assert left in ([], [EMPTY])


@granularities
def test_gradients_of_a_rank_without_inputs_are_consumed_and_do_not_count(run_threads, granularity):
    def serve(group):
        return Rank(group, granularity=granularity).reduce(has_inputs=group.rank != 1)

    run = run_threads(2, serve)
    without = [(), range(len(SHAPES))]
    expected = {i: average(2, i, without) for i in range(len(SHAPES)) if i != EMPTY}
    found = collected(run.results)
    assert {i: values for i, values in found.items() if i != EMPTY} == expected


@granularities
def test_reduced_gradients_are_of_the_shape_and_strides_of_what_is_updated(
    run_threads, granularity
):
    run = run_threads(2, lambda group: Rank(group, granularity=granularity).reduce())
    for rank in run.results:
        for tensor in rank.tensors.values():
            assert (tensor.grad.shape, tensor.grad.stride()) == (tensor.shape, tensor.stride())


@granularities
def test_without_any_gradient_nothing_but_flags_travels(run_threads, granularity):
    def serve(group):
        return Rank(group, granularity=granularity, without=range(len(SHAPES))).reduce()

    run = run_threads(2, serve)
    assert (run.world.messages, run.world.num_gathers_by_rank) == (
        [],
        [{"ints": 1, "object": 0}] * 2,
    )


def test_only_buckets_with_a_gradient_on_some_rank_travel(run_threads):
    """Of buckets of one parameter each, those of 1 (6 elements) and 4 (7 elements)."""
    without = [{0, 2, 3, 4}, {0, 1, 2, 3}]

    def serve(group):
        return Rank(group, without=without[group.rank], bucket_nbytes=1).reduce()

    run = run_threads(2, serve)
    used = {1, 4}
    wanted = [b.plan for b in run.results[0].buckets if used & set(b.plan.params)]
    numels = [section.numel for plan in wanted for section in plan.sections]
    assert sum(message.numel for message in run.world.messages) == sum(numels)
    assert len(wanted) < len(run.results[0].buckets)


@granularities
def test_each_byte_of_a_gradient_leaves_a_rank_once(run_threads, granularity):
    run = run_threads(3, lambda group: Rank(group, granularity=granularity).reduce())
    plans = [bucket.plan for bucket in run.results[0].buckets]
    for rank in range(3):
        sent = sum(message.numel for message in run.world.messages if message.src == rank)
        assert sent == sum(p.numel - p.sections[rank].numel for p in plans)
    assert run.num_left_over == 0


@granularities
def test_staging_memory_does_not_grow_from_step_to_step(run_threads, granularity):
    def serve(group):
        rank = Rank(group, granularity=granularity, bucket_nbytes=64)
        held = []
        for _ in range(3):
            for index, param in enumerate(rank.params):
                param.grad = gradient_of(group.rank, index)
            rank.reduce()
            held.append(rank.pool.nbytes)
        return held, rank.pool.num_out

    for held, num_out in run_threads(2, serve).results:
        assert held[0] == held[1] == held[2] > 0
        assert num_out == 0


@granularities
def test_a_second_reduction_gives_the_averages_of_the_second_gradients(run_threads, granularity):
    def serve(group):
        rank = Rank(group, granularity=granularity).reduce()
        for index, param in enumerate(rank.params):
            param.grad = gradient_of(group.rank, index) if index != 1 else None
        for part in rank.parts:
            if not part.is_whole:
                rank.tensors[part.param].grad = None
        return rank.reduce()

    run = run_threads(2, serve)
    expected = {i: average(2, i, [{1}, {1}]) for i in range(len(SHAPES))}
    assert collected(run.results) == expected


def test_a_part_without_gradient_on_any_rank_loses_that_of_an_earlier_step(run_threads):
    def serve(group):
        rank = Rank(group, granularity="element").reduce()
        return rank.reduce()  # all were consumed, so there is none this time

    run = run_threads(2, serve)
    found = collected(run.results)
    assert {i: values for i, values in found.items() if i != EMPTY} == dict.fromkeys(range(5))


class FailingGroup(LoneRank):
    """Rank 0 of 2, whose reductions fail when they are awaited, or that counts those in flight."""

    world_size = 2

    def __init__(self, error=None):
        super().__init__()
        self._error = error
        self.num_in_flight = 0
        self.deepest = 0

    def all_gather_ints(self, values):
        return [list(values)] * 2

    def reduce_scatter(self, parts, *, out, scratch):
        self.num_in_flight += 1
        self.deepest = max(self.deepest, self.num_in_flight)
        return self

    def wait(self):
        self.num_in_flight -= 1
        if self._error is not None:
            raise self._error


def test_a_bounded_number_of_buckets_is_in_flight():
    group = FailingGroup()
    rank = Rank(group, bucket_nbytes=1).reduce()
    assert len(rank.buckets) > DEPTH
    assert (group.deepest, group.num_in_flight) == (DEPTH, 0)


def test_memory_is_given_back_after_a_failed_reduction():
    group = FailingGroup(RuntimeError("peer is gone"))
    rank = Rank(group, bucket_nbytes=1)
    with pytest.raises(RuntimeError, match="peer is gone"):
        rank.reduce()
    assert (group.num_in_flight, rank.pool.num_out) == (0, 0)
    assert rank.pool.nbytes > 0
