"""State of parts of parameters: cut out of a full state dict, and put together again."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.arguments import read_specs
from shardopt.checkpoint import (
    StateAccess,
    collect_full,
    load_full,
    local_part,
    renumber,
    require_target,
)
from shardopt.checkpoint.state_dict import assemble, in_memory_order, shaped_like
from shardopt.frameworks.torch import empty_on_cpu
from shardopt.partition import Part, parts_of, plan_element_layout

KINDS = {
    "flat": lambda: torch.zeros(11),
    "matrix": lambda: torch.zeros(3, 5),
    "one element": lambda: torch.zeros(1),
    "one by one": lambda: torch.zeros(1, 1),
    "0-dim": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 3),
    "transposed": lambda: torch.zeros(4, 6).t(),
    "channels_last": lambda: torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "gappy": lambda: torch.zeros(3, 8)[:, ::2],
    "bfloat16": lambda: torch.zeros(9, dtype=torch.bfloat16),
}


def specs_of(kinds):
    return read_specs([{"params": [KINDS[kind]() for kind in kinds]}])


def parts_by_rank(specs, world_size, *, alignment_nbytes=1, bucket_nbytes=2**20):
    layout = plan_element_layout(
        specs,
        world_size=world_size,
        bucket_nbytes=bucket_nbytes,
        alignment_nbytes=alignment_nbytes,
    )
    owners = [0] * len(specs)
    return [parts_of(specs, owners, layout.buckets, rank) for rank in range(world_size)]


def moment_like(param, *, seed):
    """Random state that lies in memory as the state of optimizers does: strides are kept where they are dense."""
    values = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
    return torch.zeros_like(param).copy_(values)


def state_of(kinds):
    """The state of an optimizer over some parameters after some steps."""
    return {
        index: {
            "step": torch.tensor(float(index)),
            "exp_avg": moment_like(KINDS[kind](), seed=index),
            "momentum_buffer": None,
            "count": index,
        }
        for index, kind in enumerate(kinds)
    }


def full_of(kinds):
    return {
        "state": state_of(kinds),
        "param_groups": [{"lr": 0.1, "params": list(range(len(kinds)))}],
    }


def cut(full, parts, specs):
    """What a rank loads, keyed by its parts."""
    return renumber(local_part(full, parts, specs, torch.is_tensor), parts)


def assert_equal(actual, expected):
    """Equal bit by bit, in values, strides, types and the order of keys."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_stride=True)
    assert repr(actual) == repr(expected)


def in_order(state):
    return {key: state[key] for key in sorted(state)}


# --- the round trip -------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=7),
    st.integers(1, 5),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([1, 80, 2**20]),
)
def test_state_cut_over_ranks_and_put_together_is_the_state(
    kinds, world_size, alignment_nbytes, bucket_nbytes
):
    specs = specs_of(kinds)
    by_rank = parts_by_rank(
        specs, world_size, alignment_nbytes=alignment_nbytes, bucket_nbytes=bucket_nbytes
    )
    union = {}
    for parts in by_rank:
        union.update(cut(full_of(kinds), parts, specs))
    assert_equal(in_order(assemble(union, specs, empty_on_cpu)), state_of(kinds))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_parts_can_come_in_any_order(first):
    kinds = list(KINDS)
    specs = specs_of(kinds)
    by_rank = parts_by_rank(specs, 3)
    union = {}
    for parts in by_rank[first:] + by_rank[:first]:
        union.update(cut(full_of(kinds), parts, specs))
    assert_equal(in_order(assemble(union, specs, empty_on_cpu)), state_of(kinds))


# --- cutting --------------------------------------------------------------------------------------


def test_a_part_of_a_moment_is_flat_and_in_memory_order():
    specs = specs_of(["transposed"])
    full = full_of(["transposed"])
    moment = full["state"][0]["exp_avg"]
    moment.copy_(torch.arange(24.0).view(6, 4))
    [state] = cut(full, [Part(0, 3, 4, False)], specs).values()
    assert state["exp_avg"].tolist() == [12.0, 16.0, 20.0, 1.0]


def test_a_moment_of_other_strides_is_cut_as_its_parameter_lies():
    specs = specs_of(["transposed"])
    full = full_of(["transposed"])
    full["state"][0]["exp_avg"] = torch.arange(24.0).view(6, 4)
    [state] = cut(full, [Part(0, 3, 4, False)], specs).values()
    assert state["exp_avg"].tolist() == [12.0, 16.0, 20.0, 1.0]


def test_a_part_of_a_parameter_with_gaps_is_in_logical_order():
    specs = specs_of(["gappy"])
    full = full_of(["gappy"])
    full["state"][0]["exp_avg"] = torch.arange(12.0).view(3, 4)
    [state] = cut(full, [Part(0, 3, 4, False)], specs).values()
    assert state["exp_avg"].tolist() == [3.0, 4.0, 5.0, 6.0]


def test_the_moment_of_a_0_dim_parameter_is_flat_and_its_step_count_is_not():
    specs = specs_of(["0-dim"])
    [state] = cut(full_of(["0-dim"]), [Part(0, 0, 1, False)], specs).values()
    assert (state["exp_avg"].shape, state["step"].shape) == ((1,), ())


def test_values_that_are_no_tensors_are_in_every_part():
    specs = specs_of(["flat"])
    for parts in parts_by_rank(specs, 3):
        [state] = cut(full_of(["flat"]), parts, specs).values()
        assert (state["momentum_buffer"], state["count"]) == (None, 0)


def test_tensors_of_another_shape_are_whole_in_every_part():
    specs = specs_of(["matrix"])
    full = full_of(["matrix"])
    full["state"][0]["row"] = torch.arange(3.0)
    [state] = cut(full, [Part(0, 4, 2, False)], specs).values()
    assert state["row"].tolist() == [0.0, 1.0, 2.0]


def test_a_placeholder_without_dimensions_stays_one():
    specs = specs_of(["matrix"])
    full = full_of(["matrix"])
    full["state"][0]["exp_avg"] = torch.tensor(0.0)
    [state] = cut(full, [Part(0, 4, 2, False)], specs).values()
    assert state["exp_avg"].shape == ()


def test_a_whole_part_is_loaded_as_it_is():
    specs = specs_of(["channels_last"])
    full = full_of(["channels_last"])
    [state] = cut(full, [Part(0, 0, 24, True)], specs).values()
    assert_equal(state, full["state"][0])


def test_cutting_leaves_the_full_state_dict_alone_and_keeps_no_memory_of_it():
    specs = specs_of(list(KINDS))
    full, kept = full_of(list(KINDS)), full_of(list(KINDS))
    for parts in parts_by_rank(specs, 2):
        for entry in cut(full, parts, specs).values():
            entry["exp_avg"].zero_()
            entry["step"].zero_()
    assert_equal(full, kept)


@given(st.lists(st.sampled_from(list(KINDS)), max_size=6), st.integers(1, 4))
def test_local_parts_are_numbered_in_the_order_of_the_parts(kinds, world_size):
    specs = specs_of(kinds)
    for parts in parts_by_rank(specs, world_size):
        local = local_part(full_of(kinds), parts, specs, torch.is_tensor)
        assert local["param_groups"][0]["params"] == list(range(len(parts)))
        assert {n: parts[n].param for n in local["state"]} == {
            n: entry["count"] for n, entry in local["state"].items()
        }


# --- assemble -------------------------------------------------------------------------------------


def test_assembling_takes_the_state_of_the_parts_apart():
    specs = specs_of(["flat"])
    [parts] = parts_by_rank(specs, 1)
    state = cut(full_of(["flat"]), parts, specs)
    [entry] = state.values()
    assemble(state, specs, empty_on_cpu)
    assert (state, entry) == ({}, {})


def test_state_of_whole_parts_stays_the_same_object():
    entry = {"exp_avg": torch.ones(3)}
    assert assemble({Part(4, 0, 3, True): entry}, [], empty_on_cpu)[4] is entry


def test_state_that_belongs_to_no_parameter_keeps_its_key():
    assert assemble({"counter": 7}, [], empty_on_cpu) == {"counter": 7}


def test_an_assembled_moment_has_memory_of_its_own():
    specs = specs_of(["flat"])
    values = torch.ones(11)
    whole = assemble({Part(0, 0, 11, False): {"exp_avg": values}}, specs, empty_on_cpu)
    values.zero_()
    assert whole[0]["exp_avg"].tolist() == [1.0] * 11


def test_an_assembled_moment_keeps_its_dtype():
    specs = specs_of(["flat"])
    state = {Part(0, 0, 11, False): {"exp_avg": torch.ones(11, dtype=torch.bfloat16)}}
    assert assemble(state, specs, empty_on_cpu)[0]["exp_avg"].dtype == torch.bfloat16


def test_a_value_of_another_shape_than_the_part_is_taken_from_any_part():
    specs = specs_of(["flat"])
    state = {
        Part(0, 0, 6, False): {"step": torch.tensor(2.0), "row": torch.ones(4)},
        Part(0, 6, 5, False): {"step": torch.tensor(2.0), "row": torch.ones(4)},
    }
    whole = assemble(state, specs, empty_on_cpu)
    assert (whole[0]["step"].tolist(), whole[0]["row"].tolist()) == (2.0, [1.0] * 4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "gappy"])
def test_flat_elements_shaped_like_a_dense_parameter_lie_as_it_does(kind):
    param = KINDS[kind]()
    [spec] = read_specs([{"params": [param]}])
    shaped = shaped_like(torch.arange(float(param.numel())), spec)
    assert (shaped.shape, shaped.stride()) == (param.shape, param.stride())
    assert in_memory_order(shaped).tolist() == list(range(param.numel()))


# --- all ranks together ---------------------------------------------------------------------------


SHAPES = [(2, 3), (7,), (), (0,)]


def groups_of(params):
    return [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.5}]


def whole_params():
    return [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]


class Rank:
    """A rank whose Adam updates flat parts of parameters."""

    def __init__(self, group):
        self.group = group
        self.params = whole_params()
        self.param_groups = torch.optim.Adam(groups_of(self.params)).param_groups
        self.specs = read_specs(self.param_groups)
        self.parts = parts_by_rank(self.specs, group.world_size)[group.rank]
        tensors = {part.param: torch.nn.Parameter(torch.ones(part.numel)) for part in self.parts}
        self.optimizer = torch.optim.Adam(
            [
                {
                    **g,
                    "params": [
                        tensors[s.index] for s in self.specs if s.group == n and s.index in tensors
                    ],
                }
                for n, g in enumerate(self.param_groups)
            ]
        )

    @property
    def access(self):
        return StateAccess(
            self.group,
            self.optimizer,
            parts=self.parts,
            specs=self.specs,
            masters={},
            parts_of=lambda rank: [],
            chunk_nbytes=16,
            make_optimizer=torch.optim.Adam,
            make_param=torch.nn.Parameter,
            is_trained=lambda index: True,
            empty=empty_on_cpu,
            is_tensor=torch.is_tensor,
        )

    def load(self, full):
        load_full(self.access, full, self.param_groups)
        return self

    def collect(self, to):
        require_target(self.group, to)
        return collect_full(self.access, self.param_groups, to=to)


def unsharded_state_dict():
    params = whole_params()
    optimizer = torch.optim.Adam(groups_of(params))
    for step in range(2):
        for index, param in enumerate(params):
            param.grad = moment_like(param, seed=10 * step + index)
        optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_ranks_load_by_element_they_collect_as_the_unsharded_optimizer_has_it(
    run_threads, world_size
):
    full = unsharded_state_dict()
    kept = copy.deepcopy(full)
    run = run_threads(world_size, lambda group: Rank(group).load(full).collect(1))
    assert run.texts == [""] * world_size
    assert_equal(run.results[1], kept)
    assert_equal(full, kept)


def test_parts_with_state_can_be_loaded_again(run_threads):
    full = unsharded_state_dict()
    run = run_threads(2, lambda group: Rank(group).load(full).load(full).collect(0))
    assert run.texts == ["", ""]
    assert_equal(run.results[0], full)


def test_a_shape_that_does_not_fit_stops_ranks_that_own_parts(run_threads):
    full = unsharded_state_dict()
    full["state"][1]["exp_avg"] = torch.zeros(5)
    run = run_threads(2, lambda group: Rank(group).load(full))
    text = (
        "StateMismatchError: param 1: state 'exp_avg' has shape (5,) in the state dict, expected (7,); it was saved "
        "for another model, or its parameters were in another order"
    )
    assert run.texts == [text] * 2
