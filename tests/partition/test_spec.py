import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.partition import ParamSpec, is_dense


def spec(**changes):
    fingerprint = {
        "index": 7,
        "name": "head.bias",
        "group": 1,
        "shape": (2, 3),
        "stride": (3, 1),
        "dtype": "torch.float32",
        "itemsize": 4,
        "device": "cpu#0",
        "requires_grad": True,
    }
    return ParamSpec(**{**fingerprint, **changes})


def offsets(shape, stride):
    """Memory positions of all elements."""
    positions = [0]
    for length, step in zip(shape, stride, strict=True):
        positions = [base + i * step for base in positions for i in range(length)]
    return positions


@st.composite
def strided_shapes(draw):
    """Shapes whose strides are a permutation of gapless ones, some of them then stretched."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis] + draw(st.sampled_from([0, 0, 0, 0, 1]))
    if strides and draw(st.booleans()):
        strides[draw(st.integers(0, len(shape) - 1))] *= draw(st.integers(0, 3))
    return shape, tuple(strides)


@given(strided_shapes())
def test_dense_means_that_the_elements_fill_a_gapless_range(case):
    shape, stride = case
    positions = sorted(offsets(shape, stride))
    assert is_dense(shape, stride) == (positions == list(range(len(positions))))


@pytest.mark.parametrize(
    ("stride", "expected"),
    [((3, 1), True), ((1, 2), True), ((6, 2), False), ((0, 1), False)],
)
def test_the_worked_example_of_is_dense_holds(stride, expected):
    assert is_dense((2, 3), stride) is expected


def test_a_single_number_is_dense():
    assert is_dense((), ())


def test_strides_of_dimensions_of_length_one_do_not_matter_for_density():
    assert is_dense((1, 3, 1), (77, 1, 0))


def test_is_dense_rejects_a_shape_and_strides_of_different_lengths():
    with pytest.raises(ValueError, match="zip"):
        is_dense((2, 3), (1,))


def test_spec_density_is_that_of_its_shape_and_strides():
    assert (spec().is_dense, spec(stride=(6, 2)).is_dense) == (True, False)


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0, 3), 0), ((2, 3), 6)])
def test_numel_is_the_product_of_the_shape(shape, numel):
    assert spec(shape=shape).numel == numel


def test_nbytes_counts_the_elements_in_bytes():
    assert spec(shape=(2, 3), itemsize=8).nbytes == 48


def test_label_holds_index_and_name():
    assert spec().label == "param 7 'head.bias'"


def test_label_of_a_nameless_parameter_is_its_index():
    assert spec(name=None).label == "param 7"


def test_facts_state_what_ranks_compare():
    assert spec().fingerprint() == "(2, 3) 'head.bias' torch.float32 on cpu#0, trained, in group 1"


def test_facts_of_a_frozen_nameless_parameter():
    fingerprint = spec(name=None, requires_grad=False).fingerprint()
    assert fingerprint == "(2, 3) torch.float32 on cpu#0, frozen, in group 1"


def test_facts_include_strides_on_request():
    fingerprint = spec(stride=(1, 2)).fingerprint(with_stride=True)
    assert (
        fingerprint
        == "(2, 3) strides (1, 2) 'head.bias' torch.float32 on cpu#0, trained, in group 1"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (3, 2)},
        {"dtype": "torch.float16"},
        {"device": "cuda#0"},
        {"requires_grad": False},
        {"group": 0},
        {"name": "head.weight"},
        {"is_cut": True},
        {"cost": 6.0},
    ],
)
def test_facts_differ_where_ranks_must_not(change):
    assert spec().fingerprint() != spec(**change).fingerprint()


def test_facts_say_that_elements_may_have_different_owners():
    assert spec(is_cut=True).fingerprint() == (
        "(2, 3) 'head.bias' torch.float32 on cpu#0, trained, in group 1, by element"
    )


def test_facts_state_the_cost_where_one_was_given():
    assert spec(is_cut=True, cost=0.5).fingerprint().endswith(", in group 1, by element, cost 0.5")


def test_costs_that_differ_in_the_last_bit_differ_in_the_facts():
    assert spec(cost=0.1 + 0.2).fingerprint() != spec(cost=0.3).fingerprint()


def test_a_parameter_loads_its_owner_with_its_elements():
    assert spec().load == 6


@pytest.mark.parametrize("cost", [0.0, 0.5, 100.0])
def test_a_parameter_loads_its_owner_with_its_cost_where_one_is_known(cost):
    assert spec(cost=cost).load == cost


def test_a_spec_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec().index = 3
