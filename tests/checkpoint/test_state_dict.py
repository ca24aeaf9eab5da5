import copy

import pytest
import torch

from shardopt.checkpoint import full_state_dict, renumber, whole_group
from shardopt.partition import Part

# --- renumber -------------------------------------------------------------------------------------


def local_state_dict(ids_by_group, state):
    return {"state": state, "param_groups": [{"lr": 0.1, "params": ids} for ids in ids_by_group]}


def whole(*indices):
    """Whole parameters as parts; their numel does not matter."""
    return [Part(index, 0, 1, True) for index in indices]


def test_renumber_keys_state_by_the_part_it_belongs_to():
    local = local_state_dict([[0], [1, 2]], {0: "a", 1: "b", 2: "c"})
    parts = [Part(3, 0, 6, True), Part(5, 4, 2, False), Part(8, 0, 3, False)]
    assert renumber(local, parts) == dict(zip(parts, "abc", strict=True))


def test_renumber_follows_the_order_of_the_groups_and_not_of_the_state():
    local = local_state_dict([[0, 1]], {1: "b", 0: "a"})
    [four, two] = whole(4, 2)
    assert renumber(local, [four, two]) == {four: "a", two: "b"}


def test_renumber_keeps_state_that_belongs_to_no_parameter():
    local = local_state_dict([[0]], {0: "a", "counter": 7})
    [six] = whole(6)
    assert renumber(local, [six]) == {six: "a", "counter": 7}


def test_renumber_leaves_out_parameters_without_state():
    [zero, nine] = whole(0, 9)
    assert renumber(local_state_dict([[0, 1]], {1: "b"}), [zero, nine]) == {nine: "b"}


def test_renumber_accepts_keys_that_are_no_numbers():
    [six] = whole(6)
    assert renumber(local_state_dict([["w"]], {"w": "a"}), [six]) == {six: "a"}


def test_renumber_of_a_rank_that_owns_nothing_is_empty():
    assert renumber(local_state_dict([[], []], {}), []) == {}


def test_renumber_needs_a_part_for_every_parameter():
    with pytest.raises(ValueError, match="zip"):
        renumber(local_state_dict([[0, 1]], {}), whole(0))


def test_renumber_leaves_the_local_state_dict_alone():
    local = local_state_dict([[0]], {0: "a"})
    kept = copy.deepcopy(local)
    renumber(local, whole(6))
    assert local == kept


# --- full_state_dict ------------------------------------------------------------------------------


def make_full(local=None, state=None, param_groups=None):
    groups = param_groups or [{"params": ["p", "q"], "lr": 0.1}, {"params": ["r"], "lr": 0.2}]
    return full_state_dict(local or {}, state or {}, groups, torch.is_tensor)


def test_params_are_numbered_through_the_groups():
    assert [group["params"] for group in make_full()["param_groups"]] == [[0, 1], [2]]


def test_options_of_the_whole_groups_are_kept():
    assert [group["lr"] for group in make_full()["param_groups"]] == [0.1, 0.2]


def test_state_stands_in_the_order_of_the_parameters():
    assert list(make_full(state={2: "c", 0: "a"})["state"].items()) == [(0, "a"), (2, "c")]


def test_state_that_belongs_to_no_parameter_stands_last():
    full = make_full(state={"counter": 7, 2: "c", 0: "a"})
    assert list(full["state"].items()) == [(0, "a"), (2, "c"), ("counter", 7)]


def test_further_entries_of_the_local_state_dict_are_kept():
    full = make_full(local={"state": "local", "param_groups": "local", "version": 3})
    assert full["version"] == 3


def test_state_and_groups_replace_the_local_ones():
    full = make_full(local={"state": "local", "param_groups": "local"}, state={0: "a"})
    assert (full["state"], len(full["param_groups"])) == ({0: "a"}, 2)


def test_tensors_among_the_options_are_copied():
    rate = torch.tensor(0.1)
    full = make_full(param_groups=[{"params": ["p"], "lr": rate}])
    rate.zero_()
    assert full["param_groups"][0]["lr"] == torch.tensor(0.1)


def test_param_names_are_kept():
    full = make_full(param_groups=[{"params": ["p"], "param_names": ["w"], "lr": 0.1}])
    assert full["param_groups"] == [{"param_names": ["w"], "lr": 0.1, "params": [0]}]


def test_the_whole_groups_are_left_alone():
    groups = [{"params": ["p"], "lr": 0.1}]
    make_full(param_groups=groups)
    assert groups == [{"params": ["p"], "lr": 0.1}]


def test_the_full_state_dict_is_that_of_the_unsharded_optimizer():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(2)) for _ in range(3)]
    optimizer = torch.optim.Adam([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}])
    for param in params:
        param.grad = torch.randn(2)
    optimizer.step()
    expected = optimizer.state_dict()
    full = make_full(expected, expected["state"], optimizer.param_groups)
    torch.testing.assert_close(full, expected, rtol=0, atol=0)
    assert repr(full) == repr(expected)


# --- whole_group ----------------------------------------------------------------------------------


def test_a_whole_group_takes_its_options_from_the_local_one():
    group = whole_group({"params": ["p"], "lr": 0.5}, {"params": ["p", "q"], "lr": 0.1}, {})
    assert group == {"params": ["p", "q"], "lr": 0.5}


def test_a_whole_group_keeps_the_list_of_its_parameters():
    params = ["p", "q"]
    assert whole_group({"params": []}, {"params": params}, {})["params"] is params


def test_a_whole_group_takes_names_from_the_loaded_one():
    local = {"params": ["p"], "param_names": ["w"]}
    current = {"params": ["p", "q"], "param_names": ["a", "b"]}
    assert whole_group(local, current, {"param_names": ["c", "d"]})["param_names"] == ["c", "d"]


def test_a_whole_group_keeps_its_names_where_none_are_loaded():
    current = {"params": ["p", "q"], "param_names": ["a", "b"]}
    assert whole_group({"params": ["p"]}, current, {})["param_names"] == ["a", "b"]


def test_a_whole_group_without_names_has_no_entry_for_them():
    assert "param_names" not in whole_group({"params": []}, {"params": []}, {})


def test_the_groups_given_to_whole_group_are_left_alone():
    local, current = {"params": ["p"], "lr": 0.5}, {"params": ["p", "q"], "lr": 0.1}
    whole_group(local, current, {"param_names": ["c", "d"]})
    assert (local, current) == ({"params": ["p"], "lr": 0.5}, {"params": ["p", "q"], "lr": 0.1})
