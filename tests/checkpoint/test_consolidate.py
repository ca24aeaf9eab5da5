from collections import OrderedDict

import pytest
import torch

from shardopt.checkpoint import consolidate, map_tensors
from shardopt.collectives import LoneRank
from shardopt.frameworks.torch import empty_on_cpu


def gather(states, *, to=0, chunk_nbytes=64):
    """A function that consolidates the state of each rank."""

    def run(group):
        return consolidate(
            group,
            states[group.rank],
            to=to,
            chunk_nbytes=chunk_nbytes,
            empty=empty_on_cpu,
            is_tensor=torch.is_tensor,
        )

    return run


def moment(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def adam_states():
    """The states of three ranks, the last of which owns nothing."""
    return [
        {
            0: {"step": torch.tensor(3.0), "exp_avg": moment(5, 7, seed=0)},
            3: {"step": torch.tensor(3.0), "exp_avg": moment(2, seed=1)},
        },
        {
            1: {"step": torch.tensor(3.0), "exp_avg": moment(41, seed=2)},
            2: {"step": torch.tensor(3.0), "exp_avg": moment(3, 3, seed=3)},
        },
        {},
    ]


KINDS = {
    "bfloat16": moment(5, seed=0, dtype=torch.bfloat16),
    "float16": moment(5, seed=0, dtype=torch.float16),
    "float64": moment(5, seed=0, dtype=torch.float64),
    "complex64": moment(5, seed=0, dtype=torch.complex64),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([2**60, -1]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "0-dim": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    "channels_last": moment(2, 3, 4, 5, seed=1).contiguous(memory_format=torch.channels_last),
    "transposed": moment(3, 4, seed=2).t(),
    "gappy": moment(3, 8, seed=3)[:, ::2],
    "expanded": torch.tensor([2.0]).expand(4),
    "offset": moment(30, seed=4)[7:],
    "trained": torch.nn.Parameter(moment(3, seed=5)),
}


def assert_equal(actual, expected):
    torch.testing.assert_close(actual, expected.detach(), rtol=0, atol=0, equal_nan=True)


def union(states):
    return {key: entry for state in states for key, entry in state.items()}


# --- the union ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [0, 1, 2])
def test_the_receiving_rank_holds_the_union_of_all_states(run_threads, to):
    states = adam_states()
    run = run_threads(3, gather(states, to=to))
    torch.testing.assert_close(run.results[to], union(states), rtol=0, atol=0)


@pytest.mark.parametrize("to", [0, 1, 2])
def test_the_other_ranks_get_none(run_threads, to):
    run = run_threads(3, gather(adam_states(), to=to))
    assert [result is None for result in run.results] == [rank != to for rank in range(3)]


def test_every_message_is_received(run_threads):
    run = run_threads(3, gather(adam_states(), to=1))
    assert (run.texts, run.num_left_over) == (["", "", ""], 0)


@pytest.mark.parametrize("chunk_nbytes", [1, 4, 28, 64, 2**20])
def test_the_union_does_not_depend_on_the_chunk_size(run_threads, chunk_nbytes):
    states = adam_states()
    run = run_threads(3, gather(states, chunk_nbytes=chunk_nbytes))
    torch.testing.assert_close(run.results[0], union(states), rtol=0, atol=0)


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_arrives_bit_by_bit(run_threads, kind, to):
    run = run_threads(2, gather([{0: {"sum": KINDS[kind]}}, {}], to=to, chunk_nbytes=16))
    assert_equal(run.results[to][0]["sum"], KINDS[kind])


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("kind", ["channels_last", "transposed", "offset", "0-dim"])
def test_a_dense_tensor_keeps_its_strides(run_threads, kind, to):
    run = run_threads(2, gather([{0: {"sum": KINDS[kind]}}, {}], to=to, chunk_nbytes=16))
    assert run.results[to][0]["sum"].stride() == KINDS[kind].stride()


@pytest.mark.parametrize("to", [0, 1])
@pytest.mark.parametrize("kind", ["gappy", "expanded"])
def test_a_tensor_with_gaps_becomes_contiguous(run_threads, kind, to):
    run = run_threads(2, gather([{0: {"sum": KINDS[kind]}}, {}], to=to, chunk_nbytes=16))
    assert run.results[to][0]["sum"].is_contiguous()


@pytest.mark.parametrize("to", [0, 1])
def test_all_kinds_travel_together(run_threads, to):
    run = run_threads(2, gather([{0: dict(KINDS)}, {}], to=to, chunk_nbytes=24))
    for kind, tensor in KINDS.items():
        assert_equal(run.results[to][0][kind], tensor)


@pytest.mark.parametrize("to", [0, 1])
def test_nested_state_keeps_its_form(run_threads, to):
    ones = torch.ones(2)
    state = {4: {"blocks": [(ones, {"a": ones}), None], "note": "x"}, "counter": OrderedDict(n=[1])}
    run = run_threads(2, gather([state, {}], to=to))
    in_words = [map_tensors(s, repr, torch.is_tensor) for s in (run.results[to], state)]
    assert repr(in_words[0]) == repr(in_words[1])


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [0, 1])
def test_no_tensor_of_the_result_is_memory_of_a_rank(run_threads, to):
    state = {0: {"sum": torch.ones(3)}}
    run = run_threads(2, gather([state, {}], to=to))
    state[0]["sum"].zero_()
    assert run.results[to][0]["sum"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("to", [0, 1])
def test_every_tensor_of_the_result_has_memory_of_its_own(run_threads, to):
    states = [{0: {"a": torch.ones(3), "b": torch.ones(3)}}, {}]
    run = run_threads(2, gather(states, to=to))
    entry = run.results[to][0]
    entry["a"].zero_()
    assert entry["b"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("to", [0, 1])
def test_every_tensor_of_the_result_is_on_the_cpu_and_untrained(run_threads, to):
    run = run_threads(2, gather([{0: dict(KINDS)}, {}], to=to))
    kinds = {(t.device.type, t.requires_grad) for t in run.results[to][0].values()}
    assert kinds == {("cpu", False)}


def test_the_states_of_the_ranks_are_left_alone(run_threads):
    states = adam_states()
    before = repr(states)
    run_threads(3, gather(states))
    assert repr(states) == before


def test_memory_of_the_result_is_asked_for_on_the_cpu_only_through_empty(run_threads):
    asked = []

    def run(group):
        return consolidate(
            group,
            {group.rank: {"sum": torch.ones(3)}},
            to=0,
            chunk_nbytes=64,
            empty=lambda numel, dtype: asked.append((numel, dtype)) or empty_on_cpu(numel, dtype),
            is_tensor=torch.is_tensor,
        )

    run_threads(2, run)
    assert asked == [(3, "torch.float32")] * 2


# --- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_nbytes", [4, 28, 64, 2**20])
def test_no_message_is_above_the_chunk_size(run_threads, chunk_nbytes):
    run = run_threads(3, gather(adam_states(), chunk_nbytes=chunk_nbytes))
    assert max(message.nbytes for message in run.world.messages) <= chunk_nbytes


def test_a_chunk_below_one_element_holds_one_element(run_threads):
    run = run_threads(2, gather([{}, {0: {"sum": torch.ones(3)}}], chunk_nbytes=1))
    assert [message.numel for message in run.world.messages] == [1, 1, 1]


def test_every_byte_travels_once_and_only_to_the_receiving_rank(run_threads):
    states = adam_states()
    run = run_threads(3, gather(states, to=0))
    assert {(message.src, message.dst) for message in run.world.messages} == {(1, 0)}
    assert sum(message.numel for message in run.world.messages) == 1 + 41 + 1 + 9


def test_small_tensors_of_a_dtype_travel_together(run_threads):
    state = {i: {"step": torch.tensor(1.0), "sum": torch.ones(2)} for i in range(5)}
    run = run_threads(2, gather([{}, state], chunk_nbytes=120))
    assert [message.nbytes for message in run.world.messages] == [60]


def test_two_messages_in_flight_hold_the_bound_together(run_threads):
    state = {0: {"sum": torch.ones(15)}}
    run = run_threads(2, gather([{}, state], chunk_nbytes=40))
    assert [message.nbytes for message in run.world.messages] == [20, 20, 20]


def test_each_dtype_travels_by_itself(run_threads):
    state = {0: {"a": torch.ones(2), "b": torch.ones(3).bool(), "c": torch.ones(4)}}
    run = run_threads(2, gather([{}, state], chunk_nbytes=2**20))
    assert [(message.numel, message.nbytes) for message in run.world.messages] == [(6, 24), (3, 3)]


def test_one_object_is_gathered_and_it_holds_no_tensor(run_threads):
    run = run_threads(3, gather(adam_states()))
    gathered = []
    map_tensors(run.world.gathered_values, gathered.append, torch.is_tensor)
    assert gathered == []
    assert run.world.num_gathers_by_rank == [{"ints": 0, "object": 1}] * 3


# --- one rank -------------------------------------------------------------------------------------


def test_a_lone_rank_gets_a_copy_of_its_own_state():
    state = {0: dict(KINDS)}
    result = gather([state])(LoneRank())
    for kind, tensor in KINDS.items():
        assert_equal(result[0][kind], tensor)


def test_a_lone_rank_without_state_gets_an_empty_one():
    assert gather([{}])(LoneRank()) == {}
