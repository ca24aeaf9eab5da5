import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.collectives.flags import FLAGS_PER_INT
from shardopt.shards import Exchange
from shardopt.step import ShardUpdate

OWNERS = [0, 1, 0, 1]


def by_index(params):
    return dict(enumerate(params))


def make_params(rank):
    return [torch.full((2,), 10.0 * rank + i) for i in range(len(OWNERS))]


def finish(update, group, buckets, *, launched=None):
    """Finish an update whose sections ``launched`` are travelling already; wait for what it launched."""
    exchange = Exchange(
        group, buckets, is_bounded=lambda number: True, touch=lambda number, ranks: None
    )
    launched = [()] * len(buckets) if launched is None else launched
    for number, ranks in enumerate(launched):
        exchange.launch(number, ranks)
    update.finish(group, exchange, launched=launched, doing="step()")
    exchange.drain()


@pytest.fixture
def run_updates(run_threads, make_buckets):
    """Update on two ranks; returns the run, with the values of all parameters on each rank."""

    def run(update):
        values = [None, None]

        def serve(group):
            params = make_params(group.rank)
            buckets = make_buckets(params, OWNERS, world_size=2)
            shard = ShardUpdate(group.rank, buckets, by_index(params))
            shard.run(lambda: update(group.rank, params), params)
            try:
                finish(shard, group, buckets)
            finally:
                values[group.rank] = [param[0].item() for param in params]

        outcome = run_threads(2, serve)
        outcome.results = values
        return outcome

    return run


def fill(*pairs):
    """An update that writes 99 into parameters, given as (rank, index)."""

    def update(rank, params):
        for where, index in pairs:
            if where == rank:
                params[index].fill_(99.0)

    return update


# --- run ------------------------------------------------------------------------------------------


@pytest.fixture
def lone_buckets(make_buckets):
    """Two parameters of a lone rank, each in a bucket of its own, and their buckets."""
    params = [torch.ones(2), torch.ones(2)]
    return params, make_buckets(params, [0, 0], world_size=1)


@pytest.fixture
def lone_update(lone_buckets):
    """An update of them."""
    params, buckets = lone_buckets
    return ShardUpdate(0, buckets, by_index(params)), params


def fail():
    raise ValueError("odd")


def test_run_returns_what_the_update_returns(lone_update):
    assert lone_update[0].run(lambda: "loss") == "loss"


def test_run_keeps_what_the_update_raises(lone_update):
    error = ValueError("odd")

    def update():
        raise error

    assert (lone_update[0].run(update), lone_update[0].error) == (None, error)


def test_run_does_not_keep_an_interrupt(lone_update):
    def update():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lone_update[0].run(update)


def test_nothing_is_run_after_a_run_that_raised(lone_update):
    calls = []
    lone_update[0].run(fail)
    assert (lone_update[0].run(lambda: calls.append(1)), calls) == (None, [])


def test_the_first_error_of_several_runs_is_kept(lone_update):
    def fail_again():
        raise KeyError("late")

    lone_update[0].run(fail)
    lone_update[0].run(fail_again)
    assert str(lone_update[0].error) == "odd"


def test_every_run_returns_its_own_result(lone_update):
    update, _ = lone_update
    assert [update.run(lambda n=n: n) for n in range(3)] == [0, 1, 2]


def test_parameters_have_not_moved_before_they_are_written(lone_update):
    assert not lone_update[0].has_moved_params


def test_parameters_have_moved_once_they_are_written(lone_update):
    update, params = lone_update
    params[1].add_(1)
    assert update.has_moved_params


def test_parameters_of_other_ranks_do_not_count_as_moved(make_buckets):
    params = make_params(0)
    update = ShardUpdate(0, make_buckets(params, OWNERS, world_size=2), by_index(params))
    params[1].add_(1)
    assert not update.has_moved_params


# --- finish ---------------------------------------------------------------------------------------


def test_what_an_owner_wrote_is_on_every_rank(run_updates):
    run = run_updates(fill((0, 0), (1, 3)))
    assert run.results == [[99.0, 1.0, 2.0, 99.0], [99.0, 11.0, 12.0, 99.0]]


def test_only_what_was_written_is_sent(run_updates):
    run = run_updates(fill((1, 3)))
    assert [(message.src, message.numel) for message in run.world.messages] == [(1, 2)]


def test_nothing_written_is_nothing_sent(run_updates):
    assert run_updates(fill()).world.messages == []


def test_what_a_rank_writes_into_parameters_of_others_is_not_sent(run_updates):
    assert run_updates(fill((0, 1))).world.messages == []


def test_a_parameter_that_had_a_gradient_is_sent_even_if_its_version_did_not_move(
    run_threads, make_buckets
):
    def serve(group):
        params = make_params(group.rank)
        buckets = make_buckets(params, OWNERS, world_size=2)
        update = ShardUpdate(group.rank, buckets, by_index(params))

        def write():
            if group.rank == 0:
                params[2].grad = None  # as an optimizer may do that consumes gradients
                params[2].detach().data.fill_(99.0)  # as a kernel does that bumps no version

        params[2].grad = torch.ones(2) if group.rank == 0 else None
        update.run(write, params)
        finish(update, group, buckets)
        return [param[0].item() for param in params]

    assert run_threads(2, serve).results[1] == [10.0, 11.0, 99.0, 13.0]


def test_finish_costs_one_gather_of_ints_while_all_is_well(run_updates):
    run = run_updates(fill((0, 0)))
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


def failing_after_a_write(rank, params):
    if rank == 1:
        params[1].fill_(99.0)
        raise ValueError("odd")


def test_an_error_is_raised_where_it_happened_and_reported_elsewhere(run_updates):
    run = run_updates(failing_after_a_write)
    assert run.texts == [
        "RemoteRankError: step() failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]


def test_replicas_are_equal_even_after_an_error(run_updates):
    run = run_updates(failing_after_a_write)
    assert [values[1] for values in run.results] == [99.0, 99.0]


def test_a_lone_rank_raises_its_own_error(lone_update, lone_buckets):
    update, _ = lone_update
    update.run(fail)
    with pytest.raises(ValueError, match="odd"):
        finish(update, LoneRank(), lone_buckets[1])


def test_a_rank_that_owns_nothing_takes_part(run_threads, make_buckets):
    def serve(group):
        params = [torch.full((2,), float(group.rank))]
        buckets = make_buckets(params, [0], world_size=3)
        update = ShardUpdate(group.rank, buckets, by_index(params))
        update.run(lambda: params[0].fill_(7.0) if group.rank == 0 else None)
        finish(update, group, buckets)
        return params[0].tolist()

    assert run_threads(3, serve).results == [[7.0, 7.0]] * 3


def test_more_buckets_than_flags_in_an_int_are_all_exchanged(run_threads, make_buckets):
    count = FLAGS_PER_INT + 3

    def serve(group):
        params = [torch.zeros(1) for _ in range(count)]
        buckets = make_buckets(params, [0] * count, world_size=2)
        update = ShardUpdate(group.rank, buckets, by_index(params))
        update.run(lambda: params[-1].fill_(1.0) if group.rank == 0 else None)
        finish(update, group, buckets)
        return [int(param.item()) for param in params]

    assert run_threads(2, serve).results[1] == [0] * (count - 1) + [1]


# --- finish, where some of it is travelling already -----------------------------------------------


@pytest.fixture
def run_launched(run_threads, make_buckets):
    """Update on two ranks, which own one parameter of each of two buckets, where sections travel already."""

    def run(launched, update=lambda rank, params: None):
        def serve(group):
            params = make_params(group.rank)
            buckets = make_buckets(params, OWNERS, world_size=2, bucket_nbytes=16)
            assert [bucket.plan.params for bucket in buckets] == [(0, 1), (2, 3)]
            shard = ShardUpdate(group.rank, buckets, by_index(params))
            shard.run(lambda: update(group.rank, params))
            finish(shard, group, buckets, launched=launched)
            return [param[0].item() for param in params]

        return run_threads(2, serve)

    return run


@pytest.mark.parametrize(
    "launched",
    [[(), ()], [(0,), ()], [(0, 1), (0, 1)], [(), (1,)], [(1,), (0,)]],
    ids=str,
)
def test_what_was_launched_or_written_is_on_every_rank(run_launched, launched):
    run = run_launched(launched, fill((0, 0), (1, 3)))
    assert [(values[0], values[3]) for values in run.results] == [(99.0, 99.0)] * 2
    assert (run.texts, run.num_left_over) == (["", ""], 0)


def test_what_was_launched_travels_once_and_is_not_reported(run_launched):
    run = run_launched([(0, 1), ()], fill((0, 0), (1, 1)))
    assert sorted((m.src, m.numel) for m in run.world.messages) == [(0, 2), (1, 2)]


def test_what_was_launched_travels_even_if_it_was_not_written(run_launched):
    run = run_launched([(1,), ()])
    assert ([m.src for m in run.world.messages], run.results[0][1]) == ([1], 11.0)


def test_an_error_is_reported_where_everything_was_launched(run_launched):
    run = run_launched([(0, 1), (0, 1)], failing_after_a_write)
    assert run.texts == [
        "RemoteRankError: step() failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]


def test_there_is_a_list_of_what_was_launched_for_every_bucket(lone_update, lone_buckets):
    with pytest.raises(ValueError, match="zip"):
        finish(lone_update[0], LoneRank(), lone_buckets[1], launched=[])


def test_what_was_launched_may_still_travel_after_finish(run_threads, make_buckets):
    def serve(group):
        params = make_params(group.rank)
        buckets = make_buckets(params, OWNERS, world_size=2)
        touched = []
        exchange = Exchange(
            group,
            buckets,
            is_bounded=lambda number: False,
            touch=lambda number, ranks: touched.append(number),
        )
        update = ShardUpdate(group.rank, buckets, by_index(params))
        update.run(lambda: fill((0, 0))(group.rank, params))
        update.finish(group, exchange, launched=[()] * len(buckets), doing="step()")
        before = list(touched)
        exchange.drain()
        return before, touched

    assert run_threads(2, serve).results == [([], [0])] * 2


def test_nothing_travels_any_more_once_an_error_is_raised(run_threads, make_buckets):
    def serve(group):
        params = make_params(group.rank)
        buckets = make_buckets(params, OWNERS, world_size=2)
        touched = []
        exchange = Exchange(
            group,
            buckets,
            is_bounded=lambda number: False,
            touch=lambda number, ranks: touched.append(number),
        )
        update = ShardUpdate(group.rank, buckets, by_index(params))
        update.run(lambda: failing_after_a_write(group.rank, params))
        with pytest.raises((ValueError, RuntimeError)):
            update.finish(group, exchange, launched=[()] * len(buckets), doing="step()")
        return touched, params[1][0].item()

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [([0], 99.0)] * 2)


# --- several runs ---------------------------------------------------------------------------------


def test_what_several_runs_wrote_is_on_every_rank(run_threads, make_buckets):
    def serve(group):
        params = make_params(group.rank)
        buckets = make_buckets(params, OWNERS, world_size=2)
        update = ShardUpdate(group.rank, buckets, by_index(params))
        for number, param in enumerate(params):
            if OWNERS[number] == group.rank:
                update.run(lambda param=param: param.add_(100.0), [param])
        finish(update, group, buckets)
        return [param[0].item() for param in params]

    assert run_threads(2, serve).results == [[100.0, 111.0, 102.0, 113.0]] * 2


def test_gradients_of_every_run_count(run_threads, make_buckets):
    """Of each run's tensors, those that had a gradient when it began."""

    def serve(group):
        params = make_params(group.rank)
        buckets = make_buckets(params, OWNERS, world_size=2)
        update = ShardUpdate(group.rank, buckets, by_index(params))
        for param in params:
            param.grad = torch.ones(2)
            update.run(lambda: None, [param])
            param.grad = None
        finish(update, group, buckets)

    run = run_threads(2, serve)
    assert sorted(message.src for message in run.world.messages) == [0, 0, 1, 1]


def test_a_run_that_fails_keeps_what_earlier_runs_wrote(run_threads, make_buckets):
    values = [None, None]

    def serve(group):
        params = make_params(group.rank)
        buckets = make_buckets(params, OWNERS, world_size=2)
        update = ShardUpdate(group.rank, buckets, by_index(params))
        update.run(lambda: fill((1, 1))(group.rank, params))
        update.run(fail if group.rank == 1 else lambda: None)
        update.run(lambda: fill((0, 2), (1, 3))(group.rank, params))
        try:
            finish(update, group, buckets)
        finally:
            values[group.rank] = [param[0].item() for param in params]

    run = run_threads(2, serve)
    assert run.texts[1] == "ValueError: odd"
    assert values == [[0.0, 99.0, 99.0, 3.0], [10.0, 99.0, 99.0, 13.0]]
