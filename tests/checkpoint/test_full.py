import copy

import pytest
import torch

from shardopt.arguments import read_specs
from shardopt.checkpoint import StateAccess, collect_full, load_full, require_target
from shardopt.errors import StateMismatchError
from shardopt.frameworks.torch import empty_on_cpu
from shardopt.partition import Part

OWNERS = [1, 0, 1]


def make_params():
    generator = torch.Generator().manual_seed(0)  # ranks are threads, so not the global one
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(2, 3), (4,), ()]
    ]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return params


def assert_equal(actual, expected):
    """Equal bit by bit, in equal order."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert repr(actual) == repr(expected)


def groups_of(params, lr=0.1):
    return [{"params": params[:2], "lr": lr}, {"params": params[2:], "lr": 0.5}]


def unsharded(num_steps=2):
    """An unsharded Adam after some steps."""
    optimizer = torch.optim.Adam(groups_of(make_params()))
    for _ in range(num_steps):
        optimizer.step()
    return optimizer


class Rank:
    """The part of the unsharded optimizer that one rank holds."""

    def __init__(self, group, *, num_steps=2, lr=0.1):
        self.group = group
        self.params = make_params()
        self.owned = [i for i, owner in enumerate(OWNERS) if owner == group.rank]
        mine = {id(self.params[i]) for i in self.owned}
        whole = groups_of(self.params, lr)
        self.optimizer = torch.optim.Adam(
            [{**g, "params": [p for p in g["params"] if id(p) in mine]} for g in whole]
        )
        self.param_groups = [
            {**local, "params": g["params"]}
            for local, g in zip(self.optimizer.param_groups, whole, strict=True)
        ]
        self.specs = read_specs(self.param_groups)
        self.parts = [Part(i, 0, self.specs[i].numel, True) for i in self.owned]
        for _ in range(num_steps):
            self.optimizer.step()

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

    def collect(self, to):
        require_target(self.group, to)
        return collect_full(self.access, self.param_groups, to=to)

    def load(self, state_dict):
        load_full(self.access, state_dict, self.param_groups)

    def moments(self):
        """The state of the owned parameters, by index."""
        return {i: self.optimizer.state[self.params[i]] for i in self.owned}


# --- collect_full ---------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [0, 1, 2])
def test_the_receiver_holds_the_state_dict_of_the_unsharded_optimizer(run_threads, to):
    run = run_threads(3, lambda group: Rank(group).collect(to))
    assert_equal(run.results[to], unsharded().state_dict())


def test_only_the_receiver_holds_it(run_threads):
    run = run_threads(3, lambda group: Rank(group).collect(1))
    assert [result is None for result in run.results] == [True, False, True]


def test_without_state_only_the_groups_are_collected(run_threads):
    run = run_threads(2, lambda group: Rank(group, num_steps=0).collect(0))
    assert_equal(run.results[0], unsharded(num_steps=0).state_dict())


def test_different_receivers_are_named_on_every_rank(run_threads):
    run = run_threads(2, lambda group: Rank(group).collect(group.rank))
    text = (
        "RankMismatchError: consolidate_state_dict(): rank 1 was given other things than rank 0; "
        "first difference at to: 1 on rank 1, 0 on rank 0"
    )
    assert run.texts == [text, text]


@pytest.mark.parametrize("to", [-1, 2, None, "0"])
def test_a_receiver_that_is_no_rank_is_refused_on_every_rank(run_threads, to):
    run = run_threads(2, lambda group: Rank(group).collect(to))
    assert run.texts == [f"ValueError: to: expected a rank in [0, 2), got {to!r}"] * 2


def test_a_local_state_dict_that_fails_stops_every_rank(run_threads):
    def serve(group):
        rank = Rank(group)
        if group.rank == 1:
            rank.optimizer.state_dict = lambda: {}["state"]
        rank.collect(0)

    assert run_threads(2, serve).texts == [
        "RemoteRankError: state_dict() of the local optimizer failed on another rank; rank 1: KeyError: 'state'",
        "KeyError: 'state'",
    ]


# --- load_full ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_loads_the_state_of_its_parameters(run_threads, world_size):
    source = unsharded(num_steps=3)
    full = source.state_dict()

    def serve(group):
        rank = Rank(group, num_steps=0)
        rank.load(full)
        return rank.moments()

    results = run_threads(world_size, serve).results
    loaded = {index: state for result in results for index, state in result.items()}
    expected = [source.state[p] for g in source.param_groups for p in g["params"]]
    torch.testing.assert_close(loaded, dict(enumerate(expected)), rtol=0, atol=0)


def test_what_was_collected_can_be_loaded_again(run_threads):
    full = run_threads(2, lambda group: Rank(group, num_steps=4).collect(0)).results[0]

    def serve(group):
        rank = Rank(group, num_steps=0)
        rank.load(full)
        return rank.collect(0)

    assert_equal(run_threads(2, serve).results[0], full)


def test_every_rank_loads_the_options_of_all_groups(run_threads):
    full = unsharded().state_dict()
    full["param_groups"][0]["lr"] = 0.7

    def serve(group):
        rank = Rank(group)
        rank.load(full)
        return [g["lr"] for g in rank.param_groups]

    assert run_threads(3, serve).results == [[0.7, 0.5]] * 3


def test_the_groups_keep_their_parameters(run_threads):
    full = unsharded().state_dict()

    def serve(group):
        rank = Rank(group)
        rank.load(full)
        return [[id(p) for p in g["params"]] for g in rank.param_groups] == [
            [id(p) for p in rank.params[:2]],
            [id(p) for p in rank.params[2:]],
        ]

    assert run_threads(2, serve).results == [True, True]


def test_the_state_dict_is_left_alone(run_threads):
    full = unsharded().state_dict()
    before = repr(full)

    def serve(group):
        rank = Rank(group, num_steps=0)
        rank.load(full)
        rank.optimizer.step()

    run_threads(2, serve)
    assert repr(full) == before


def test_a_state_dict_that_does_not_fit_one_rank_stops_every_rank(run_threads):
    full = unsharded().state_dict()
    full["state"][1]["exp_avg"] = torch.zeros(5)
    run = run_threads(2, lambda group: Rank(group).load(full))
    assert [type(error) for error in run.errors] == [StateMismatchError] * 2


def test_a_state_dict_given_to_one_rank_only_stops_every_rank(run_threads):
    full = unsharded().state_dict()
    run = run_threads(2, lambda group: Rank(group).load(None if group.rank else full))
    assert run.texts[0].startswith(
        "RemoteRankError: load_state_dict() failed on another rank; rank 1: TypeError: state dict: expected a dict"
    )


def test_state_dicts_that_differ_are_named_on_every_rank(run_threads):
    full = unsharded().state_dict()

    def serve(group):
        mine = copy.deepcopy(full)
        if group.rank == 1:
            del mine["state"][2]["exp_avg_sq"]
        Rank(group).load(mine)

    run = run_threads(2, serve)
    text = (
        "RankMismatchError: every rank must load the same state dict: rank 1 was given other things than rank 0; "
        "first difference at param 2: [('exp_avg', ()), ('step', ())] on rank 1, "
        "[('exp_avg', ()), ('exp_avg_sq', ()), ('step', ())] on rank 0"
    )
    assert run.texts == [text, text]


def refused_on(rank_that_fails, full):
    """Load where the local optimizer of one rank raises in the middle; returns what each rank has then."""

    def serve(group):
        rank = Rank(group)
        before = (repr(rank.moments()), repr(rank.param_groups))
        load = rank.optimizer.load_state_dict

        def load_and_fail(state_dict):
            load(state_dict)
            if group.rank == rank_that_fails:
                raise ValueError("odd")

        rank.optimizer.load_state_dict = load_and_fail
        try:
            rank.load(full)
        finally:
            results[group.rank] = before == (repr(rank.moments()), repr(rank.param_groups))

    results = [None, None]
    return serve, results


def test_a_local_optimizer_that_refuses_stops_every_rank(run_threads):
    serve, _ = refused_on(1, unsharded(num_steps=5).state_dict())
    assert run_threads(2, serve).texts == [
        "RemoteRankError: load_state_dict() of the local optimizer failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]


def test_nothing_is_loaded_on_any_rank_if_one_refuses(run_threads):
    serve, are_as_before = refused_on(1, unsharded(num_steps=5).state_dict())
    run_threads(2, serve)
    assert are_as_before == [True, True]
