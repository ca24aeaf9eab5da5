import copy
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.arguments import read_specs
from shardopt.checkpoint import local_part, state_fingerprint, validate
from shardopt.checkpoint.load import PARAM_SHAPED_KEYS
from shardopt.errors import StateMismatchError
from shardopt.partition import Part


@pytest.fixture
def specs():
    params = [torch.zeros(2, 3), torch.zeros(4), torch.zeros(())]
    return read_specs(
        [
            {"params": params[:2], "param_names": ["body.weight", "head.bias"]},
            {"params": params[2:]},
        ]
    )


@pytest.fixture
def full():
    """A state dict that fits ``specs``."""
    return {
        "state": {
            0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)},
            1: {"step": torch.tensor(3.0), "exp_avg": torch.ones(4)},
        },
        "param_groups": [
            {"lr": 0.1, "params": [0, 1], "param_names": ["body.weight", "head.bias"]},
            {"lr": 0.2, "params": [2]},
        ],
    }


# --- validate -------------------------------------------------------------------------------------


def test_a_state_dict_that_fits_passes(full, specs):
    validate(full, specs, [2, 1], {})


def test_a_state_dict_without_state_passes(full, specs):
    validate({**full, "state": {}}, specs, [2, 1], {})


def test_something_else_than_a_dict_is_a_type_error(specs):
    with pytest.raises(TypeError) as caught:
        validate([1], specs, [2, 1], {})
    assert str(caught.value) == (
        "state dict: expected a dict, got list; every rank needs the full state dict, "
        "e.g. from torch.load(path, mmap=True)"
    )


@pytest.mark.parametrize("key", ["state", "param_groups"])
def test_a_missing_entry_is_named_with_what_was_found(full, specs, key):
    del full[key]
    with pytest.raises(StateMismatchError) as caught:
        validate(full, specs, [2, 1], {})
    assert str(caught.value) == (
        f"state dict: no {key!r} in it, found {list(full)}; expected what state_dict() of this or of the "
        "unsharded optimizer returned, on every rank"
    )


@pytest.mark.parametrize("counts", [[1, 1], [2], [3], [2, 1, 0], [1, 2]])
def test_groups_of_other_lengths_are_named(full, specs, counts):
    with pytest.raises(StateMismatchError) as caught:
        validate(full, specs, counts, {})
    assert str(caught.value) == (
        f"state dict: its param groups hold [2, 1] parameters, but those of the optimizer hold {counts}"
    )


def test_state_of_another_shape_is_named_with_its_parameter(full, specs):
    full["state"][1]["exp_avg"] = torch.ones(5)
    with pytest.raises(StateMismatchError) as caught:
        validate(full, specs, [2, 1], {})
    assert str(caught.value) == (
        "param 1 'head.bias': state 'exp_avg' has shape (5,) in the state dict, expected (4,); it was saved for "
        "another model, or its parameters were in another order"
    )


def test_live_state_is_the_measure_where_there_is_some(full, specs):
    live = {0: {"exp_avg": torch.zeros(3, 2)}}
    with pytest.raises(StateMismatchError, match=re.escape("has shape (2, 3)")):
        validate(full, specs, [2, 1], live)


def test_live_state_of_any_name_is_compared(full, specs):
    full["state"][0]["row"] = torch.ones(2)
    with pytest.raises(StateMismatchError, match=re.escape("state 'row' has shape (2,)")):
        validate(full, specs, [2, 1], {0: {"row": torch.ones(3)}})


def test_state_of_an_unknown_name_may_have_any_shape(full, specs):
    full["state"][0]["row"] = torch.ones(2)
    validate(full, specs, [2, 1], {})


def test_a_placeholder_without_dimensions_stands_for_state_not_yet_made(full, specs):
    full["state"][0]["exp_avg"] = torch.tensor(0.0)
    validate(full, specs, [2, 1], {})


def test_a_number_may_stand_where_the_live_state_is_a_tensor(full, specs):
    full["state"][0]["step"] = 3
    validate(full, specs, [2, 1], {0: {"step": torch.tensor(1.0)}})


def test_state_is_compared_with_the_parameter_that_its_id_stands_for(full, specs):
    full["param_groups"][0]["params"] = [1, 0]
    with pytest.raises(StateMismatchError, match=r"^param 0 'body\.weight': state 'exp_avg'"):
        validate(full, specs, [2, 1], {})


def test_ids_of_a_state_dict_need_not_be_numbers(full, specs):
    full["param_groups"][0]["params"] = ["w", "b"]
    full["state"] = {"w": full["state"][0], "b": full["state"][1]}
    validate(full, specs, [2, 1], {})


def test_a_state_mismatch_is_a_value_error():
    assert issubclass(StateMismatchError, ValueError)


def test_validate_leaves_the_state_dict_alone(full, specs):
    before = repr(full)
    validate(full, specs, [2, 1], {})
    assert repr(full) == before


OPTIMIZERS = [
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize(
    ("kind", "options"), OPTIMIZERS, ids=lambda value: getattr(value, "__name__", "")
)
def test_the_known_keys_are_those_with_the_shape_of_the_parameter(kind, options):
    param = torch.nn.Parameter(torch.ones(2, 3))
    param.grad = torch.ones(2, 3)
    optimizer = kind([param], lr=0.1, **options)
    optimizer.step()
    state = {k: v for k, v in optimizer.state[param].items() if torch.is_tensor(v)}
    shaped = {key for key, value in state.items() if value.shape == param.shape}
    assert set(state) & PARAM_SHAPED_KEYS == shaped


# --- state_fingerprint ----------------------------------------------------------------------------------


def test_state_facts_name_keys_and_shapes_of_each_parameter(full, specs):
    assert state_fingerprint(full, specs) == [
        ("param 0 'body.weight'", "[('exp_avg', (2, 3)), ('step', ())]"),
        ("param 1 'head.bias'", "[('exp_avg', (4,)), ('step', ())]"),
        ("param 2", "[]"),
        ("option 'lr' of group 0", "0.1"),
        ("option 'lr' of group 1", "0.2"),
    ]


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "sum"])
def test_state_facts_hold_plain_options_by_value(full, specs, value):
    full["param_groups"][1]["x"] = value
    assert ("option 'x' of group 1", repr(value)) in state_fingerprint(full, specs)


def test_state_facts_hold_tuples_among_the_options(full, specs):
    full["param_groups"][1]["betas"] = (0.9, 0.99)
    assert "option 'betas' of group 1" in dict(state_fingerprint(full, specs))


def test_state_facts_do_not_depend_on_the_order_of_the_keys(full, specs):
    other = copy.deepcopy(full)
    other["state"][0] = dict(reversed(other["state"][0].items()))
    assert state_fingerprint(other, specs) == state_fingerprint(full, specs)


def test_state_facts_do_not_read_values(full, specs):
    other = copy.deepcopy(full)
    other["state"][0]["exp_avg"].zero_()
    assert state_fingerprint(other, specs) == state_fingerprint(full, specs)


# --- local_part -----------------------------------------------------------------------------------


def whole(*owned):
    """Whole parameters as parts; their numel does not matter."""
    return [Part(index, 0, 1, True) for index in owned]


def cut(full, owned):
    """What a rank loads that owns whole parameters."""
    return local_part(full, whole(*owned), [], torch.is_tensor)


def test_a_local_part_holds_the_state_of_the_owned_parameters_renumbered(full):
    part = cut(full, [1, 2])
    assert {k: v["exp_avg"].tolist() for k, v in part["state"].items()} == {0: [1.0] * 4}


def test_a_local_part_numbers_parameters_through_its_groups(full):
    assert [group["params"] for group in cut(full, [1, 2])["param_groups"]] == [[0], [1]]


def test_a_local_part_keeps_groups_without_parameters(full):
    part = cut(full, [0, 1])
    assert [(g["params"], g["lr"]) for g in part["param_groups"]] == [([0, 1], 0.1), ([], 0.2)]


def test_a_local_part_holds_the_names_of_the_owned_parameters(full):
    assert cut(full, [1, 2])["param_groups"][0]["param_names"] == ["head.bias"]


def test_a_local_part_invents_no_names(full):
    assert "param_names" not in cut(full, [1, 2])["param_groups"][1]


def test_state_that_belongs_to_no_parameter_belongs_to_every_rank(full):
    full["state"]["counter"] = 7
    assert [cut(full, owned)["state"]["counter"] for owned in ([0], [1, 2])] == [7, 7]


def test_further_entries_are_kept(full):
    full["version"] = 3
    assert cut(full, [0])["version"] == 3


def test_a_rank_that_owns_nothing_gets_empty_groups(full):
    part = cut(full, [])
    assert (part["state"], [g["params"] for g in part["param_groups"]]) == ({}, [[], []])


def test_state_of_a_parameter_is_found_by_the_id_that_stands_for_it(full):
    full["param_groups"][0]["params"] = [10, 11]
    full["state"] = {10: full["state"][0], 11: full["state"][1]}
    assert cut(full, [1])["state"][0]["exp_avg"].shape == (4,)


def test_the_callers_dict_is_left_alone(full):
    before = repr(full)
    cut(full, [1, 2])
    assert repr(full) == before


def test_tensors_of_the_state_are_copies(full):
    part = cut(full, [0])
    part["state"][0]["exp_avg"].zero_()
    assert full["state"][0]["exp_avg"].tolist() == [[1.0] * 3] * 2


def test_tensors_deep_in_the_state_are_copies(full):
    full["state"][0]["history"] = {"grads": [torch.ones(2)]}
    part = cut(full, [0])
    part["state"][0]["history"]["grads"][0].zero_()
    assert full["state"][0]["history"]["grads"][0].tolist() == [1.0, 1.0]


def test_entries_of_the_state_are_copies(full):
    part = cut(full, [0])
    part["state"][0]["new"] = 1
    part["param_groups"][0]["lr"] = 5.0
    assert ("new" in full["state"][0], full["param_groups"][0]["lr"]) == (False, 0.1)


def test_only_owned_tensors_are_read(full):
    class Untouchable:
        def detach(self):
            raise AssertionError("read")

    full["state"][1] = {"exp_avg": Untouchable()}

    def is_tensor(value):
        return torch.is_tensor(value) or isinstance(value, Untouchable)

    part = local_part(full, whole(0), [], is_tensor)
    assert list(part["state"]) == [0]


@st.composite
def ownerships(draw):
    """Lengths of groups, and an owner of each of their parameters."""
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    world_size = draw(st.integers(1, 4))
    owners = [draw(st.integers(0, world_size - 1)) for _ in range(sum(counts))]
    return counts, owners, world_size


def full_of(counts):
    """A state dict in which the state of each parameter is its index."""
    ids = iter(range(sum(counts)))
    groups = [{"number": n, "params": [next(ids) for _ in range(c)]} for n, c in enumerate(counts)]
    return {
        "state": {i: {"sum": torch.tensor(float(i))} for i in range(sum(counts))},
        "param_groups": groups,
    }


@given(ownerships())
def test_the_parts_of_all_ranks_hold_every_state_exactly_once(case):
    counts, owners, world_size = case
    found = []
    for rank in range(world_size):
        owned = [index for index, owner in enumerate(owners) if owner == rank]
        found += [v["sum"].item() for v in cut(full_of(counts), owned)["state"].values()]
    assert sorted(found) == list(range(len(owners)))


@given(ownerships())
def test_each_local_number_stands_for_the_state_of_the_owned_parameter(case):
    counts, owners, world_size = case
    for rank in range(world_size):
        owned = [index for index, owner in enumerate(owners) if owner == rank]
        state = cut(full_of(counts), owned)["state"]
        assert {number: owned[number] for number in state} == {
            number: entry["sum"].item() for number, entry in state.items()
        }


@given(ownerships())
def test_each_parameter_is_in_the_local_twin_of_its_group(case):
    counts, owners, world_size = case
    group_of = [number for number, count in enumerate(counts) for _ in range(count)]
    for rank in range(world_size):
        owned = [index for index, owner in enumerate(owners) if owner == rank]
        for group in cut(full_of(counts), owned)["param_groups"]:
            assert {group_of[owned[i]] for i in group["params"]} <= {group["number"]}


@given(ownerships())
def test_local_numbers_are_consecutive_through_the_groups(case):
    counts, owners, world_size = case
    for rank in range(world_size):
        owned = [index for index, owner in enumerate(owners) if owner == rank]
        groups = cut(full_of(counts), owned)["param_groups"]
        assert [i for group in groups for i in group["params"]] == list(range(len(owned)))
