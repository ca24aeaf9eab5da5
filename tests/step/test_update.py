import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.step import ShardUpdate, only_params
from shardopt.step.flags import FLAGS_PER_INT

OWNERS = [0, 1, 0, 1]


def by_index(params):
    return dict(enumerate(params))


def make_params(rank):
    return [torch.full((2,), 10.0 * rank + i) for i in range(len(OWNERS))]


@pytest.fixture
def run_updates(run_threads, make_buckets):
    """Update on two ranks; returns the run, with the values of all parameters on each rank."""

    def run(update):
        values = [None, None]

        def serve(group):
            params = make_params(group.rank)
            buckets = make_buckets(params, OWNERS, world_size=2)
            shard = ShardUpdate(group.rank, buckets, by_index(params))
            shard.run(lambda: update(group.rank, params))
            try:
                shard.finish(group, doing="step()")
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
def lone_update(make_buckets):
    """An update of a lone rank over two parameters."""
    params = [torch.ones(2), torch.ones(2)]
    return ShardUpdate(0, make_buckets(params, [0, 0], world_size=1), by_index(params)), params


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


def test_a_parameter_with_a_gradient_is_sent_even_if_its_version_did_not_move(run_updates):
    def update(rank, params):
        if rank == 0:
            params[2].grad = torch.ones(2)
            params[2].detach().data.fill_(99.0)  # as a kernel does that bumps no version

    run = run_updates(update)
    assert run.results[1] == [10.0, 11.0, 99.0, 13.0]


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


def test_a_lone_rank_raises_its_own_error(lone_update):
    update, _ = lone_update

    def fail():
        raise ValueError("odd")

    update.run(fail)
    with pytest.raises(ValueError, match="odd"):
        update.finish(LoneRank(), doing="step()")


def test_a_rank_that_owns_nothing_takes_part(run_threads, make_buckets):
    def serve(group):
        params = [torch.full((2,), float(group.rank))]
        update = ShardUpdate(group.rank, make_buckets(params, [0], world_size=3), by_index(params))
        update.run(lambda: params[0].fill_(7.0) if group.rank == 0 else None)
        update.finish(group, doing="step()")
        return params[0].tolist()

    assert run_threads(3, serve).results == [[7.0, 7.0]] * 3


def test_more_buckets_than_flags_in_an_int_are_all_exchanged(run_threads, make_buckets):
    count = FLAGS_PER_INT + 3

    def serve(group):
        params = [torch.zeros(1) for _ in range(count)]
        update = ShardUpdate(
            group.rank, make_buckets(params, [0] * count, world_size=2), by_index(params)
        )
        update.run(lambda: params[-1].fill_(1.0) if group.rank == 0 else None)
        update.finish(group, doing="step()")
        return [int(param.item()) for param in params]

    assert run_threads(2, serve).results[1] == [0] * (count - 1) + [1]


# --- finish, where some of it is known ------------------------------------------------------------


@pytest.mark.parametrize(
    "expected",
    [[(), ()], [(0,), ()], [(0, 1), (0, 1)], [(), (1,)], [(1,), (0,)]],
    ids=str,
)
def test_what_was_expected_or_written_is_on_every_rank(run_threads, make_buckets, expected):
    def serve(group):
        params = make_params(group.rank)
        buckets = make_buckets(params, OWNERS, world_size=2, bucket_nbytes=16)
        assert [bucket.plan.params for bucket in buckets] == [(0, 1), (2, 3)]
        update = ShardUpdate(group.rank, buckets, by_index(params))
        update.run(lambda: fill((0, 0), (1, 3))(group.rank, params))
        update.finish(group, expected=expected, doing="step()")
        return [params[0][0].item(), params[3][0].item()]

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[99.0, 99.0]] * 2)
    assert run.num_left_over == 0


def test_what_was_expected_travels_once_and_is_not_reported(run_threads, make_buckets):
    def serve(group):
        params = make_params(group.rank)
        [bucket] = make_buckets(params, OWNERS, world_size=2, bucket_nbytes=99)
        update = ShardUpdate(group.rank, [bucket], by_index(params))
        update.run(lambda: fill((0, 0), (1, 1))(group.rank, params))
        update.finish(group, expected=[(0, 1)], doing="step()")

    run = run_threads(2, serve)
    assert sorted((m.src, m.numel) for m in run.world.messages) == [(0, 4), (1, 4)]


def test_what_was_expected_travels_even_if_it_was_not_written(run_threads, make_buckets):
    def serve(group):
        params = make_params(group.rank)
        [bucket] = make_buckets(params, OWNERS, world_size=2, bucket_nbytes=99)
        ShardUpdate(group.rank, [bucket], by_index(params)).finish(
            group, expected=[(1,)], doing="step()"
        )
        return params[1][0].item()

    run = run_threads(2, serve)
    assert ([m.src for m in run.world.messages], run.results) == ([1], [11.0, 11.0])


def test_an_error_is_reported_where_everything_was_expected(run_threads, make_buckets):
    def serve(group):
        params = make_params(group.rank)
        [bucket] = make_buckets(params, OWNERS, world_size=2, bucket_nbytes=99)
        update = ShardUpdate(group.rank, [bucket], by_index(params))
        update.run(lambda: failing_after_a_write(group.rank, params))
        update.finish(group, expected=[(0, 1)], doing="step()")

    run = run_threads(2, serve)
    assert run.texts == [
        "RemoteRankError: step() failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]


def test_ranks_expect_a_list_per_bucket(lone_update):
    with pytest.raises(ValueError, match="zip"):
        lone_update[0].finish(LoneRank(), expected=[], doing="step()")


# --- only_params ----------------------------------------------------------------------------------


@pytest.fixture
def groups():
    params = [torch.zeros(1) for _ in range(4)]
    return [
        {"params": params[:2], "param_names": ["a", "b"], "lr": 0.1},
        {"params": params[2:], "lr": 0.2},
    ]


def chosen(*params):
    return {id(param): param for param in params}


def test_groups_hold_only_the_chosen_params_inside_the_block(groups):
    b, c = groups[0]["params"][1], groups[1]["params"][0]
    with only_params(groups, chosen(b, c)):
        assert [[id(p) for p in group["params"]] for group in groups] == [[id(b)], [id(c)]]


def test_names_follow_their_params_inside_the_block(groups):
    with only_params(groups, chosen(groups[0]["params"][1])):
        assert groups[0]["param_names"] == ["b"]


def test_no_names_are_invented_inside_the_block(groups):
    with only_params(groups, chosen()):
        assert "param_names" not in groups[1]


def test_the_lists_of_the_groups_are_back_after_the_block(groups):
    lists = [group["params"] for group in groups]
    with only_params(groups, chosen()):
        pass
    assert [g["params"] is kept for g, kept in zip(groups, lists, strict=True)] == [True, True]


def test_the_groups_are_as_before_after_an_exception(groups):
    before = [dict(group) for group in groups]
    with pytest.raises(ValueError, match="odd"):
        with only_params(groups, chosen()):
            raise ValueError("odd")
    assert [list(map(id, g.values())) for g in groups] == [
        list(map(id, g.values())) for g in before
    ]


def test_options_written_inside_the_block_stay(groups):
    with only_params(groups, chosen()):
        groups[1]["lr"] = 0.5
    assert groups[1]["lr"] == 0.5
