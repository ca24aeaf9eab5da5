"""A bucket of one parameter on the CPU, which travels from the gradient's own memory where it can."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives.group import add_up
from tests.buffers.conftest import in_memory_order


@pytest.fixture
def make_bucket(make_gradients):
    """The gradient of one parameter, and of others where some are given; all of it is owned by rank 0."""

    def make(param, *others, is_cut=False, **options):
        granularity = "element" if is_cut else "parameter"
        owners = [0] * (1 + len(others))
        return make_gradients([param, *others], granularity=granularity, owners=owners, **options)

    return make


def trained(*shape, dtype=torch.float32):
    return torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))


# --- borrowing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_gradient_alone_in_its_bucket_travels_from_its_own_memory(make_bucket, pool, is_cut):
    gradient = torch.arange(6.0).view(2, 3)
    bucket = make_bucket(trained(2, 3), is_cut=is_cut)
    bucket.add(0, gradient)
    parts = bucket.seal()
    assert (parts[0].data_ptr(), pool.num_out) == (gradient.data_ptr(), 0)


def test_memory_that_was_borrowed_is_not_given_to_the_pool(make_bucket, pool):
    bucket = make_bucket(trained(3))
    bucket.add(0, torch.ones(3))
    bucket.seal()
    bucket.take_memory()()
    assert (pool.nbytes, pool.num_out) == (0, 0)


def test_after_a_borrowed_gradient_the_next_is_taken_anew(make_bucket):
    bucket = make_bucket(trained(3))
    bucket.add(0, torch.ones(3))
    bucket.seal()
    bucket.take_memory()()
    assert bucket.seal()[0].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "param",
    [
        torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.zeros(4, 6).t(),
        torch.zeros(()),
    ],
    ids=["channels_last", "transposed", "0-dim"],
)
def test_a_gradient_that_lies_as_its_parameter_is_borrowed_in_memory_order(make_bucket, param):
    gradient = torch.zeros_like(param)
    in_memory_order(gradient).copy_(torch.arange(float(param.numel())))
    bucket = make_bucket(torch.nn.Parameter(param))
    bucket.add(0, gradient)
    part = bucket.seal()[0]
    assert (part.data_ptr(), part.tolist()) == (gradient.data_ptr(), [*range(param.numel())])


@pytest.mark.parametrize(
    ("param", "gradient"),
    [
        (torch.zeros(4, 6).t(), torch.ones(6, 4)),
        (torch.zeros(3, 8)[:, ::2], torch.ones(3, 4)),
        (torch.zeros(3), torch.ones(1).expand(3)),
        (torch.zeros(3), torch.ones(6)[::2]),
    ],
    ids=["other strides", "parameter with gaps", "expanded", "gradient with gaps"],
)
def test_a_gradient_that_does_not_lie_as_it_would_travel_is_copied(
    make_bucket, pool, param, gradient
):
    bucket = make_bucket(torch.nn.Parameter(param))
    bucket.add(0, gradient)
    part = bucket.seal()[0]
    assert (pool.num_out, part.tolist()) == (1, [1.0] * param.numel())


def test_a_gradient_of_another_dtype_than_the_wire_is_copied(make_bucket, pool):
    bucket = make_bucket(trained(3), wire_dtype=torch.bfloat16)
    bucket.add(0, torch.ones(3))
    assert (bucket.seal()[0].dtype, pool.num_out) == (torch.bfloat16, 1)


def test_a_gradient_beside_others_is_copied(make_bucket, pool):
    gradient = torch.ones(3)
    bucket = make_bucket(trained(3), trained(3))
    bucket.add(0, gradient)
    assert bucket.seal()[0].data_ptr() != gradient.data_ptr()


def test_a_gradient_that_does_not_start_its_memory_is_borrowed_where_it_lies(make_bucket):
    memory = torch.arange(10.0)
    bucket = make_bucket(trained(3))
    bucket.add(0, memory[4:7])
    assert bucket.seal()[0].tolist() == [4.0, 5.0, 6.0]


def test_a_second_gradient_is_added_to_the_borrowed_one(make_bucket):
    first = torch.tensor([1.0, 2.0])
    bucket = make_bucket(trained(2))
    bucket.add(0, first)
    bucket.add(0, torch.tensor([10.0, 20.0]))
    assert (bucket.seal()[0].tolist(), first.tolist()) == ([11.0, 22.0], [11.0, 22.0])


def test_a_second_gradient_of_other_strides_is_added_element_by_element(make_bucket):
    bucket = make_bucket(trained(2, 2))
    bucket.add(0, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    bucket.add(0, torch.tensor([[10.0, 20.0], [30.0, 40.0]]).t())
    assert bucket.seal()[0].tolist() == [11.0, 32.0, 23.0, 44.0]


# --- padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment_nbytes", [1, 8, 64])
@pytest.mark.parametrize("is_borrowed", [False, True])
def test_padding_does_not_travel(make_bucket, alignment_nbytes, is_borrowed):
    bucket = make_bucket(trained(5), is_cut=True, alignment_nbytes=alignment_nbytes)
    if is_borrowed:
        bucket.add(0, torch.arange(5.0))
    parts = bucket.seal()
    expected = torch.arange(5.0) if is_borrowed else torch.zeros(5)
    assert torch.equal(torch.cat(parts), expected)


def test_parts_are_the_sections_but_for_padding(make_bucket):
    """Sections of 16 elements, of which 5 and 0 are of the parameter."""
    bucket = make_bucket(trained(5), is_cut=True, alignment_nbytes=64)
    assert ([p.numel() for p in bucket.seal()], bucket.shard.numel()) == ([5, 0], 16)


# --- scaling --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_members", "dtype", "expected"),
    [
        (1, torch.float32, 1.0),
        (2, torch.float32, 0.5),
        (4, torch.bfloat16, 0.25),
        (8, torch.float64, 0.125),
        (3, torch.float32, 1.0),
        (6, torch.bfloat16, 1.0),
        (2, torch.float16, 1.0),
    ],
    ids=str,
)
def test_a_sum_is_scaled_where_that_is_the_same_to_the_bit(
    make_bucket, num_members, dtype, expected
):
    bucket = make_bucket(trained(3, dtype=dtype), num_members=num_members)
    assert bucket.sum_scale == expected


def test_a_sum_that_travels_in_float16_is_not_scaled_afterwards(make_bucket):
    assert make_bucket(trained(3), wire_dtype=torch.float16).sum_scale == 1.0


def test_sums_of_several_parameters_are_not_scaled_afterwards(make_bucket):
    assert make_bucket(trained(3), trained(3)).sum_scale == 1.0


def test_a_borrowed_gradient_is_scaled_in_place_where_its_sum_is_not(make_bucket):
    gradient = torch.tensor([3.0, 6.0])
    bucket = make_bucket(trained(2), num_members=3)
    bucket.add(0, gradient)
    expected = torch.tensor([3.0, 6.0]).mul_(1 / 3)
    assert torch.equal(bucket.seal()[0], expected)
    assert torch.equal(gradient, expected)


def test_float16_gradients_are_scaled_before_their_sum_overflows(make_bucket):
    buckets = [make_bucket(trained(1, dtype=torch.float16)) for _ in range(2)]
    for bucket in buckets:
        bucket.add(0, torch.tensor([60000.0], dtype=torch.float16))
    out = torch.zeros(1, dtype=torch.float16)
    add_up([b.seal()[0] for b in buckets], out=out, scale=buckets[0].sum_scale, adds=False)
    assert out.item() == 60000.0


normal = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False).filter(
    lambda value: value == 0 or abs(value) > 2.0**-60
)


@given(st.sampled_from([2, 4]).flatmap(lambda n: st.lists(normal, min_size=n, max_size=n)))
def test_scaling_the_sum_gives_the_bits_of_scaling_every_gradient(make_bucket, values):
    """As long as nothing is subnormal: a product with a power of two is exact."""
    averages = []
    for others in ([], [trained(1)]):
        parts = []
        for value in values:
            bucket = make_bucket(trained(1), *others, num_members=len(values))
            bucket.add(0, torch.tensor([value]))
            parts.append(bucket.seal()[0][:1])
        out = torch.zeros(1)
        add_up(parts, out=out, scale=bucket.sum_scale, adds=False)
        averages.append(out)
    assert torch.equal(averages[0], averages[1])
