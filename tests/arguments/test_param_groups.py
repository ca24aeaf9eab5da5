import re

import pytest
import torch

from shardopt.arguments import read_param_group, read_param_groups, read_specs
from shardopt.frameworks.torch import TORCH

SET_TEXT = "params: got a set, whose order differs between ranks; pass a list"


def make_params(count=3):
    return [torch.nn.Parameter(torch.zeros(2, i + 1)) for i in range(count)]


def same(actual, expected):
    """Whether two lists hold the same objects."""
    return list(map(id, actual)) == list(map(id, expected))


# --- read_param_groups ----------------------------------------------------------------------------


def test_a_list_of_tensors_is_one_group():
    params = make_params()
    groups = read_param_groups(params, TORCH)
    assert (len(groups), same(groups[0]["params"], params)) == (1, True)


def test_a_generator_is_read_once_and_in_order():
    params = make_params()
    assert same(read_param_groups(iter(params), TORCH)[0]["params"], params)


def test_a_generator_inside_a_group_is_read_once():
    params = make_params()
    groups = read_param_groups([{"params": iter(params)}], TORCH)
    assert same(groups[0]["params"], params)


def test_groups_keep_their_options():
    one, other = make_params(2)
    groups = read_param_groups([{"params": [one], "lr": 0.1}, {"params": [other]}], TORCH)
    assert [{k: v for k, v in g.items() if k != "params"} for g in groups] == [{"lr": 0.1}, {}]


def test_a_tensor_alone_in_a_group_becomes_a_list():
    (param,) = make_params(1)
    assert same(read_param_groups([{"params": param}], TORCH)[0]["params"], [param])


def test_names_stay_with_their_tensors():
    (param,) = make_params(1)
    assert read_param_groups([("w", param)], TORCH)[0]["params"] == [("w", param)]


def test_the_callers_groups_are_left_alone():
    given = [{"params": tuple(make_params()), "lr": 0.1}]
    read_param_groups(given, TORCH)[0]["lr"] = 5.0
    assert (type(given[0]["params"]), given[0]["lr"]) == (tuple, 0.1)


def test_the_callers_list_is_left_alone():
    params = make_params()
    read_param_groups([{"params": params}], TORCH)[0]["params"].clear()
    assert len(params) == 3


@pytest.mark.parametrize(
    ("params", "kind"), [(torch.zeros(3), "Tensor"), (3, "int"), (None, "NoneType")]
)
def test_what_cannot_be_read_as_parameters_is_named(params, kind):
    with pytest.raises(TypeError) as caught:
        read_param_groups(params, TORCH)
    assert str(caught.value) == (
        f"params: expected an iterable of tensors, (name, tensor) pairs or dicts, got {kind}"
    )


@pytest.mark.parametrize("params", [[], (), iter(())], ids=["list", "tuple", "generator"])
def test_no_parameters_are_an_error_with_a_hint(params):
    with pytest.raises(
        ValueError, match=re.escape("params: got an empty parameter list")
    ) as caught:
        read_param_groups(params, TORCH)
    assert str(caught.value).endswith("; was a generator used up before?")


def test_a_group_may_be_empty():
    assert read_param_groups([{"params": []}], TORCH) == [{"params": []}]


def test_an_error_in_a_later_group_is_found():
    (param,) = make_params(1)
    with pytest.raises(ValueError, match="is given twice"):
        read_param_groups([{"params": []}, {"params": [param, param]}], TORCH)


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_of_parameters_is_refused_because_its_order_differs_between_ranks(kind):
    with pytest.raises(TypeError) as caught:
        read_param_groups(kind(make_params()), TORCH)
    assert str(caught.value) == SET_TEXT


# --- read_param_group -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_inside_a_group_is_refused_because_its_order_differs_between_ranks(kind):
    with pytest.raises(TypeError) as caught:
        read_param_group({"params": kind(make_params())}, TORCH)
    assert str(caught.value) == SET_TEXT


@pytest.mark.parametrize(("group", "kind"), [([1], "list"), ({"lr": 1}, "dict"), (3, "int")])
def test_a_group_without_params_is_named(group, kind):
    with pytest.raises(TypeError) as caught:
        read_param_group(group, TORCH)
    assert str(caught.value) == f"param group: expected a dict with 'params', got {kind}"


def test_a_parameter_given_twice_is_named_by_position_and_shape():
    one, other = make_params(2)
    with pytest.raises(ValueError, match="is given twice") as caught:
        read_param_group({"params": [one, other, other]}, TORCH)
    assert str(caught.value) == (
        "param 2 of its group, (2, 2), is given twice; it would be updated twice. "
        "model.parameters() names each tied parameter once"
    )


def test_a_parameter_given_twice_under_two_names_is_found():
    (param,) = make_params(1)
    with pytest.raises(ValueError, match="param 1 of its group"):
        read_param_group({"params": [("encoder", param), ("decoder", param)]}, TORCH)


def test_equal_parameters_that_are_not_the_same_are_fine():
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    assert len(read_param_group({"params": params}, TORCH)["params"]) == 2


def test_a_sparse_parameter_is_refused_with_the_way_out():
    sparse = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="param 1 of its group") as caught:
        read_param_group({"params": [torch.zeros(2), sparse]}, TORCH)
    assert str(caught.value) == (
        "param 1 of its group has layout torch.sparse_coo, expected a dense tensor; "
        "make it dense with param.to_dense()"
    )


def test_what_is_no_tensor_is_left_to_the_framework():
    assert read_param_group({"params": ["w"]}, TORCH)["params"] == ["w"]


# --- read_specs -----------------------------------------------------------------------------------


def test_specs_number_parameters_through_the_groups():
    params = make_params()
    specs = read_specs([{"params": params[:2]}, {"params": []}, {"params": params[2:]}])
    assert [(spec.index, spec.group) for spec in specs] == [(0, 0), (1, 0), (2, 2)]


def test_specs_state_shape_and_strides():
    (spec,) = read_specs([{"params": [torch.zeros(2, 3).t()]}])
    assert (spec.shape, spec.stride) == ((3, 2), (1, 3))


@pytest.mark.parametrize(
    ("dtype", "itemsize"), [(torch.bool, 1), (torch.bfloat16, 2), (torch.complex64, 8)]
)
def test_specs_state_dtype_and_itemsize(dtype, itemsize):
    (spec,) = read_specs([{"params": [torch.zeros(2, dtype=dtype)]}])
    assert (spec.dtype, spec.itemsize) == (str(dtype), itemsize)


def test_specs_hold_plain_values_only():
    (spec,) = read_specs([{"params": make_params(1)}])
    assert (type(spec.shape), type(spec.dtype), type(spec.device)) == (tuple, str, str)


def test_specs_state_names_where_a_group_has_some():
    one, other = make_params(2)
    specs = read_specs([{"params": [one], "param_names": ["w"]}, {"params": [other]}])
    assert [spec.name for spec in specs] == ["w", None]


def test_specs_state_whether_a_parameter_is_trained():
    params = make_params(2)
    params[0].requires_grad_(False)
    assert [spec.requires_grad for spec in read_specs([{"params": params}])] == [False, True]


def test_devices_are_numbered_by_first_appearance():
    params = [torch.zeros(1, device=device) for device in ("meta", "cpu", "meta")]
    specs = read_specs([{"params": params[:2]}, {"params": params[2:]}])
    assert [spec.device for spec in specs] == ["meta#0", "cpu#1", "meta#0"]


# --- granularity and cost -------------------------------------------------------------------------


def test_parameters_are_whole_unless_their_group_is_by_element():
    params = make_params()
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    assert [spec.is_cut for spec in read_specs(groups)] == [False] * 3
    specs = read_specs(groups, ["parameter", "element"])
    assert [spec.is_cut for spec in specs] == [False, True, True]


def test_without_a_cost_the_number_of_elements_is_what_counts():
    specs = read_specs([{"params": make_params()}])
    assert [(spec.cost, spec.load) for spec in specs] == [(None, 2), (None, 4), (None, 6)]


def test_a_cost_is_asked_for_with_all_facts():
    asked = []

    def cost(spec):
        asked.append((spec.index, spec.name, spec.shape, spec.group, spec.is_cut, spec.cost))
        return 1

    one, other = make_params(2)
    groups = [{"params": [one], "param_names": ["w"]}, {"params": [other]}]
    read_specs(groups, ["element", "parameter"], cost)
    assert asked == [(0, "w", (2, 1), 0, True, None), (1, None, (2, 2), 1, False, None)]


@pytest.mark.parametrize("cost", [0, 3, 2.5, True], ids=str)
def test_a_cost_is_a_float_from_0_on(cost):
    [spec] = read_specs([{"params": make_params(1)}], None, lambda spec: cost)
    assert (spec.cost, type(spec.cost), spec.load) == (float(cost), float, float(cost))


@pytest.mark.parametrize(
    "cost", [-1, float("nan"), float("inf"), None, "3", torch.tensor(3.0)], ids=str
)
def test_a_cost_that_is_no_finite_number_from_0_on_is_refused_with_its_parameter(cost):
    groups = [{"params": make_params(2), "param_names": ["w", "b"]}]
    with pytest.raises(ValueError, match="cost") as caught:
        read_specs(groups, None, lambda spec: cost if spec.index else 1.0)
    assert str(caught.value) == (
        f"param 1 'b': cost() returned {cost!r}, expected a finite number from 0 on"
    )
