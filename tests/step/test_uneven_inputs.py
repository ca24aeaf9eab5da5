import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.partition import Part
from shardopt.step import Intent, sync_joined_gradients, sync_joined_options

OWNERS = [0, 1, 2, 1]


def parts_of(owners, *ranks):
    """What some ranks own, in whole parameters."""
    return {
        rank: [Part(index, 0, 6, True) for index, owner in enumerate(owners) if owner == rank]
        for rank in ranks
    }


def intent(*joined):
    active = tuple(rank for rank in range(3) if rank not in joined)
    return Intent(is_skipped=False, joined=joined, active=active, updating=())


def make_params(rank, *, without=()):
    """Parameters whose gradients say which rank computed them."""
    params = [torch.nn.Parameter(torch.zeros(3, 2).t()) for _ in OWNERS]
    for index, param in enumerate(params):
        if index not in without:
            param.grad = torch.full((2, 3), 10.0 * rank + index)
    return params


@pytest.fixture
def run_catch_up(run_threads):
    """Catch up on three ranks; returns the run, with the gradients and the learning rate of each."""

    def run(*joined, params_of=make_params):
        def serve(group):
            params = params_of(group.rank)
            groups = [{"params": params, "lr": float(group.rank)}]
            sync_joined_options(group, intent(*joined), groups)
            sync_joined_gradients(group, intent(*joined), params, parts_of(OWNERS, *joined))
            grads = [None if p.grad is None else p.grad[0, 0].item() for p in params]
            return grads, groups[0]["lr"]

        return run_threads(3, serve)

    return run


def test_a_joined_rank_gets_the_gradients_of_what_it_owns(run_catch_up):
    assert run_catch_up(1).results[1][0] == [10.0, 1.0, 12.0, 3.0]


def test_a_joined_rank_gets_the_options(run_catch_up):
    assert [rate for _, rate in run_catch_up(1).results] == [0.0, 0.0, 2.0]


def test_the_lowest_active_rank_sends(run_catch_up):
    run = run_catch_up(0, 2)
    assert {(message.src, message.dst) for message in run.world.messages} == {(1, 0), (1, 2)}


def test_active_ranks_keep_their_gradients_and_options(run_catch_up):
    run = run_catch_up(1)
    assert run.results[0::2] == [
        ([0.0, 1.0, 2.0, 3.0], 0.0),
        ([20.0, 21.0, 22.0, 23.0], 2.0),
    ]


def test_only_gradients_that_a_joined_rank_owns_are_sent(run_catch_up):
    run = run_catch_up(2)
    assert [(m.src, m.dst, m.numel) for m in run.world.messages] == [(0, 2, 6)]


def test_a_joined_rank_without_gradients_gets_them(run_catch_up):
    run = run_catch_up(
        1, params_of=lambda rank: make_params(rank, without=range(4) if rank == 1 else ())
    )
    assert run.results[1][0] == [None, 1.0, None, 3.0]


def test_a_gradient_that_the_source_lacks_is_none_on_the_joined_rank(run_catch_up):
    run = run_catch_up(1, params_of=lambda rank: make_params(rank, without=() if rank else (1,)))
    assert run.results[1][0] == [10.0, None, 12.0, 3.0]


def test_without_joined_ranks_nobody_talks(run_catch_up):
    run = run_catch_up()
    assert (run.world.messages, run.world.num_gathers_by_rank) == (
        [],
        [{"ints": 0, "object": 0}] * 3,
    )


def test_every_gradient_sent_is_received(run_catch_up):
    assert run_catch_up(1, 2).num_left_over == 0


def test_gradients_arrive_in_logical_order(run_threads):
    def serve(group):
        param = torch.nn.Parameter(torch.zeros(3, 2).t())
        if group.rank == 0:
            param.grad = torch.arange(6.0).view(2, 3)
        whole = Intent(is_skipped=False, joined=(1,), active=(0,), updating=())
        sync_joined_gradients(group, whole, [param], parts_of([1], 1))
        return param.grad.tolist()

    assert run_threads(2, serve).results[1] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def with_sparse_gradient(index):
    def make(rank):
        params = make_params(rank)
        params[index].grad = torch.ones(2, 3).to_sparse()
        return params

    return make


def test_a_sparse_gradient_that_would_have_to_be_sent_stops_every_rank(run_catch_up):
    run = run_catch_up(1, params_of=with_sparse_gradient(3))
    text = (
        "ValueError: Join: a rank without inputs owns a parameter with a sparse gradient, which cannot be sent to it; "
        "use dense gradients (nn.Embedding(sparse=False)) or even inputs"
    )
    assert run.texts == [text] * 3


def test_a_sparse_gradient_of_an_active_rank_does_not_matter(run_threads):
    def serve(group):
        params = with_sparse_gradient(2)(group.rank)
        sync_joined_gradients(group, intent(1), params, parts_of(OWNERS, 1))

    assert run_threads(3, serve).texts == ["", "", ""]


def test_a_joined_rank_that_owns_a_part_gets_the_whole_gradient(run_threads):
    def serve(group):
        params = make_params(group.rank)
        parts = {1: [Part(0, 2, 3, False), Part(3, 0, 6, True)]}
        sync_joined_gradients(group, intent(1), params, parts)
        return [p.grad[1, 2].item() for p in params]

    run = run_threads(3, serve)
    assert run.results[1] == [0.0, 11.0, 12.0, 3.0]
    assert [message.numel for message in run.world.messages] == [6, 6]


def test_an_empty_part_needs_no_elements(run_threads):
    def serve(group):
        param = torch.nn.Parameter(torch.zeros(0, 3))
        param.grad = torch.zeros(0, 3) if group.rank == 0 else None
        sync_joined_gradients(group, intent(1), [param], {1: [Part(0, 0, 0, True)]})
        return param.grad is not None

    assert run_threads(3, serve).results == [True, True, False]


def test_options_alone_can_be_caught_up(run_threads):
    def serve(group):
        groups = [{"params": [group.rank], "param_names": ["w"], "lr": float(group.rank)}]
        sync_joined_options(group, intent(0, 2), groups)
        return groups

    run = run_threads(3, serve)
    assert run.results == [
        [{"params": [rank], "param_names": ["w"], "lr": 1.0}] for rank in range(3)
    ]
    assert run.world.num_gathers_by_rank == [{"ints": 0, "object": 1}] * 3


def test_a_lone_rank_has_nothing_to_catch_up():
    alone = Intent(is_skipped=False, joined=(), active=(0,), updating=())
    groups = [{"params": [], "lr": 0.1}]
    sync_joined_options(LoneRank(), alone, groups)
    sync_joined_gradients(LoneRank(), alone, [], {})
    assert groups == [{"params": [], "lr": 0.1}]
