"""Master weights in state dicts: an entry of each parameter's state that its optimizer never sees."""

import copy

import pytest
import torch

from shardopt.arguments import read_specs
from shardopt.checkpoint import StateAccess, collect_full, load_full
from shardopt.checkpoint.load import MASTER_KEY, take_masters
from shardopt.errors import StateMismatchError
from shardopt.frameworks.torch import empty_on_cpu
from shardopt.partition import Part, parts_of, plan_element_layout

SHAPES = [(2, 3), (4,), (3, 4)]
WHOLE_OWNERS = [1, 0, 1]


def make_params():
    params = [torch.nn.Parameter(torch.ones(shape).bfloat16()) for shape in SHAPES]
    params[2].data = torch.ones(4, 3).bfloat16().t()
    return params


def value_of(index):
    """The master weights of a parameter: a number per element, in logical order."""
    numel = torch.Size(SHAPES[index]).numel()
    return (torch.arange(float(numel)) + 100 * index).view(SHAPES[index])


class Foreign(torch.optim.SGD):
    """An optimizer that is none of the framework's."""


class Rank:
    """One rank's masters, whose optimizer updates them: whole, or flat parts."""

    def __init__(self, group, *, granularity="parameter", kind=torch.optim.Adam):
        self.group = group
        self.specs = read_specs([{"params": make_params()}], [granularity])
        if granularity == "element":
            layout = plan_element_layout(
                self.specs, world_size=group.world_size, bucket_nbytes=99, alignment_nbytes=1
            )
            self.parts = parts_of(self.specs, [0] * 3, layout.buckets, group.rank)
        else:
            owned = [i for i, o in enumerate(WHOLE_OWNERS) if o % group.world_size == group.rank]
            self.parts = [Part(i, 0, self.specs[i].numel, True) for i in owned]
        self.masters = {}
        for part in self.parts:
            shape = SHAPES[part.param] if part.is_whole else (part.numel,)
            self.masters[part.param] = torch.nn.Parameter(torch.zeros(shape))
        self.optimizer = kind(list(self.masters.values()) or [{"params": []}], lr=0.5)
        group_options = {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        self.param_groups = [{**group_options, "params": make_params()}]

    def fill(self):
        """Let masters be the values of their elements."""
        for part in self.parts:
            ordered = value_of(part.param)
            if self.specs[part.param].stride == (1, 3) and not part.is_whole:
                ordered = ordered.t()
            flat = ordered.flatten()[part.offset : part.offset + part.numel]
            with torch.no_grad():
                self.masters[part.param].copy_(flat.view(self.masters[part.param].shape))
        return self

    def step(self):
        for master in self.masters.values():
            master.grad = torch.ones_like(master)
        self.optimizer.step()
        return self

    @property
    def access(self):
        return StateAccess(
            self.group,
            self.optimizer,
            parts=self.parts,
            specs=self.specs,
            masters=self.masters,
            parts_of=lambda rank: [],
            chunk_nbytes=16,
            make_optimizer=torch.optim.Adam,
            make_param=torch.nn.Parameter,
            is_trained=lambda index: True,
            empty=empty_on_cpu,
            is_tensor=torch.is_tensor,
        )

    def collect(self):
        return collect_full(self.access, self.param_groups, to=0)

    def load(self, full):
        load_full(self.access, full, self.param_groups)
        return self


granularities = pytest.mark.parametrize("granularity", ["parameter", "element"])


@granularities
@pytest.mark.parametrize("world_size", [2, 3])
def test_collected_masters_have_the_shape_of_their_parameters(run_threads, granularity, world_size):
    run = run_threads(
        world_size, lambda group: Rank(group, granularity=granularity).fill().collect()
    )
    assert run.texts == [""] * world_size
    state = run.results[0]["state"]
    found = {index: entry[MASTER_KEY].tolist() for index, entry in state.items()}
    assert found == {index: value_of(index).tolist() for index in range(3)}


@granularities
def test_masters_are_collected_beside_the_state_of_the_optimizer(run_threads, granularity):
    run = run_threads(2, lambda group: Rank(group, granularity=granularity).step().collect())
    assert [set(entry) for entry in run.results[0]["state"].values()] == [
        {"step", "exp_avg", "exp_avg_sq", MASTER_KEY}
    ] * 3


def test_collecting_leaves_the_state_of_the_optimizer_without_masters(run_threads):
    def serve(group):
        rank = Rank(group).step()
        rank.collect()
        return [MASTER_KEY in entry for entry in rank.optimizer.state.values()]

    assert not any(any(result) for result in run_threads(2, serve).results)


@granularities
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_was_collected_can_be_loaded_on_any_number_of_ranks(
    run_threads, granularity, world_size
):
    full = run_threads(2, lambda group: Rank(group).fill().collect()).results[0]

    def serve(group):
        return Rank(group, granularity=granularity).load(full).collect()

    again = run_threads(world_size, serve).results[0]
    for index in range(3):
        assert torch.equal(again["state"][index][MASTER_KEY], value_of(index))


@granularities
def test_the_optimizer_never_sees_masters_that_are_loaded(run_threads, granularity):
    full = run_threads(2, lambda group: Rank(group).step().collect()).results[0]

    def serve(group):
        rank = Rank(group, granularity=granularity).load(full)
        return {key for entry in rank.optimizer.state.values() for key in entry}

    assert run_threads(2, serve).results == [{"step", "exp_avg", "exp_avg_sq"}] * 2


def test_a_state_of_masters_only_leaves_the_optimizer_without_state(run_threads):
    full = run_threads(2, lambda group: Rank(group).fill().collect()).results[0]
    run = run_threads(2, lambda group: len(Rank(group).load(full).optimizer.state))
    assert run.results == [0, 0]


def test_a_state_dict_without_masters_leaves_them_as_they_are(run_threads):
    full = run_threads(2, lambda group: Rank(group).step().collect()).results[0]
    for entry in full["state"].values():
        del entry[MASTER_KEY]

    def serve(group):
        rank = Rank(group).fill().load(full)
        return [torch.equal(m, value_of(index)) for index, m in rank.masters.items()]

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[True], [True, True]])


def test_loading_leaves_the_state_dict_alone(run_threads):
    full = run_threads(2, lambda group: Rank(group).fill().step().collect()).results[0]
    before = copy.deepcopy(full)
    run_threads(2, lambda group: Rank(group).load(full).step())
    assert repr(full) == repr(before)


@pytest.mark.parametrize("kind", [torch.optim.Adam, Foreign], ids=lambda kind: kind.__name__)
def test_masters_of_another_shape_stop_every_rank_with_nothing_loaded(run_threads, kind):
    full = run_threads(2, lambda group: Rank(group, kind=kind).fill().collect()).results[0]
    full["state"][1][MASTER_KEY] = torch.zeros(5)
    before = [None, None]

    def serve(group):
        rank = Rank(group, kind=kind)
        try:
            rank.load(full)
        finally:
            before[group.rank] = all(not master.any() for master in rank.masters.values())

    run = run_threads(2, serve)
    assert [type(error) for error in run.errors] == [StateMismatchError] * 2
    assert before == [True, True]


# --- take_masters ---------------------------------------------------------------------------------


def test_masters_are_taken_out_by_key():
    state = {0: {"step": 1, MASTER_KEY: "a"}, 1: {"step": 2}, 2: {MASTER_KEY: "b"}}
    assert take_masters(state) == {0: "a", 2: "b"}


def test_state_that_was_nothing_but_masters_is_gone():
    state = {0: {"step": 1, MASTER_KEY: "a"}, 1: {}, 2: {MASTER_KEY: "b"}}
    take_masters(state)
    assert state == {0: {"step": 1}, 1: {}}


def test_state_that_is_no_dict_has_no_masters():
    state = {"counter": 7, 0: [1, 2]}
    assert (take_masters(state), state) == ({}, {"counter": 7, 0: [1, 2]})
