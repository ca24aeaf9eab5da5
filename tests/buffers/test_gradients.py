"""What a bucket of gradients collects, sends and keeps."""

import pytest
import torch

from tests.buffers.conftest import make_params

ALIGNMENT = 64
KINDS = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


@pytest.fixture(params=["parameter", "element"])
def granularity(request):
    return request.param


@pytest.fixture
def make_bucket(make_gradients):
    """The gradients of some parameters, aligned unless told otherwise."""

    def make(params, *, alignment_nbytes=ALIGNMENT, **options):
        return make_gradients(params, alignment_nbytes=alignment_nbytes, **options)

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


def filled(bucket, params):
    """A bucket that has taken in the gradients that there are."""
    for index, param in enumerate(params):
        if param.grad is not None:
            bucket.add(index, param.grad)
    return bucket


def memory_of(parts):
    """What travels as one tensor, which starts with the first part and ends with the last."""
    first = next(part for part in parts if part.numel())
    last = parts[-1].storage_offset() + parts[-1].numel()
    start = first.storage_offset()
    return first.as_strided((last - start,), (1,), start)


def view_of(memory, bucket, params, index):
    """Where a gradient lies in what travels, in the shape and strides that its parameter has in a flat bucket."""
    place = bucket.plan.places[index]
    param = params[index]
    stride = param.stride() if index != 4 else torch.empty(param.shape).stride()
    return memory.as_strided(param.shape, stride, memory.storage_offset() + place.start)


# --- what travels ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_gradients_travel_scaled_and_lie_as_their_parameters(
    make_bucket, granularity, dtype, assert_equal
):
    params = trained(dtype)
    bucket = filled(make_bucket(params, granularity=granularity), params)
    memory = memory_of(bucket.seal())
    for index, param in enumerate(params):
        assert_equal(view_of(memory, bucket, params, index), param.grad * 0.5)


def test_scaling_rounds_once_in_the_dtype_of_the_gradients(make_bucket, assert_equal):
    params = trained(torch.bfloat16)
    bucket = filled(make_bucket(params, num_members=3), params)
    memory = memory_of(bucket.seal())
    assert_equal(view_of(memory, bucket, params, 0), params[0].grad.clone().mul_(1 / 3))


@pytest.mark.parametrize("alignment_nbytes", [1, ALIGNMENT])
def test_a_parameter_without_gradient_gives_zeros(make_bucket, granularity, alignment_nbytes):
    params = trained(without=(0, 2))
    bucket = make_bucket(params, granularity=granularity, alignment_nbytes=alignment_nbytes)
    memory_of(bucket.seal()).fill_(7.0)
    bucket.take_memory()()
    memory = memory_of(filled(bucket, params).seal())
    found = [view_of(memory, bucket, params, i).ne(0).all().item() for i in range(6)]
    assert found == [False, True, False, True, True, True]
    assert not view_of(memory, bucket, params, 0).any()


def test_without_any_gradient_zeros_travel(make_bucket, granularity):
    params = trained(without=range(6))
    bucket = make_bucket(params, granularity=granularity)
    memory_of(bucket.seal()).fill_(7.0)
    bucket.take_memory()()
    memory = memory_of(bucket.seal())
    assert not any(view_of(memory, bucket, params, index).any() for index in range(6))


def test_a_gradient_taken_in_twice_is_added_up(make_bucket, granularity, assert_equal):
    params = trained()
    bucket = filled(filled(make_bucket(params, granularity=granularity), params), params)
    memory = memory_of(bucket.seal())
    for index, param in enumerate(params):
        expected = (param.grad * 0.5).add(param.grad, alpha=0.5)
        assert_equal(view_of(memory, bucket, params, index), expected)


def test_gradients_of_several_parameters_are_left_alone(make_bucket, assert_equal):
    params = trained()
    before = [param.grad.clone() for param in params]
    filled(make_bucket(params), params).seal()
    for param, expected in zip(params, before, strict=True):
        assert_equal(param.grad, expected)


def test_gradients_of_other_strides_than_their_parameter_travel_alike(make_bucket, assert_equal):
    params = trained()
    params[2].grad = params[2].grad.contiguous()
    params[3].grad = torch.tensor(3.0).expand(6, 4)
    bucket = filled(make_bucket(params, num_members=1), params)
    memory = memory_of(bucket.seal())
    for index in (2, 3):
        assert_equal(view_of(memory, bucket, params, index), params[index].grad)


def test_channels_last_gradients_travel_in_memory_order(make_bucket):
    param = torch.nn.Parameter(
        torch.zeros(1, 2, 1, 2).contiguous(memory_format=torch.channels_last)
    )
    param.grad = torch.arange(4.0).view(1, 2, 1, 2)  # by channel: 0 1 | 2 3
    bucket = filled(make_bucket([param], owners=[0], num_members=1), [param])
    assert bucket.seal()[0].tolist() == [0.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize("num_params", [1, 2])
def test_gradients_that_are_part_of_a_graph_travel_without_it(make_bucket, num_params):
    """As ``backward(create_graph=True)`` makes them, which runs hooks with gradients enabled."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(num_params)]
    bucket = make_bucket(params, owners=[0] * num_params, num_members=3)
    for index in range(num_params):
        bucket.add(index, torch.ones(3, requires_grad=True) * 3)
        bucket.add(index, torch.ones(3, requires_grad=True) * 6)
    part = bucket.seal()[0]
    assert (part.requires_grad, part[:3].tolist()) == (False, [3.0] * 3)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_travels_is_a_part_for_each_rank(make_bucket, granularity, rank):
    params = trained()
    bucket = filled(make_bucket(params, granularity=granularity, rank=rank), params)
    parts = bucket.seal()
    assert [part.shape for part in parts] == [(s.numel,) for s in bucket.plan.sections]
    assert bucket.shard.shape == parts[rank].shape


def test_parts_lie_as_sections_do(make_bucket, granularity):
    params = trained()
    bucket = filled(make_bucket(params, granularity=granularity), params)
    starts = [part.storage_offset() for part in bucket.seal()]
    assert [s - starts[0] for s in starts] == [section.start for section in bucket.plan.sections]


# --- staging memory -------------------------------------------------------------------------------


def test_staging_memory_is_used_again_once_released(make_bucket, pool):
    params = trained()
    bucket = make_bucket(params)
    held = []
    for _ in range(3):
        filled(bucket, params).seal()
        release = bucket.take_memory()
        _, release_scratch = bucket.scratch(1, bucket.shard.numel())
        release()
        release_scratch()
        held.append(pool.nbytes)
    assert (held, pool.num_out) == ([2 * bucket.plan.numel * 4] * 3, 0)


def test_what_is_collected_next_does_not_lie_where_the_last_still_travels(make_bucket):
    params = trained()
    bucket = filled(make_bucket(params), params)
    travelling = memory_of(bucket.seal())
    before = travelling.clone()
    release = bucket.take_memory()
    memory_of(filled(filled(bucket, params), params).seal())
    assert torch.equal(travelling, before)
    release()


def test_a_bucket_follows_its_staging_memory(make_bucket, assert_equal):
    """Views of it are kept, and the pool may lend other memory."""
    params = trained()
    bucket = filled(make_bucket(params), params)
    bucket.seal()
    releases = [bucket.take_memory()]
    for num_times in (1, 2):
        memory = memory_of(filled(bucket, params).seal())
        for index, param in enumerate(params):
            assert_equal(view_of(memory, bucket, params, index), param.grad * 0.5)
        releases.append(bucket.take_memory())
        releases[num_times - 1]()


def test_nothing_is_released_where_nothing_was_taken(make_bucket, pool):
    make_bucket(trained()).take_memory()()
    assert (pool.nbytes, pool.num_out) == (0, 0)


def test_staging_memory_of_several_buckets_is_as_large_as_the_largest(make_bucket, pool):
    small = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    large = [torch.nn.Parameter(torch.ones(45)) for _ in range(2)]
    buckets = [
        make_bucket(params, owners=[0, 0], alignment_nbytes=1) for params in (small, large, small)
    ]
    for bucket in buckets:
        bucket.seal()
        bucket.take_memory()()
    assert pool.nbytes == 90 * 4


@pytest.mark.parametrize("num", [1, 2, 3])
def test_scratch_is_as_many_tensors_as_asked_for_that_do_not_overlap(make_bucket, pool, num):
    bucket = make_bucket(trained())
    tensors, release = bucket.scratch(num, 5)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.tolist() for tensor in tensors] == [[float(v)] * 5 for v in range(num)]
    release()
    assert pool.num_out == 0


def test_scratch_is_not_the_memory_that_travels(make_bucket):
    bucket = make_bucket(trained())
    memory = memory_of(bucket.seal())
    [scratch], _ = bucket.scratch(1, 5)
    assert scratch.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()


@pytest.mark.parametrize(("num", "numel"), [(0, 5), (2, 0)])
def test_no_memory_is_taken_for_no_scratch(make_bucket, pool, num, numel):
    tensors, release = make_bucket(trained()).scratch(num, numel)
    assert ([tensor.numel() for tensor in tensors], pool.num_out) == ([0] * num, 0)
    release()


@pytest.mark.parametrize(("wire_dtype", "itemsize"), [(None, 4), (torch.bfloat16, 2)], ids=str)
def test_bytes_held_while_it_travels_are_those_of_the_wire(make_bucket, wire_dtype, itemsize):
    bucket = make_bucket(trained(), wire_dtype=wire_dtype)
    assert bucket.nbytes == bucket.plan.numel * itemsize


# --- other dtypes on the wire and in the sum ------------------------------------------------------


def test_gradients_travel_in_the_dtype_of_the_wire(make_bucket, granularity, assert_equal):
    params = trained()
    bucket = make_bucket(params, granularity=granularity, wire_dtype=torch.bfloat16)
    memory = memory_of(filled(bucket, params).seal())
    for index, param in enumerate(params):
        expected = (param.grad * 0.5).bfloat16()
        assert_equal(view_of(memory, bucket, params, index), expected)


def test_gradients_are_scaled_before_they_are_rounded_to_the_wire(make_bucket):
    param = torch.nn.Parameter(torch.zeros(2))
    others = [param, torch.nn.Parameter(torch.zeros(2))]
    bucket = make_bucket(others, owners=[0, 0], num_members=3, wire_dtype=torch.float16)
    bucket.add(0, torch.tensor([90000.0, 3.0]))  # above the largest float16, 65504
    assert bucket.seal()[0][:2].tolist() == [30000.0, 1.0]


@pytest.mark.parametrize(
    ("wire_dtype", "sum_dtype", "kept", "casts"),
    [
        (None, None, torch.float32, False),
        (torch.bfloat16, None, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, torch.float32, True),
        (None, torch.float64, torch.float64, True),
        (None, torch.float32, torch.float32, False),
    ],
    ids=str,
)
def test_sums_are_kept_in_their_own_dtype_or_that_of_the_wire(
    make_bucket, wire_dtype, sum_dtype, kept, casts
):
    bucket = make_bucket(trained(), wire_dtype=wire_dtype, sum_dtype=sum_dtype)
    assert (bucket.shard.dtype, bucket.casts) == (kept, casts)


def test_scratch_is_of_the_dtype_of_the_wire(make_bucket):
    bucket = make_bucket(trained(), wire_dtype=torch.bfloat16, sum_dtype=torch.float32)
    tensors, _ = bucket.scratch(2, 5)
    assert [tensor.dtype for tensor in tensors] == [torch.bfloat16] * 2


# --- reduced --------------------------------------------------------------------------------------


def numbered(bucket, rank):
    """Put where each element of the bucket lies into the shard."""
    section = bucket.plan.sections[rank]
    bucket.shard.copy_(torch.arange(section.start, section.stop))
    return section


@pytest.mark.parametrize("rank", [0, 1])
def test_reduced_whole_gradients_are_views_of_the_shard(make_bucket, rank):
    params = trained()
    bucket = make_bucket(params, rank=rank)
    section = numbered(bucket, rank)
    flat = torch.arange(float(bucket.plan.numel))
    for slot in section.slots:
        gradient = bucket.reduced(slot.param, is_whole=True)
        expected = view_of(flat, bucket, params, slot.param)
        assert (gradient.stride(), gradient.tolist()) == (expected.stride(), expected.tolist())
        assert gradient.untyped_storage().data_ptr() == bucket.shard.untyped_storage().data_ptr()


@pytest.mark.parametrize("rank", [0, 1])
def test_reduced_parts_are_flat_views_of_the_shard(make_bucket, rank):
    bucket = make_bucket(trained(), granularity="element", rank=rank)
    section = numbered(bucket, rank)
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


def test_a_shard_is_zero_before_anything_is_reduced(make_bucket):
    assert not make_bucket(trained()).shard.any()


def test_only_what_this_rank_owns_can_be_asked_for(make_bucket):
    with pytest.raises(KeyError):
        make_bucket(trained()).reduced(1, is_whole=True)
