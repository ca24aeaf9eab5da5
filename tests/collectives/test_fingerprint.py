import pytest
import torch

from shardopt.collectives import option_fingerprint, options_of


class Opaque:
    """Compares by identity, and its repr holds an address."""


# --- options_of -----------------------------------------------------------------------------------


def test_parameters_and_their_names_are_no_options():
    group = {"params": [1], "param_names": ["w"], "lr": 0.1, "betas": (0.9, 0.99)}
    assert options_of(group) == {"lr": 0.1, "betas": (0.9, 0.99)}


# --- option_fingerprint ---------------------------------------------------------------------------------


def texts(value):
    """What ranks compare of one option."""
    return [text for _, text in option_fingerprint([{"params": [], "x": value}])]


def test_facts_are_labelled_by_option_and_group():
    fingerprint = option_fingerprint([{"params": [1], "lr": 0.1}, {"params": [2], "lr": 0.2}])
    assert fingerprint == [("option 'lr' of group 0", "0.1"), ("option 'lr' of group 1", "0.2")]


def test_facts_of_a_group_are_in_the_order_of_their_names():
    fingerprint = option_fingerprint([{"b": 1, "params": [], "a": 2}])
    assert [label for label, _ in fingerprint] == ["option 'a' of group 0", "option 'b' of group 0"]


@pytest.mark.parametrize("value", [None, True, 3, 0.1, 1 + 2j, "adam"])
def test_plain_values_are_compared_by_value(value):
    assert texts(value) == [repr(value)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1e-300])
def test_unusual_numbers_are_compared_by_value(value):
    assert texts(value) == [repr(value)]


def test_an_int_differs_from_an_equal_bool():
    assert texts(1) != texts(True)


def test_tuples_and_lists_are_compared_by_their_items():
    assert texts((0.9, [0.99, None])) == texts([0.9, (0.99, None)]) != texts((0.9, [0.98, None]))


@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.5), torch.tensor([1, 2]), torch.tensor(True), torch.tensor(1.0).bfloat16()],
    ids=str,
)
def test_cpu_tensors_are_compared_by_value(value):
    assert texts(value) == [repr(value.tolist())]


def test_a_trained_tensor_is_compared_by_value():
    assert texts(torch.nn.Parameter(torch.tensor(0.5))) == ["0.5"]


def test_tensors_on_other_devices_are_not_read():
    assert texts(torch.tensor(0.5, device="meta")) == []


def test_large_tensors_are_not_compared():
    assert (texts(torch.zeros(16)), texts(torch.zeros(17))) == ([repr([0.0] * 16)], [])


@pytest.mark.parametrize("value", [Opaque(), {"a": 1}, len, {1, 2}], ids=lambda v: type(v).__name__)
def test_other_objects_are_not_compared(value):
    assert texts(value) == []


def test_other_objects_inside_a_tuple_are_left_out():
    assert texts((0.1, Opaque())) == ["['0.1']"]


def test_parameters_are_not_compared():
    assert option_fingerprint([{"params": [torch.ones(2)], "param_names": ["w"]}]) == []
