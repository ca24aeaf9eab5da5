import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.step import equalize, exchange, launch_exchange
from shardopt.step.exchange import DEPTH

SHAPES = [(3, 2), (4,), (), (2, 2), (5,)]
OWNERS = [0, 1, 1, 0, 2]


def make_params(rank, *, dtype=torch.float32):
    """Parameters whose values say which rank wrote them."""
    return [torch.full(shape, 10.0 * rank + i).to(dtype) for i, shape in enumerate(SHAPES)]


@pytest.fixture
def run_exchange(run_threads, make_buckets):
    """Exchange on three ranks; returns the run, and the first value of each parameter on each rank."""

    def run(changed_of=None, *, bucket_nbytes=2**20):
        def serve(group):
            params = make_params(group.rank)
            buckets = make_buckets(params, OWNERS, world_size=3, bucket_nbytes=bucket_nbytes)
            whole = [[s.rank for s in b.plan.sections if s.slots] for b in buckets]
            exchange(group, buckets, whole if changed_of is None else changed_of(buckets))
            return [param.reshape(-1)[0].item() for param in params]

        return run_threads(3, serve)

    return run


@pytest.mark.parametrize("bucket_nbytes", [1, 60, 2**20])
def test_every_rank_gets_the_parameters_of_their_owners(run_exchange, bucket_nbytes):
    run = run_exchange(bucket_nbytes=bucket_nbytes)
    assert run.results == [[10.0 * owner + i for i, owner in enumerate(OWNERS)]] * 3


def test_one_broadcast_is_sent_per_section(run_exchange):
    run = run_exchange()
    assert sorted((m.src, m.dst, m.numel) for m in run.world.messages) == [
        (0, None, 10),
        (1, None, 5),
        (2, None, 5),
    ]


def test_only_changed_sections_are_sent(run_exchange):
    run = run_exchange(lambda buckets: [[1]])
    assert [message.src for message in run.world.messages] == [1]


def test_sections_that_did_not_change_stay_as_they_are(run_exchange):
    run = run_exchange(lambda buckets: [[1]])
    assert run.results[2] == [20.0, 11.0, 12.0, 23.0, 24.0]


def test_without_changes_nothing_is_sent(run_exchange):
    run = run_exchange(lambda buckets: [[]] * len(buckets))
    assert run.world.messages == []


def test_every_broadcast_is_received(run_exchange):
    assert run_exchange(bucket_nbytes=1).num_left_over == 0


def test_ranks_change_a_list_per_bucket(make_buckets):
    buckets = make_buckets([torch.ones(2)], [0], world_size=1)
    with pytest.raises(ValueError, match="zip"):
        exchange(LoneRank(), buckets, [])


def test_a_lone_rank_does_not_open_its_buckets(make_buckets, recording):
    bucket = recording(make_buckets([torch.ones(2)], [0], world_size=1)[0])
    exchange(LoneRank(), [bucket], [[0]])
    assert bucket.events == []


class ScriptedGroup:
    """Rank 0 of 2, whose broadcasts can fail."""

    rank = 0
    world_size = 2

    def __init__(self, error=None):
        self._error = error
        self.num_in_flight = 0
        self.deepest = 0

    def broadcast(self, tensor, *, src):
        self.num_in_flight += 1
        self.deepest = max(self.deepest, self.num_in_flight)
        return self

    def wait(self):
        self.num_in_flight -= 1
        if self._error is not None:
            raise self._error


def test_a_bucket_without_changes_is_not_opened(make_buckets, recording):
    bucket = recording(make_buckets([torch.ones(2)], [0], world_size=2)[0])
    exchange(ScriptedGroup(), [bucket], [[]])
    assert bucket.events == []


def test_the_sections_of_the_other_ranks_are_put_away(make_buckets, recording):
    params = [torch.ones(2), torch.ones(2)]
    bucket = recording(make_buckets(params, [0, 1], world_size=2, bucket_nbytes=99)[0])
    launch_exchange(ScriptedGroup(), bucket, [0, 1])()
    assert bucket.events == [("open", [0, 1]), ("close", [1])]


def test_nothing_is_put_away_before_the_broadcasts_are_awaited(make_buckets, recording):
    bucket = recording(make_buckets([torch.ones(2)], [0], world_size=2)[0])
    launch_exchange(ScriptedGroup(), bucket, [0])
    assert bucket.events == [("open", [0])]


def test_after_a_failed_broadcast_the_bucket_is_closed_with_nothing_received(
    make_buckets, recording
):
    params = [torch.ones(2), torch.ones(2)]
    bucket = recording(make_buckets(params, [0, 1], world_size=2, bucket_nbytes=99)[0])
    finish = launch_exchange(ScriptedGroup(RuntimeError("peer is gone")), bucket, [0, 1])
    with pytest.raises(RuntimeError, match="peer is gone"):
        finish()
    assert bucket.events == [("open", [0, 1]), ("close", [])]


def test_a_bounded_number_of_buckets_is_in_flight(make_buckets):
    params = [torch.ones(2) for _ in range(6)]
    buckets = make_buckets(params, [0] * 6, world_size=2)
    group = ScriptedGroup()
    exchange(group, buckets, [[0]] * len(buckets))
    assert (len(buckets), group.deepest, group.num_in_flight) == (6, DEPTH, 0)


def test_a_failed_launch_closes_the_bucket_and_awaits_what_was_launched(make_buckets, recording):
    group = ScriptedGroup()
    broadcast = group.broadcast

    def failing_second(tensor, *, src):
        if group.num_in_flight:
            raise RuntimeError("no more")
        return broadcast(tensor, src=src)

    group.broadcast = failing_second
    params = [torch.ones(2), torch.ones(2)]
    bucket = recording(make_buckets(params, [0, 1], world_size=2, bucket_nbytes=99)[0])
    with pytest.raises(RuntimeError, match="no more"):
        launch_exchange(group, bucket, [0, 1])
    assert (bucket.events[0], bucket.events[1][0], group.num_in_flight) == (
        ("open", [0, 1]),
        "close",
        0,
    )


# --- from one rank --------------------------------------------------------------------------------


@pytest.mark.parametrize("src", [0, 1, 2])
def test_one_rank_can_send_the_sections_of_all(run_threads, make_buckets, src):
    def serve(group):
        params = make_params(group.rank)
        [bucket] = make_buckets(params, OWNERS, world_size=3, bucket_nbytes=2**20)
        launch_exchange(group, bucket, [0, 1, 2], src=src)()
        return [param.reshape(-1)[0].item() for param in params]

    run = run_threads(3, serve)
    assert run.results == [[10.0 * src + i for i in range(len(OWNERS))]] * 3
    assert {message.src for message in run.world.messages} == {src}


def test_what_the_one_rank_sends_it_does_not_put_away(make_buckets, recording):
    params = [torch.ones(2), torch.ones(2)]
    bucket = recording(make_buckets(params, [0, 1], world_size=2, bucket_nbytes=99)[0])
    launch_exchange(ScriptedGroup(), bucket, [0, 1], src=0)()
    assert bucket.events == [("open", [0, 1]), ("close", [])]


def test_what_the_other_ranks_get_from_one_they_put_away(make_buckets, recording):
    params = [torch.ones(2), torch.ones(2)]
    bucket = recording(make_buckets(params, [0, 1], world_size=2, bucket_nbytes=99)[0])
    launch_exchange(ScriptedGroup(), bucket, [0, 1], src=1)()
    assert bucket.events == [("open", [0, 1]), ("close", [0, 1])]


@pytest.mark.parametrize("bucket_nbytes", [1, 60, 2**20])
def test_equalized_parameters_are_those_of_rank_0(run_threads, make_buckets, bucket_nbytes):
    def serve(group):
        params = make_params(group.rank)
        equalize(group, make_buckets(params, OWNERS, world_size=3, bucket_nbytes=bucket_nbytes))
        return [param.reshape(-1)[0].item() for param in params]

    run = run_threads(3, serve)
    assert run.results == [[float(i) for i in range(len(OWNERS))]] * 3


def test_equalizing_sends_every_parameter_once(run_threads, make_buckets):
    def serve(group):
        equalize(group, make_buckets(make_params(group.rank), OWNERS, world_size=3))

    run = run_threads(3, serve)
    numel = sum(torch.Size(shape).numel() for shape in SHAPES)
    assert (sum(message.numel for message in run.world.messages), run.num_left_over) == (numel, 0)


def test_equalizing_no_buckets_sends_nothing(run_threads):
    run = run_threads(2, lambda group: equalize(group, []))
    assert (run.texts, run.world.messages) == (["", ""], [])
