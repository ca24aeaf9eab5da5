"""The state that users see where the local optimizer updates something else than parameters."""

import pytest
import torch

from shardopt.checkpoint import ShardedState, StateOfParams
from shardopt.collectives import LoneRank
from shardopt.errors import NotConsolidatedError
from shardopt.frameworks.torch import TORCH
from tests.sharding import admitted, in_memory_order, make_groups, make_odd_groups


class Rank:
    """Shards whose Adam has taken a step."""

    def __init__(self, group, groups, **options):
        self.group = group
        self.groups = groups
        self.shards = admitted(group, groups, **options)
        self.local = torch.optim.Adam(self.shards.local_groups(groups), lr=0.1)

    def step(self, *, without=()):
        for index, tensor in self.shards.tensors.items():
            if index not in without:
                values = torch.arange(float(tensor.numel())) + 1
                tensor.grad = values.view(tensor.shape)
        self.local.step()
        return self

    @property
    def state(self):
        return StateOfParams(self.shards, self.local)

    @property
    def sharded(self):
        return ShardedState(
            self.group,
            TORCH,
            self.shards,
            self.local,
            chunk_nbytes=64,
            make_optimizer=torch.optim.Adam,
        )


def by_element(group, groups=None):
    options = {"has_views": True, "granularity": "element"}
    return Rank(group, make_odd_groups() if groups is None else groups, **options)


# --- StateOfParams --------------------------------------------------------------------------------


def test_state_is_found_under_the_parameters_that_this_rank_owns_something_of(run_threads):
    def serve(group):
        rank = by_element(group).step()
        index_of = {id(param): index for index, param in enumerate(rank.shards.params)}
        owned = [part.param for part in rank.shards.parts]
        return [index_of[id(param)] for param in rank.state] == owned

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [True, True])


def test_there_are_as_many_entries_as_keys():
    rank = by_element(LoneRank()).step()
    assert len(rank.state) == len(list(rank.state)) == 5


def test_before_the_first_step_there_is_no_state():
    rank = by_element(LoneRank())
    assert (len(rank.state), dict(rank.state)) == (0, {})


def test_a_parameter_without_state_is_no_key():
    rank = by_element(LoneRank(), make_groups(4, 9)).step(without=[0])
    assert [param.numel() for param in rank.state] == [9]


def test_a_parameter_that_is_no_key_is_not_in_it():
    """As in the state of the unsharded optimizer, of which one asks ``if param in optimizer.state``."""
    rank = by_element(LoneRank(), make_groups(4, 9)).step(without=[0])
    foreign = torch.nn.Parameter(torch.ones(1))
    asked = [*rank.shards.params, foreign]
    assert [param in rank.state for param in asked] == [False, True, False]


def test_the_state_of_what_this_rank_does_not_own_is_empty(run_threads):
    def serve(group):
        rank = by_element(group, make_groups(4)).step()
        return dict(rank.state[rank.shards.params[0]]) == {}

    assert run_threads(2, serve).results == [False, True]


def test_the_state_of_a_part_is_flat_and_as_long_as_the_part(run_threads):
    def serve(group):
        rank = by_element(group, make_groups(40)).step()
        [part] = rank.shards.parts
        moment = rank.state[rank.shards.params[0]]["exp_avg"]
        return part.numel, tuple(moment.shape)

    assert run_threads(2, serve).results == [(32, (32,)), (8, (8,))]


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_the_state_of_all_of_a_parameter_has_its_shape_and_lies_as_it_does(index):
    rank = by_element(LoneRank()).step()
    param = rank.shards.params[index]
    moment = rank.state[param]["exp_avg"]
    flat = rank.local.state[rank.shards.tensors[index]]["exp_avg"]
    assert (moment.shape, moment.stride()) == (param.shape, param.stride())
    assert in_memory_order(moment).tolist() == flat.tolist()


def test_state_is_live_and_may_be_changed_in_place():
    rank = by_element(LoneRank()).step()
    rank.state[rank.shards.params[4]]["exp_avg"].fill_(7.0)
    assert set(rank.local.state[rank.shards.tensors[4]]["exp_avg"].tolist()) == {7.0}


def test_a_step_count_stays_without_dimensions():
    rank = by_element(LoneRank()).step()
    assert rank.state[rank.shards.params[4]]["step"].shape == ()


def test_state_of_a_parameter_cannot_be_replaced():
    rank = by_element(LoneRank()).step()
    entry = rank.state[rank.shards.params[4]]
    with pytest.raises(TypeError, match="does not support item assignment"):
        entry["exp_avg"] = torch.ones(40)


def test_state_of_all_parameters_can_only_be_read():
    state = by_element(LoneRank()).step().state
    assert [name for name in ("__setitem__", "__delitem__", "pop") if hasattr(state, name)] == []


def test_state_of_master_weights_is_found_under_their_parameters():
    groups = [{"params": [torch.nn.Parameter(torch.ones(2, 3).bfloat16())]}]
    rank = Rank(LoneRank(), groups, master_dtype=torch.float32).step()
    moment = rank.state[rank.shards.params[0]]["exp_avg"]
    assert (tuple(moment.shape), moment.dtype) == ((2, 3), torch.float32)


# --- ShardedState ---------------------------------------------------------------------------------


def test_state_of_whole_parameters_is_that_of_the_local_optimizer():
    rank = Rank(LoneRank(), make_groups(4, 9))
    assert rank.sharded.live is rank.local.state


@pytest.mark.parametrize(
    "options",
    [{"has_views": True, "granularity": "element"}, {"master_dtype": torch.float64}],
    ids=["element", "masters"],
)
def test_state_of_anything_else_is_told_in_terms_of_parameters(options):
    assert type(Rank(LoneRank(), make_groups(4, 9), **options).sharded.live) is StateOfParams


def test_without_a_collected_state_there_is_none_to_show():
    with pytest.raises(NotConsolidatedError) as caught:
        Rank(LoneRank(), make_groups(4)).sharded.snapshot()
    assert str(caught.value) == (
        "rank 0 holds no consolidated state; call consolidate_state_dict(to=rank) on all ranks first, then "
        "state_dict() on that rank"
    )


@pytest.mark.parametrize("to", [0, 1])
def test_only_the_receiving_rank_has_a_state_to_show(run_threads, to):
    def serve(group):
        rank = Rank(group, make_groups(4, 9)).step()
        state = rank.sharded
        state.consolidate(rank.groups, to=to)
        return sorted(state.snapshot()["state"])

    run = run_threads(2, serve)
    assert run.results[to] == [0, 1]
    assert run.texts[1 - to].startswith(f"NotConsolidatedError: rank {1 - to} holds no")


def test_what_is_shown_can_be_changed_without_changing_what_was_collected():
    rank = Rank(LoneRank(), make_groups(4)).step()
    state = rank.sharded
    state.consolidate(rank.groups, to=0)
    state.snapshot()["state"].clear()
    assert list(state.snapshot()["state"]) == [0]


def test_loading_drops_what_was_collected():
    rank = Rank(LoneRank(), make_groups(4)).step()
    state = rank.sharded
    state.consolidate(rank.groups, to=0)
    state.load(state.snapshot(), rank.groups, strict=False)
    with pytest.raises(NotConsolidatedError):
        state.snapshot()


@pytest.mark.parametrize("granularity", ["parameter", "element"])
def test_master_weights_are_collected_and_loaded(run_threads, granularity):
    def make(group):
        params = [torch.nn.Parameter(torch.ones(n).bfloat16()) for n in (40, 9)]
        return Rank(
            group,
            [{"params": params, "lr": 0.1}],
            has_views=True,
            granularity=granularity,
            master_dtype=torch.float32,
        )

    def serve(group):
        rank = make(group).step()
        masters = {i: m.detach().clone() for i, m in rank.shards.masters().items()}
        state = rank.sharded
        state.consolidate(rank.groups, to=0)
        full = group.all_gather_object(state.snapshot() if group.rank == 0 else None)[0]
        other = make(group)
        other.sharded.load(full, other.groups, strict=False)
        found = other.shards.masters()
        return all(torch.equal(found[i].detach(), m) for i, m in masters.items())

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [True, True])
