import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.shards import Exchange, equalize, launch_exchange
from shardopt.shards.exchange import DEPTH

SHAPES = [(3, 2), (4,), (), (2, 2), (5,)]
OWNERS = [0, 1, 1, 0, 2]


def make_params(rank, *, dtype=torch.float32):
    """Parameters whose values say which rank wrote them."""
    return [torch.full(shape, 10.0 * rank + i).to(dtype) for i, shape in enumerate(SHAPES)]


def exchange_all(group, buckets, ranks_by_bucket, *, is_bounded=True):
    """Launch what is listed and wait for all of it; returns the numbers of buckets that were touched."""
    touched = []
    exchange = Exchange(
        group,
        buckets,
        is_bounded=lambda number: is_bounded,
        touch=lambda number, ranks: touched.append(number),
    )
    for number, ranks in enumerate(ranks_by_bucket):
        exchange.launch(number, ranks)
    exchange.drain()
    return touched


@pytest.fixture
def run_exchange(run_threads, make_buckets):
    """Exchange on three ranks; returns the run, and the first value of each parameter on each rank."""

    def run(changed_of=None, *, bucket_nbytes=2**20):
        def serve(group):
            params = make_params(group.rank)
            buckets = make_buckets(params, OWNERS, world_size=3, bucket_nbytes=bucket_nbytes)
            whole = [[s.rank for s in b.plan.sections if s.slots] for b in buckets]
            exchange_all(group, buckets, whole if changed_of is None else changed_of(buckets))
            return [param.reshape(-1)[0].item() for param in params]

        return run_threads(3, serve)

    return run


@pytest.mark.parametrize("bucket_nbytes", [1, 60, 2**20])
def test_every_rank_gets_the_parameters_of_their_owners(run_exchange, bucket_nbytes):
    run = run_exchange(bucket_nbytes=bucket_nbytes)
    assert run.results == [[10.0 * owner + i for i, owner in enumerate(OWNERS)]] * 3


def test_one_message_is_sent_per_section_and_receiver(run_exchange):
    run = run_exchange()
    assert sorted((m.src, m.dst, m.numel) for m in run.world.messages) == [
        (0, 1, 10),
        (0, 2, 10),
        (1, 0, 5),
        (1, 2, 5),
        (2, 0, 5),
        (2, 1, 5),
    ]


def test_only_changed_sections_are_sent(run_exchange):
    run = run_exchange(lambda buckets: [[1]])
    assert {message.src for message in run.world.messages} == {1}


def test_sections_that_did_not_change_stay_as_they_are(run_exchange):
    run = run_exchange(lambda buckets: [[1]])
    assert run.results[2] == [20.0, 11.0, 12.0, 23.0, 24.0]


def test_without_changes_nothing_is_sent(run_exchange):
    run = run_exchange(lambda buckets: [[]] * len(buckets))
    assert run.world.messages == []


def test_every_message_is_received(run_exchange):
    assert run_exchange(bucket_nbytes=1).num_left_over == 0


# --- Exchange -------------------------------------------------------------------------------------


@pytest.fixture
def make_exchange(make_buckets, recording, scripted):
    """An exchange of rank 0 of 2, which owns every other bucket, and the other rank the rest."""

    def make(*, count=6, is_bounded=True, num_params=1, **failures):
        group = scripted(**failures)
        params = [torch.ones(2) for _ in range(count * num_params)]
        owners = [(i // num_params) % 2 for i in range(len(params))]
        made = make_buckets(params, owners, world_size=2, bucket_nbytes=16 * num_params)
        buckets = [recording(bucket) for bucket in made]
        touched = []
        exchange = Exchange(
            group,
            buckets,
            is_bounded=is_bounded if callable(is_bounded) else lambda number: is_bounded,
            touch=lambda number, ranks: touched.append(number),
        )
        return exchange, group, buckets, touched

    return make


def test_staged_buckets_in_flight_are_bounded(make_exchange):
    exchange, group, buckets, _ = make_exchange(count=12)
    for number in range(len(buckets)):
        exchange.launch(number, [0])
    assert (group.deepest, group.num_in_flight) == (DEPTH, DEPTH)


def test_buckets_without_a_bound_do_not_count_for_those_with_one(make_exchange):
    exchange, group, buckets, _ = make_exchange(count=12, is_bounded=lambda number: number % 2 == 1)
    for number in range(len(buckets)):
        exchange.launch(number, [0])
    assert group.num_in_flight == len(buckets) // 2 + DEPTH
    exchange.drain_copies()
    assert group.num_in_flight == len(buckets) // 2


def test_buckets_of_views_are_all_in_flight_at_once(make_exchange):
    exchange, group, buckets, _ = make_exchange(count=12, is_bounded=False)
    for number in range(len(buckets)):
        exchange.launch(number, [0])
    assert group.num_in_flight == len(buckets) > DEPTH


def test_a_full_exchange_finishes_the_oldest_bucket_first(make_exchange):
    exchange, group, _, touched = make_exchange()
    for number in (2, 0, 1):
        exchange.launch(number, [0])
    assert (group.awaited, touched) == ([0], [2])


def test_draining_finishes_everything_once_in_order(make_exchange):
    exchange, group, buckets, touched = make_exchange(is_bounded=False)
    for number in range(len(buckets)):
        exchange.launch(number, [0])
    exchange.drain()
    exchange.drain()
    numbers = list(range(len(buckets)))
    assert (group.awaited, touched) == (numbers, numbers)


def test_waiting_for_one_bucket_finishes_that_one_only(make_exchange):
    exchange, group, _, touched = make_exchange(is_bounded=False)
    for number in (0, 1, 2):
        exchange.launch(number, [0])
    exchange.wait(1)
    assert (group.awaited, touched) == ([1], [1])


def test_waiting_for_a_bucket_that_is_there_does_nothing(make_exchange):
    exchange, group, _, touched = make_exchange()
    exchange.wait(0)
    assert (group.launched, touched) == ([], [])


def test_a_bucket_launched_again_is_finished_before(make_exchange):
    exchange, group, buckets, touched = make_exchange(is_bounded=False)
    exchange.launch(0, [0])
    exchange.launch(0, [1])
    assert (group.awaited, touched) == ([0], [0])
    assert [kind for kind, _ in buckets[0].events] == ["open", "close", "open"]


def test_a_bucket_without_changes_is_neither_opened_nor_touched(make_exchange):
    exchange, group, buckets, touched = make_exchange()
    exchange.launch(0, [])
    exchange.drain()
    assert (buckets[0].events, group.launched, touched) == ([], [], [])


def test_a_bucket_is_touched_once_what_arrived_is_put_away(make_buckets, recording, scripted):
    bucket = recording(make_buckets([torch.ones(2)], [0], world_size=2)[0])
    exchange = Exchange(
        scripted(),
        [bucket],
        is_bounded=lambda n: True,
        touch=lambda n, ranks: bucket.events.append(("touch", n, list(ranks))),
    )
    exchange.launch(0, [0])
    exchange.drain()
    assert bucket.events == [("open", [0]), ("close", []), ("touch", 0, [0])]


def test_a_lone_rank_touches_its_bucket_without_opening_it(make_buckets, recording):
    bucket = recording(make_buckets([torch.ones(2)], [0], world_size=1)[0])
    touched = exchange_all(LoneRank(), [bucket], [[0]])
    assert (bucket.events, touched) == ([], [0])


def test_buckets_that_came_later_can_be_exchanged(make_exchange):
    exchange, _, buckets, touched = make_exchange(count=2)
    buckets.append(buckets[0])
    exchange.launch(len(buckets) - 1, [0])
    exchange.drain()
    assert touched == [len(buckets) - 1]


def closes(buckets):
    return [sum(kind == "close" for kind, _ in bucket.events) for bucket in buckets]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_where_one_wait_raises_everything_in_flight_is_finished_once(make_exchange, bad):
    exchange, group, buckets, _ = make_exchange(count=6, is_bounded=False, bad_waits=[bad])
    for number in range(3):
        exchange.launch(number, [0])
    with pytest.raises(RuntimeError, match=f"wait {bad}"):
        exchange.drain()
    exchange.drain()
    assert (sorted(group.awaited), closes(buckets[:3])) == ([0, 1, 2], [1, 1, 1])


def test_what_is_raised_first_is_what_is_raised(make_exchange):
    exchange, _, _, _ = make_exchange(is_bounded=False, bad_waits=[0, 1, 2])
    for number in range(3):
        exchange.launch(number, [0])
    with pytest.raises(RuntimeError, match="wait 0"):
        exchange.drain()


def test_buckets_whose_exchange_failed_or_was_abandoned_are_not_touched(make_exchange):
    exchange, _, _, touched = make_exchange(is_bounded=False, bad_waits=[1])
    for number in range(3):
        exchange.launch(number, [0])
    with pytest.raises(RuntimeError, match="wait 1"):
        exchange.drain()
    assert touched == [0]


def test_where_a_launch_raises_everything_in_flight_is_finished_once(make_exchange):
    exchange, group, buckets, _ = make_exchange(is_bounded=False, bad_launches=[2])
    exchange.launch(0, [0])
    exchange.launch(1, [0])
    with pytest.raises(RuntimeError, match="launch 2"):
        exchange.launch(2, [0])
    exchange.drain()
    assert (group.awaited, closes(buckets[:3])) == ([0, 1], [1, 1, 1])


def test_a_wait_that_raises_in_a_launch_keeps_the_launch_from_being_made(make_exchange):
    exchange, group, _, _ = make_exchange(bad_waits=[0])
    exchange.launch(0, [0])
    exchange.launch(1, [0])
    with pytest.raises(RuntimeError, match="wait 0"):
        exchange.launch(2, [0])
    assert (group.launched, group.awaited) == ([0, 1], [0, 1])


# --- launch_exchange ------------------------------------------------------------------------------


@pytest.fixture
def shared_bucket(make_buckets, recording):
    """A bucket of which two ranks own a section each."""
    params = [torch.ones(2), torch.ones(2)]
    [bucket] = make_buckets(params, [0, 1], world_size=2, bucket_nbytes=99)
    return recording(bucket)


def test_the_sections_of_the_other_ranks_are_put_away(shared_bucket, scripted):
    launch_exchange(scripted(), shared_bucket, [0, 1])()
    assert shared_bucket.events == [("open", [0, 1]), ("close", [1])]


def test_nothing_is_put_away_before_the_messages_are_awaited(shared_bucket, scripted):
    launch_exchange(scripted(), shared_bucket, [0])
    assert shared_bucket.events == [("open", [0])]


def test_after_a_failed_message_the_bucket_is_closed_with_nothing_received(shared_bucket, scripted):
    finish = launch_exchange(scripted(bad_waits=[0]), shared_bucket, [0, 1])
    with pytest.raises(RuntimeError, match="wait 0"):
        finish()
    assert shared_bucket.events == [("open", [0, 1]), ("close", [])]


def test_a_failed_launch_closes_the_bucket_with_nothing_received(shared_bucket, scripted):
    with pytest.raises(RuntimeError, match="launch 0"):
        launch_exchange(scripted(bad_launches=[0]), shared_bucket, [0, 1])
    assert shared_bucket.events == [("open", [0, 1]), ("close", [])]


def test_a_lone_rank_launches_nothing(make_buckets, recording):
    bucket = recording(make_buckets([torch.ones(2)], [0], world_size=1)[0])
    launch_exchange(LoneRank(), bucket, [0])()
    assert bucket.events == []


# --- equalize -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_nbytes", [1, 60, 2**20])
def test_equalized_parameters_are_those_of_rank_0(run_threads, make_buckets, bucket_nbytes):
    def serve(group):
        params = make_params(group.rank)
        equalize(group, make_buckets(params, OWNERS, world_size=3, bucket_nbytes=bucket_nbytes))
        return [param.reshape(-1)[0].item() for param in params]

    run = run_threads(3, serve)
    assert run.results == [[float(i) for i in range(len(OWNERS))]] * 3


def test_equalizing_sends_every_parameter_once_from_rank_0(run_threads, make_buckets):
    def serve(group):
        equalize(group, make_buckets(make_params(group.rank), OWNERS, world_size=3))

    run = run_threads(3, serve)
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert (sum(message.numel for message in run.world.messages), run.num_left_over) == (numel, 0)
    assert {(message.src, message.dst) for message in run.world.messages} == {(0, None)}


def test_what_the_first_member_sends_it_does_not_put_away(shared_bucket, scripted):
    equalize(scripted(), [shared_bucket])
    assert shared_bucket.events == [("open", [0, 1]), ("close", [])]


def test_what_the_other_members_get_they_put_away(shared_bucket, scripted):
    group = scripted()
    group.is_first = False
    equalize(group, [shared_bucket])
    assert shared_bucket.events == [("open", [0, 1]), ("close", [0, 1])]


def test_a_rank_alone_in_its_group_is_equalized_with_members_elsewhere(
    make_buckets, recording, scripted
):
    """A grid whose rows are one rank wide."""
    group = scripted()
    group.world_size = 1
    [bucket] = make_buckets([torch.ones(2)], [0], world_size=1)
    bucket = recording(bucket)
    equalize(group, [bucket])
    assert (group.awaited, bucket.events) == ([0], [("open", [0]), ("close", [])])


def test_buckets_being_equalized_are_bounded(make_buckets, scripted):
    params = [torch.ones(2) for _ in range(6)]
    group = scripted()
    equalize(group, make_buckets(params, [0] * 6, world_size=2))
    assert (group.deepest, group.num_in_flight) == (DEPTH, 0)


def test_equalizing_no_buckets_sends_nothing(run_threads):
    run = run_threads(2, lambda group: equalize(group, []))
    assert (run.texts, run.world.messages) == (["", ""], [])


def test_a_lone_rank_is_equal_to_itself(make_buckets, recording):
    bucket = recording(make_buckets([torch.ones(2)], [0], world_size=1)[0])
    equalize(LoneRank(), [bucket])
    assert bucket.events == []
