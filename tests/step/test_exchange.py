import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.step import exchange, launch_exchange
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
