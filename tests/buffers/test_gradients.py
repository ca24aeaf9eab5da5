import pytest
import torch

from shardopt.buffers import GradientBucket, StagingPool
from tests.buffers.conftest import make_params

ALIGNMENT = 64
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@pytest.fixture
def pool():
    return StagingPool()


@pytest.fixture(params=["parameter", "element"])
def granularity(request):
    return request.param


@pytest.fixture
def make_bucket(plan_for, cut_bucket, pool, copy_all):
    """The gradients of some parameters, of which rank 0 of 2 keeps its part, unless told otherwise."""

    def make(params, *, granularity="parameter", rank=0, alignment_nbytes=ALIGNMENT, owners=None):
        if granularity == "element":
            specs, plan = cut_bucket(params, alignment_nbytes=alignment_nbytes)
        else:
            specs, layout = plan_for(params, owners=owners, alignment_nbytes=alignment_nbytes)
            [plan] = layout.buckets
        return GradientBucket(plan, params, specs, rank=rank, pool=pool, copy_all=copy_all)

    return make


def trained(dtype=torch.float32, *, without=()):
    """Parameters of every kind with gradients of their own layout."""
    params = [torch.nn.Parameter(param) for param in make_params(dtype)]
    for index, (param, gradient) in enumerate(
        zip(params, make_params(dtype, seed=50), strict=True)
    ):
        if index not in without:
            param.grad = gradient
    return params


def view_of(memory, bucket, params, index):
    """Where a gradient lies in packed memory, in the shape and strides that its parameter has in a flat bucket."""
    place = bucket.plan.places[index]
    param = params[index]
    stride = param.stride() if index != 4 else torch.empty(param.shape).stride()
    return memory.as_strided(param.shape, stride, memory.storage_offset() + place.start)


def padding_of(bucket):
    """The elements of a bucket that belong to no parameter."""
    covered = {e for place in bucket.plan.places.values() for e in range(place.start, place.stop)}
    return sorted(set(range(bucket.plan.numel)) - covered)


ALL = [True] * 6


# --- pack -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_packed_gradients_are_scaled_and_lie_as_their_parameters(
    make_bucket, granularity, dtype, assert_equal
):
    params = trained(dtype)
    bucket = make_bucket(params, granularity=granularity)
    memory = bucket.pack(ALL, scale=0.5)
    for index, param in enumerate(params):
        assert_equal(view_of(memory, bucket, params, index), param.grad * 0.5)


def test_scaling_rounds_once_in_the_dtype_of_the_gradients(make_bucket, assert_equal):
    params = trained(torch.bfloat16)
    bucket = make_bucket(params)
    memory = bucket.pack(ALL, scale=1 / 3)
    assert_equal(view_of(memory, bucket, params, 0), params[0].grad.clone().mul_(1 / 3))


@pytest.mark.parametrize("alignment_nbytes", [1, ALIGNMENT])
def test_a_parameter_without_gradient_gives_zeros(make_bucket, granularity, alignment_nbytes):
    params = trained(without=(0, 2))
    bucket = make_bucket(params, granularity=granularity, alignment_nbytes=alignment_nbytes)
    bucket.release(bucket.pack(ALL, scale=1.0).fill_(7.0))
    memory = bucket.pack([param.grad is not None for param in params], scale=1.0)
    found = [view_of(memory, bucket, params, i).ne(0).all().item() for i in range(6)]
    assert found == [False, True, False, True, True, True]
    assert not view_of(memory, bucket, params, 0).any()


def test_a_gradient_that_does_not_count_gives_zeros(make_bucket, granularity):
    params = trained()
    bucket = make_bucket(params, granularity=granularity)
    bucket.release(bucket.pack(ALL, scale=1.0).fill_(7.0))
    memory = bucket.pack([False] * 6, scale=1.0)
    assert not memory[: bucket.plan.numel].any()


def test_a_gradient_counts_by_the_index_of_its_parameter(make_bucket):
    params = trained()
    bucket = make_bucket(params)
    present = [True, False, True, True, True, True]
    memory = bucket.pack(present, scale=1.0)
    found = [view_of(memory, bucket, params, i).ne(0).all().item() for i in range(6)]
    assert found == present


def test_padding_is_zero_whatever_the_memory_held(make_bucket, granularity):
    params = trained()
    bucket = make_bucket(params, granularity=granularity)
    bucket.release(bucket.pack(ALL, scale=1.0).fill_(float("nan")))
    memory = bucket.pack(ALL, scale=1.0)
    padding = padding_of(bucket)
    assert (len(padding) > 0, memory[padding].tolist()) == (True, [0.0] * len(padding))


def test_packing_leaves_the_gradients_alone(make_bucket, assert_equal):
    params = trained()
    before = [param.grad.clone() for param in params]
    make_bucket(params).pack(ALL, scale=0.5)
    for param, expected in zip(params, before, strict=True):
        assert_equal(param.grad, expected)


def test_gradients_of_other_strides_than_their_parameter_are_packed_alike(
    make_bucket, assert_equal
):
    params = trained()
    params[2].grad = params[2].grad.contiguous()
    params[3].grad = torch.tensor(3.0).expand(6, 4)
    bucket = make_bucket(params)
    memory = bucket.pack(ALL, scale=1.0)
    for index in (2, 3):
        assert_equal(view_of(memory, bucket, params, index), params[index].grad)


def test_channels_last_gradients_travel_in_memory_order(make_bucket):
    param = torch.nn.Parameter(
        torch.zeros(1, 2, 1, 2).contiguous(memory_format=torch.channels_last)
    )
    param.grad = torch.arange(4.0).view(1, 2, 1, 2)  # by channel: 0 1 | 2 3
    memory = make_bucket([param], owners=[0]).pack([True], scale=1.0)
    assert memory[:4].tolist() == [0.0, 2.0, 1.0, 3.0]


def test_gradients_that_are_part_of_a_graph_are_packed_without_it(make_bucket):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = (torch.ones(3, requires_grad=True) * 2).requires_grad_()
    memory = make_bucket([param], owners=[0]).pack([True], scale=1.0)
    assert (memory.requires_grad, memory[:3].tolist()) == (False, [2.0] * 3)


# --- parts, scratch, release ----------------------------------------------------------------------


def test_parts_are_the_sections_of_the_packed_memory(make_bucket, granularity):
    params = trained()
    bucket = make_bucket(params, granularity=granularity)
    memory = bucket.pack(ALL, scale=1.0)
    parts = bucket.parts(memory)
    assert [(p.data_ptr(), p.shape) for p in parts] == [
        (memory[s.start :].data_ptr(), (s.numel,)) for s in bucket.plan.sections
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_shard_is_as_large_as_the_section_of_its_rank(make_bucket, granularity, rank):
    bucket = make_bucket(trained(), granularity=granularity, rank=rank)
    assert bucket.shard.shape == (bucket.plan.sections[rank].numel,)


def test_scratch_holds_the_parts_of_all_other_ranks(make_bucket):
    bucket = make_bucket(trained())
    assert bucket.scratch(4).numel() >= 3 * bucket.shard.numel()


def test_scratch_is_not_the_packed_memory(make_bucket):
    bucket = make_bucket(trained())
    memory = bucket.pack(ALL, scale=1.0)
    assert bucket.scratch(2).data_ptr() != memory.data_ptr()


def test_a_lone_rank_needs_no_scratch(make_bucket):
    assert make_bucket(trained()).scratch(1) is None


def test_a_rank_that_owns_nothing_still_has_scratch(make_bucket):
    bucket = make_bucket(trained(), owners=[0] * 6, rank=1)
    assert (bucket.shard.numel(), bucket.scratch(2) is None) == (0, False)


def test_staging_memory_is_used_again_once_released(make_bucket, pool):
    bucket = make_bucket(trained())
    held = []
    for _ in range(3):
        memory, scratch = bucket.pack(ALL, scale=1.0), bucket.scratch(2)
        bucket.release(memory, scratch)
        held.append(pool.nbytes)
    assert held == [2 * bucket.plan.numel * 4] * 3


def test_nothing_is_released_where_nothing_was_taken(make_bucket, pool):
    make_bucket(trained()).release(None)
    assert pool.nbytes == 0


def test_packed_memory_of_several_buckets_is_as_large_as_the_largest(make_bucket):
    small = make_bucket([torch.nn.Parameter(torch.ones(2))], owners=[0])
    large = make_bucket([torch.nn.Parameter(torch.ones(90))], owners=[0])
    memory = small.pack([False], scale=1.0)
    small.release(memory)
    assert large.pack([False], scale=1.0) is memory


# --- reduced --------------------------------------------------------------------------------------


def filled(bucket, rank):
    """Put where each element of the bucket lies into the shard."""
    section = bucket.plan.sections[rank]
    bucket.shard.copy_(torch.arange(section.start, section.stop))
    return section


@pytest.mark.parametrize("rank", [0, 1])
def test_reduced_whole_gradients_are_views_of_the_shard(make_bucket, rank):
    params = trained()
    bucket = make_bucket(params, rank=rank)
    section = filled(bucket, rank)
    flat = torch.arange(float(bucket.plan.numel))
    for slot in section.slots:
        gradient = bucket.reduced(slot.param, is_whole=True)
        expected = view_of(flat, bucket, params, slot.param)
        assert (gradient.stride(), gradient.tolist()) == (expected.stride(), expected.tolist())
        assert gradient.untyped_storage().data_ptr() == bucket.shard.untyped_storage().data_ptr()


@pytest.mark.parametrize("rank", [0, 1])
def test_reduced_parts_are_flat_views_of_the_shard(make_bucket, rank):
    bucket = make_bucket(trained(), granularity="element", rank=rank)
    section = filled(bucket, rank)
    for slot in section.slots:
        gradient = bucket.reduced(slot.param, is_whole=False)
        assert gradient.tolist() == list(range(slot.start, slot.stop))
        assert gradient.untyped_storage().data_ptr() == bucket.shard.untyped_storage().data_ptr()


def test_a_reduced_gradient_follows_what_is_reduced_next(make_bucket):
    bucket = make_bucket(trained())
    gradient = bucket.reduced(0, is_whole=True)
    bucket.shard.fill_(3.0)
    assert gradient.tolist() == [[3.0] * 5] * 3


def test_a_reduced_gradient_of_a_channels_last_parameter_is_channels_last(make_bucket):
    gradient = make_bucket(trained()).reduced(2, is_whole=True)
    assert gradient.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_reduced_gradients_can_be_set_on_their_parameters(make_bucket, dtype):
    params = trained(dtype)
    bucket = make_bucket(params)
    for index in (0, 2, 4):
        params[index].grad = bucket.reduced(index, is_whole=True)
    assert [params[index].grad.shape for index in (0, 2, 4)] == [
        params[index].shape for index in (0, 2, 4)
    ]


def test_a_shard_like_trained_parameters_is_not_trained(make_bucket):
    assert not make_bucket(trained()).shard.requires_grad


def test_only_what_this_rank_owns_can_be_asked_for(make_bucket):
    with pytest.raises(KeyError):
        make_bucket(trained()).reduced(1, is_whole=True)
