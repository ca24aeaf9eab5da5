import pickle
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.checkpoint.structure import (
    TensorSlot,
    flatten,
    map_tensors,
    put_tensors,
    slots_of,
    take_tensors,
)


class Pair(NamedTuple):
    left: object
    right: object


TENSORS = {
    "contiguous": torch.arange(6.0).view(2, 3),
    "0-dim": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "channels_last": torch.arange(24.0)
    .view(1, 2, 3, 4)
    .contiguous(memory_format=torch.channels_last),
    "gappy": torch.arange(12.0).view(2, 6)[:, ::2],
    "expanded": torch.tensor([2.0]).expand(4),
    "offset": torch.arange(10.0)[4:],
    "bfloat16": torch.arange(3).bfloat16(),
    "bool": torch.tensor([True, False]),
    "complex64": torch.tensor([1 + 2j]),
    "trained": torch.nn.Parameter(torch.arange(3.0)),
}

tensors = st.integers(-3, 3).map(lambda number: torch.tensor([float(number)]))
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))


def containers(items):
    return st.one_of(
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), items, max_size=3),
        st.dictionaries(st.integers(), items, max_size=3).map(OrderedDict),
        st.tuples(items, items).map(lambda pair: Pair(*pair)),
    )


states = st.recursive(st.one_of(plain, tensors), containers, max_leaves=12)


def described(value):
    """A nested value with its types, and tensors as numbers."""
    return map_tensors(value, lambda tensor: ("tensor", tensor.tolist()), torch.is_tensor)


# --- map_tensors ----------------------------------------------------------------------------------


@given(states)
def test_the_identity_maps_to_an_equal_state_of_equal_types(state):
    mapped = map_tensors(state, lambda tensor: tensor, torch.is_tensor)
    assert repr(described(mapped)) == repr(described(state))


@pytest.mark.parametrize("container", [[1], (1,), {"a": 1}, OrderedDict(a=1), Pair(1, 2)])
def test_containers_keep_their_type(container):
    assert type(map_tensors(container, lambda tensor: tensor, torch.is_tensor)) is type(container)


@pytest.mark.parametrize("container", [[[1]], {"a": {"b": 1}}, ([1],)])
def test_containers_are_new_objects(container):
    mapped = map_tensors(container, lambda tensor: tensor, torch.is_tensor)
    key = next(iter(container)) if isinstance(container, dict) else 0
    assert (mapped is container, mapped[key] is container[key]) == (False, False)


@pytest.mark.parametrize("container", [deque([1, 2], maxlen=3), defaultdict(list, a=1)])
def test_containers_keep_what_they_hold_besides_their_items(container):
    mapped = map_tensors(container, lambda number: 10 * number, lambda value: type(value) is int)
    assert (type(mapped), mapped is container) == (type(container), False)
    if isinstance(container, deque):
        assert (mapped, mapped.maxlen, list(container)) == (deque([10, 20]), 3, [1, 2])
    else:
        assert (dict(mapped), mapped.default_factory, container) == ({"a": 10}, list, {"a": 1})


class Labelled(dict):
    """A dict that cannot be made from its items alone."""

    def __init__(self, label):
        super().__init__()
        self.label = label


def test_a_dict_that_is_made_in_another_way_is_copied():
    container = Labelled("history")
    container["a"] = 1
    mapped = map_tensors(container, lambda number: 10 * number, lambda value: type(value) is int)
    assert (type(mapped), mapped.label, mapped["a"], container["a"]) == (Labelled, "history", 10, 1)


def test_what_is_no_tensor_is_the_same_object():
    value = object()
    assert map_tensors({"a": [value]}, lambda tensor: None, torch.is_tensor)["a"][0] is value


def test_the_order_of_a_dict_is_kept():
    assert list(map_tensors({"b": 1, "a": 2}, lambda tensor: tensor, torch.is_tensor)) == ["b", "a"]


def test_leaves_are_visited_in_order():
    seen = []
    map_tensors({"b": [1, (2,)], "a": Pair(3, 4)}, seen.append, lambda value: type(value) is int)
    assert seen == [1, 2, 3, 4]


# --- take_tensors and put_tensors -----------------------------------------------------------------


@given(states)
def test_tensors_put_back_restore_the_state(state):
    structure, taken = take_tensors(state, torch.is_tensor)
    assert repr(described(put_tensors(structure, taken))) == repr(described(state))


@given(states)
def test_a_skeleton_holds_no_tensor(state):
    found = []
    map_tensors(take_tensors(state, torch.is_tensor)[0], found.append, torch.is_tensor)
    assert found == []


@given(states)
def test_slots_are_numbered_as_their_tensors_are_listed(state):
    structure, taken = take_tensors(state, torch.is_tensor)
    assert [slot.number for slot in slots_of(structure)] == list(range(len(taken)))


@given(states)
def test_a_skeleton_survives_pickling(state):
    structure, _ = take_tensors(state, torch.is_tensor)
    assert slots_of(pickle.loads(pickle.dumps(structure))) == slots_of(structure)


def test_taking_leaves_the_state_alone():
    tensor = torch.ones(2)
    state = {0: {"exp_avg": tensor}}
    take_tensors(state, torch.is_tensor)
    assert state[0]["exp_avg"] is tensor


def test_the_tensors_taken_are_those_of_the_state():
    tensor = torch.ones(2)
    _, taken = take_tensors({0: {"exp_avg": tensor}}, torch.is_tensor)
    assert taken[0] is tensor


def test_a_slot_states_shape_strides_and_dtype():
    structure, _ = take_tensors([torch.zeros(2, 3, dtype=torch.bfloat16).t()], torch.is_tensor)
    assert structure == [TensorSlot(0, (3, 2), (1, 3), "torch.bfloat16")]


def test_a_slot_states_no_strides_for_a_tensor_with_gaps():
    structure, _ = take_tensors(TENSORS["gappy"], torch.is_tensor)
    assert structure.stride is None


# --- flatten and shape_flat -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", TENSORS)
def test_a_flattened_tensor_shaped_again_has_its_values(kind):
    tensor = TENSORS[kind]
    slot, _ = take_tensors(tensor, torch.is_tensor)
    assert torch.equal(slot.shape_flat(flatten(tensor)), tensor)


@pytest.mark.parametrize("kind", TENSORS)
def test_a_flattened_tensor_is_one_contiguous_dimension(kind):
    flat = flatten(TENSORS[kind])
    assert (flat.shape, flat.is_contiguous()) == ((TENSORS[kind].numel(),), True)


@pytest.mark.parametrize("kind", ["contiguous", "0-dim", "transposed", "channels_last", "offset"])
def test_a_dense_tensor_is_flattened_without_a_copy(kind):
    assert flatten(TENSORS[kind]).data_ptr() == TENSORS[kind].data_ptr()


@pytest.mark.parametrize("kind", ["contiguous", "0-dim", "transposed", "channels_last", "offset"])
def test_a_dense_tensor_shaped_again_has_its_strides(kind):
    slot, _ = take_tensors(TENSORS[kind], torch.is_tensor)
    assert slot.shape_flat(flatten(TENSORS[kind])).stride() == TENSORS[kind].stride()


@pytest.mark.parametrize("kind", ["gappy", "expanded"])
def test_a_tensor_with_gaps_is_rebuilt_contiguous(kind):
    slot, _ = take_tensors(TENSORS[kind], torch.is_tensor)
    assert slot.shape_flat(flatten(TENSORS[kind])).is_contiguous()


def test_a_flattened_tensor_needs_no_gradient():
    assert not flatten(TENSORS["trained"]).requires_grad


def test_a_slot_shapes_a_part_of_a_larger_memory():
    slot = TensorSlot(0, (2, 2), (1, 2), "torch.float32")
    assert slot.shape_flat(torch.arange(9.0)[3:7]).tolist() == [[3.0, 5.0], [4.0, 6.0]]
