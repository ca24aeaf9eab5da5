"""Mailboxes of several ranks, all in this process."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardopt.collectives.mailbox import MAX_INTS, Mailbox


def make_mailboxes(world_size, timeout_s=10.0):
    boxes = [
        Mailbox([peer for peer in range(world_size) if peer != rank], timeout_s=timeout_s)
        for rank in range(world_size)
    ]
    for rank, box in enumerate(boxes):
        for peer, other in enumerate(boxes):
            if peer != rank:
                box.open(peer, pid=os.getpid(), entrance=other.entrances[rank])
    for box in boxes:
        box.close_entrances()
    return boxes


def test_messages_arrive_in_order():
    here, there = make_mailboxes(2)
    for values in ([1], [2, 3], [-(2**63), 2**63 - 1]):
        here.post(1, values)
    numbers = [there.expect(0) for _ in range(3)]
    assert [list(there.take(0, number)) for number in numbers] == [
        [1],
        [2, 3],
        [-(2**63), 2**63 - 1],
    ]


def test_messages_can_be_taken_in_any_order():
    here, there = make_mailboxes(2)
    numbers = [there.expect(0) for _ in range(3)]
    for value in range(3):
        here.post(1, [value])
    assert [list(there.take(0, numbers[n])) for n in (2, 0, 1)] == [[2], [0], [1]]


def test_each_pair_has_its_own_order():
    boxes = make_mailboxes(3)
    boxes[0].post(2, [10])
    boxes[1].post(2, [11])
    numbers = {peer: boxes[2].expect(peer) for peer in (1, 0)}
    assert [list(boxes[2].take(peer, number)) for peer, number in numbers.items()] == [[11], [10]]


def test_both_may_write_more_than_a_pipe_holds_before_either_reads():
    here, there = make_mailboxes(2)
    num_messages, values = 400, list(range(MAX_INTS))

    def exchange(box, peer):
        for _ in range(num_messages):
            box.post(peer, values)
        return [list(box.take(peer, box.expect(peer))) for _ in range(num_messages)]

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(exchange, here, 1), pool.submit(exchange, there, 0)]
        assert [end.result() for end in ends] == [[values] * num_messages] * 2


def test_a_peer_that_never_reads_is_named():
    here, _there = make_mailboxes(2, timeout_s=0.01)
    with pytest.raises(RuntimeError, match=r"rank 1 has read nothing for 0\.01 s"):
        _post_often(here, peer=1)


def _post_often(box, *, peer):
    for _ in range(1000):
        box.post(peer, list(range(MAX_INTS)))


def test_a_message_that_is_too_long_is_a_mistake():
    here, _ = make_mailboxes(2)
    with pytest.raises(AssertionError):
        here.post(1, [0] * (MAX_INTS + 1))


def test_a_silent_peer_is_named():
    here, _there = make_mailboxes(2, timeout_s=0.01)
    with pytest.raises(RuntimeError, match=r"rank 1 has sent nothing for 0\.01 s"):
        here.take(1, here.expect(1))


def test_what_a_peer_sent_before_it_ended_arrives_and_then_its_end_is_noticed():
    boxes = make_mailboxes(2)
    boxes[0].post(1, [5])
    here = boxes.pop()
    del boxes
    assert list(here.take(0, here.expect(0))) == [5]
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        here.take(0, here.expect(0))


def test_sending_to_a_peer_that_has_ended_names_it():
    boxes = make_mailboxes(2)
    here = boxes.pop()
    del boxes
    with pytest.raises(RuntimeError, match="rank 0 has ended"):
        here.post(0, [1])
