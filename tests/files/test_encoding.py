import json
from collections import OrderedDict, defaultdict, deque
from enum import IntEnum
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.files import decode, encode


class Pair(NamedTuple):
    left: object
    right: object


class Color(IntEnum):
    RED = 1


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=4),
    st.sampled_from([float("inf"), float("-inf"), float("nan"), -0.0, complex(-0.0, -0.0), 2**80]),
)
keys = st.one_of(st.text(max_size=2), st.just("$"), st.integers(-2, 2))
hashable = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers())
odd_keys = st.one_of(keys, hashable, st.lists(hashable, max_size=2).map(tuple))


def containers(items):
    return st.one_of(
        st.lists(items, max_size=3),
        st.lists(items, max_size=3).map(tuple),
        st.lists(items, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=2), items, max_size=3),
        st.dictionaries(keys, items, max_size=3),
    )


values = st.recursive(scalars, containers, max_leaves=12)
tensors = st.integers(0, 9).map(lambda number: torch.tensor([number]))
states = st.recursive(st.one_of(scalars, tensors), containers, max_leaves=12)


def described(value):
    """A nested value with all types, the signs of zeros, the order of dicts, and tensors by identity."""
    if isinstance(value, dict):
        return [(described(key), described(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [type(value), *map(described, value)]
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, complex):
        return (complex, repr(value.real), repr(value.imag))
    return (type(value), repr(value))


def through_json(encoded):
    """What a reader finds; fails for what is no JSON, such as a bare NaN."""
    return json.loads(json.dumps(encoded, allow_nan=False))


def no_tensor(value, where):
    """Take nothing."""


class Kept:
    """Tensors that were taken, by their path."""

    def __init__(self):
        self.tensors = []
        self.names = []

    def take(self, value, where):
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        self.names.append(where)
        return where

    def get(self, name):
        return self.tensors[self.names.index(name)]


# --- round trip -----------------------------------------------------------------------------------


def round_trip(value):
    return decode(through_json(encode(value, "state", no_tensor)), None)


@given(values)
def test_plain_values_come_back_as_they_were(value):
    assert described(round_trip(value)) == described(value)


@given(st.dictionaries(odd_keys, scalars, max_size=4))
def test_keys_of_any_plain_kind_come_back_as_they_were(value):
    assert described(round_trip(value)) == described(value)


@given(states)
def test_tensors_come_back_where_they_were(state):
    kept = Kept()
    encoded = through_json(encode(state, "state", kept.take))
    assert described(decode(encoded, kept.get)) == described(state)


@pytest.mark.parametrize("value", [True, False, 0, 1, 0.0, -0.0, 1.0, "1", "", None])
def test_values_that_are_equal_to_each_other_keep_their_type(value):
    assert described(round_trip([value])) == described([value])


def test_a_dict_whose_key_is_the_tag_is_no_tagged_value():
    value = {"$": "tensor", "name": "state.0"}
    assert round_trip(value) == value


def test_a_deque_keeps_its_bound():
    assert round_trip(deque([1, 2], maxlen=2)).maxlen == 2


def test_a_dict_with_strings_as_keys_is_plain_json():
    value = {"lr": 0.1, "betas": [0.9, 0.999], "foreach": None, "nested": {"a": True}}
    assert encode(value, "state", no_tensor) == value


@pytest.mark.parametrize("kind", [OrderedDict, lambda items: defaultdict(int, items)])
def test_every_mapping_is_written_as_a_dict(kind):
    assert type(round_trip(kind({"b": 1, "a": 2}))) is dict
    assert list(round_trip(kind({"b": 1, "a": 2}))) == ["b", "a"]


@given(states)
def test_encoding_leaves_the_value_as_it_was(state):
    before = described(state)
    encode(state, "state", Kept().take)
    assert described(state) == before


# --- paths ----------------------------------------------------------------------------------------


def test_tensors_are_named_by_their_path():
    kept = Kept()
    one = torch.zeros(1)
    state = {"exp_avg": one, "list": [0, one, (one,)], "deque": deque([one]), 3: {"$": one}}
    encoded = encode(state, "state.7", kept.take)
    assert kept.names == [
        "state.7.exp_avg",
        "state.7.list[1]",
        "state.7.list[2][0]",
        "state.7.deque[0]",
        "state.7[3].$",
    ]
    assert through_json(encoded)["items"][0][1] == {"$": "tensor", "name": "state.7.exp_avg"}


@given(st.sampled_from(["state", "others.a"]))
def test_a_lone_tensor_is_named_as_the_value_is_called(where):
    kept = Kept()
    assert encode(torch.zeros(1), where, kept.take) == {"$": "tensor", "name": where}
    assert kept.names == [where]


@pytest.mark.parametrize(
    "make",
    [
        lambda one, other: {"a.b": one, "a": {"b": other}},
        lambda one, other: {0: one, "0": other},
        lambda one, other: {"a": {"0": one}, "a.0": other},
    ],
)
def test_tensors_in_different_places_have_different_names(make):
    kept = Kept()
    one, other = torch.zeros(1), torch.ones(1)
    encoded = encode(make(one, other), "state", kept.take)
    assert len(set(kept.names)) == 2
    assert described(decode(encoded, kept.get)) == described(make(one, other))


def test_every_value_is_offered_with_its_path():
    offered = []
    encode({"a": [1], "b": (None,)}, "x", lambda value, where: offered.append((where, value)))
    assert offered == [
        ("x", {"a": [1], "b": (None,)}),
        ("x.a", [1]),
        ("x.a[0]", 1),
        ("x.b", (None,)),
        ("x.b[0]", None),
    ]


def test_the_name_that_was_given_is_the_one_that_is_asked_for():
    one = torch.zeros(1)
    encoded = encode([one], "x", lambda value, _: "given" if value is one else None)
    assert decode(through_json(encoded), {"given": one}.__getitem__)[0] is one


# --- what cannot be written -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "where", "kind"),
    [
        (object(), "state", "object"),
        ({"a": {1, 2}}, "state.a", "set"),
        ([0, b"raw"], "state[1]", "bytes"),
        (({"lr": len},), "state[0].lr", "builtin_function_or_method"),
        ({3: deque([0, 1j, Color.RED])}, "state[3][2]", "Color"),
        ({"pair": Pair(1, 2)}, "state.pair", "Pair"),
        ({"dtype": torch.float32}, "state.dtype", "dtype"),
        ({"a": torch.Size([1])}, "state.a", "Size"),
    ],
)
def test_what_cannot_be_written_is_named_with_its_place(value, where, kind):
    with pytest.raises(TypeError) as raised:
        encode(value, "state", no_tensor)
    assert str(raised.value).startswith(f"{where}: {kind} cannot be written to a checkpoint")
    assert "torch.save()" in str(raised.value)


def test_a_tensor_cannot_be_a_key():
    with pytest.raises(TypeError, match=r"^state\.a: Tensor cannot be written"):
        encode({"a": {torch.zeros(1): 1}}, "state", Kept().take)


# --- what was not written by encode ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["set", "object", "", None, 3, ["tuple"], {"a": 1}])
def test_an_unknown_kind_of_value_is_named(kind):
    with pytest.raises(ValueError, match="unknown kind of value") as raised:
        decode([{"a": {"$": kind, "items": []}}], None)
    assert repr(kind) in str(raised.value)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "tensor"},
        {"$": "float", "value": "one"},
        {"$": "float", "value": None},
        {"$": "complex", "value": ["1", "2", "3"]},
        {"$": "deque", "items": 3},
        {"$": "dict", "items": [["key"]]},
        {"$": "dict", "items": [[[], "a list is no key"]]},
    ],
    ids=repr,
)
def test_a_value_that_encode_has_not_written_is_a_value_error(value):
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        decode(value, {}.__getitem__)
