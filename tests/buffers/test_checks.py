import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.arguments import read_specs
from shardopt.buffers import find_shared_memory, require_unchanged
from shardopt.errors import ParameterChangedError

# --- find_shared_memory ---------------------------------------------------------------------------


def pieces(*ranges):
    """Slices of one memory."""
    memory = torch.zeros(100)
    return [memory[start:stop] for start, stop in ranges]


def test_parameters_of_their_own_memory_share_nothing():
    assert find_shared_memory([torch.zeros(3), torch.zeros(3), torch.zeros(2, 2)]) is None


def test_neighbours_in_one_memory_share_nothing():
    assert find_shared_memory(pieces((0, 10), (10, 20), (20, 21))) is None


def test_the_same_memory_twice_is_found():
    param = torch.zeros(3)
    assert find_shared_memory([torch.zeros(3), param, torch.zeros(3), param.view(3)]) == (1, 3)


def test_an_overlap_of_one_element_is_found():
    assert find_shared_memory(pieces((9, 20), (0, 10))) == (0, 1)


def test_a_parameter_inside_another_is_found():
    assert find_shared_memory(pieces((0, 100), (40, 41))) == (0, 1)


def test_an_overlap_with_a_parameter_that_is_not_the_next_in_memory_is_found():
    assert find_shared_memory(pieces((0, 50), (10, 12), (20, 30))) is not None


def test_a_transposed_view_is_found():
    param = torch.zeros(3, 4)
    assert find_shared_memory([param, param.t()]) == (0, 1)


def test_an_overlap_with_a_parameter_with_gaps_is_found():
    memory = torch.zeros(4, 8)
    assert find_shared_memory([memory[:, ::2], memory[3, 6:]]) == (0, 1)


def test_parameters_without_elements_share_nothing():
    memory = torch.zeros(4)
    assert find_shared_memory([memory[2:2], memory, memory[1:1]]) is None


def test_parameters_without_memory_share_nothing():
    assert (
        find_shared_memory([torch.zeros(3, device="meta"), torch.zeros(3, device="meta")]) is None
    )


def test_no_parameters_share_nothing():
    assert find_shared_memory([]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex128])
def test_overlaps_are_counted_in_bytes(dtype):
    memory = torch.zeros(10, dtype=dtype)
    assert find_shared_memory([memory[:5], memory[5:]]) is None
    assert find_shared_memory([memory[:6], memory[5:]]) == (0, 1)


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 10)), max_size=8))
def test_slices_share_memory_exactly_where_two_of_them_intersect(starts):
    ranges = [(start, start + numel) for start, numel in starts]
    overlaps = [
        (i, j)
        for j in range(len(ranges))
        for i in range(j)
        if max(ranges[i][0], ranges[j][0]) < min(ranges[i][1], ranges[j][1])
    ]
    found = find_shared_memory(pieces(*ranges))
    assert (found in overlaps) if overlaps else (found is None)


# --- require_unchanged ----------------------------------------------------------------------------


@pytest.fixture
def params():
    return [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]


@pytest.fixture
def specs(params):
    return read_specs([{"params": params, "param_names": ["body.weight", "head.bias"]}])


@pytest.fixture
def devices(params):
    return [param.device for param in params]


def test_unchanged_parameters_pass(params, specs, devices):
    require_unchanged(params, specs, devices)


def test_other_values_and_other_memory_pass(params, specs, devices):
    params[1].data = torch.ones(4)
    require_unchanged(params, specs, devices)


def test_another_dtype_is_named_with_the_way_out(params, specs, devices):
    params[1].data = params[1].data.half()
    with pytest.raises(ParameterChangedError) as caught:
        require_unchanged(params, specs, devices)
    assert str(caught.value) == (
        "param 1 'head.bias': now (4,) torch.float16 on cpu, but (4,) torch.float32 on cpu when the optimizer was "
        "made; convert, resize or move the model first, then make the optimizer and load its state"
    )


def test_another_shape_is_named_with_the_way_out(params, specs, devices):
    params[0].data = torch.zeros(3, 2)
    with pytest.raises(ParameterChangedError) as caught:
        require_unchanged(params, specs, devices)
    assert str(caught.value) == (
        "param 0 'body.weight': now (3, 2) torch.float32 on cpu, but (2, 3) torch.float32 on cpu when the optimizer "
        "was made; convert, resize or move the model first, then make the optimizer and load its state"
    )


def test_another_device_is_named_with_the_way_out(params, specs, devices):
    devices[1] = torch.device("meta")
    with pytest.raises(ParameterChangedError) as caught:
        require_unchanged(params, specs, devices)
    assert str(caught.value) == (
        "param 1 'head.bias': now (4,) torch.float32 on cpu, but (4,) torch.float32 on meta when the optimizer was "
        "made; convert, resize or move the model first, then make the optimizer and load its state"
    )


def test_a_nameless_parameter_is_named_by_its_index(params, specs, devices):
    params[0].data = torch.zeros(6)
    nameless = [dataclasses.replace(spec, name=None) for spec in specs]
    with pytest.raises(ParameterChangedError, match=r"^param 0: now \(6,\)"):
        require_unchanged(params, nameless, devices)


def test_parameters_and_specs_are_equally_many(params, specs, devices):
    with pytest.raises(ValueError, match="zip"):
        require_unchanged(params, specs[:1], devices)
