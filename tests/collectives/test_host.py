"""All ranks of a host in this process: launching never waits, so one thread can act for all of them."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.collectives.group import add_up
from shardopt.collectives.host import Host
from shardopt.collectives.mailbox import MAX_INTS


def make_hosts(world_size, timeout_s=10.0):
    """What every rank makes, after they have met."""
    hosts = [
        Host(
            torch,
            rank,
            [(rank + step) % world_size for step in range(1, world_size)],
            timeout_s=timeout_s,
        )
        for rank in range(world_size)
    ]
    cards = [host.card for host in hosts]
    assert all([host.open(cards) for host in hosts])
    for host in hosts:
        host.begin()
    return hosts


def lend(host, values):
    """A tensor of these values in memory that peers can read."""
    memory = host.pool.take(values.numel(), like=values)
    return memory.narrow(0, 0, values.numel()).copy_(values)


def gradients(world_size, numel, dtype=torch.float32, seed=0):
    """``[sender][receiver]``, (numel,) each."""
    torch.manual_seed(seed)
    return [[torch.randn(numel).to(dtype) for _ in range(world_size)] for _ in range(world_size)]


def reduce_scatter(hosts, parts, outs, *, scale=1.0, adds=False):
    """Run it on all ranks; ``parts[sender][receiver]`` are as they are to be sent."""
    world_size = len(hosts)
    pendings = []
    for rank, host in enumerate(hosts):
        casts = outs[rank].dtype != parts[rank][rank].dtype
        scratch = [
            torch.empty_like(parts[rank][rank])
            for _ in range(host.num_scratch(adds=adds and not casts))
        ]
        pendings.append(
            host.reduce_scatter(
                parts[rank], out=outs[rank], scratch=scratch, scale=scale, adds=adds
            )
        )
    assert len(pendings) == world_size
    for pending in pendings:
        pending.wait()


# --- all_gather -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]
)
def test_every_section_arrives_bit_by_bit(world_size, is_lent, dtype):
    hosts = make_hosts(world_size)
    torch.manual_seed(0)
    wanted = [(torch.randn(5 + rank) * 3).to(dtype) for rank in range(world_size)]
    sections = [
        {
            r: values.clone() if r == rank else torch.zeros_like(values)
            for r, values in enumerate(wanted)
        }
        for rank in range(world_size)
    ]
    if is_lent:
        for rank, host in enumerate(hosts):
            sections[rank][rank] = lend(host, sections[rank][rank])
    for pending in [host.all_gather(s) for host, s in zip(hosts, sections, strict=True)]:
        pending.wait()
    for received in sections:
        assert all(torch.equal(received[r], values) for r, values in enumerate(wanted))


def test_a_rank_that_has_no_section_only_receives():
    hosts = make_hosts(3)
    sections = [{1: torch.full((4,), float(rank == 1))} for rank in range(3)]
    for pending in [host.all_gather(s) for host, s in zip(hosts, sections, strict=True)]:
        pending.wait()
    assert [s[1].tolist() for s in sections] == [[1.0] * 4] * 3


def test_what_was_sent_may_be_changed_once_it_was_launched():
    hosts = make_hosts(2)
    mine, theirs = torch.ones(3), torch.zeros(3)
    hosts[0].all_gather({0: mine})
    mine.fill_(7)
    hosts[1].all_gather({0: theirs}).wait()
    assert theirs.tolist() == [1.0] * 3


def test_a_rank_that_receives_nothing_waits_for_the_others_all_the_same():
    """So that it cannot run ahead of them, into ever more memory."""
    hosts = make_hosts(2, timeout_s=0.01)
    for pending in (
        hosts[0].all_gather({0: torch.ones(3)}),
        hosts[0].reduce_scatter(
            [torch.ones(0), torch.ones(3)],
            out=torch.ones(0),
            scratch=[],
            scale=1.0,
            adds=False,
        ),
    ):
        with pytest.raises(RuntimeError, match="rank 1 has sent nothing"):
            pending.wait()


def test_one_copy_serves_all_receivers():
    host = make_hosts(4)[0]
    host.all_gather({0: torch.ones(1000)})
    assert host.pool.nbytes == 4000


def test_what_lies_in_the_pool_is_not_copied():
    host = make_hosts(2)[0]
    host.all_gather({0: lend(host, torch.ones(1000))})
    assert host.pool.nbytes == 0


def test_gathers_may_be_awaited_in_any_order():
    hosts = make_hosts(2)
    received = [torch.zeros(2) for _ in range(3)]
    for value in range(3):
        hosts[0].all_gather({0: torch.full((2,), float(value))})
    pendings = [hosts[1].all_gather({0: place}) for place in received]
    for n in (2, 0, 1):
        pendings[n].wait()
    assert [place.tolist() for place in received] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]


# --- reduce_scatter -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    world_size=st.integers(2, 4),
    numel=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sum_dtype=st.sampled_from([None, torch.float32]),
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
    adds=st.booleans(),
    is_lent=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums_are_those_in_the_order_of_ranks(
    world_size, numel, dtype, sum_dtype, scale, adds, is_lent, seed
):
    hosts = make_hosts(world_size)
    sent = gradients(world_size, numel, dtype, seed)
    outs = [torch.full((numel,), 3.0, dtype=sum_dtype or dtype) for _ in hosts]
    wanted = [out.clone() for out in outs]
    for rank, out in enumerate(wanted):
        in_order = [sent[sender][rank].clone() for sender in range(world_size)]
        add_up(in_order, out=out, scale=scale, adds=adds)
    parts = [
        [lend(host, p) if is_lent else p.clone() for p in sent[rank]]
        for rank, host in enumerate(hosts)
    ]
    reduce_scatter(hosts, parts, outs, scale=scale, adds=adds)
    for out, expected in zip(outs, wanted, strict=True):
        assert torch.equal(out, expected)


@pytest.mark.parametrize("adds", [False, True])
def test_parts_of_others_are_left_as_they_are(adds):
    hosts = make_hosts(3)
    sent = gradients(3, 5)
    parts = [[lend(host, p) for p in sent[rank]] for rank, host in enumerate(hosts)]
    reduce_scatter(hosts, parts, [torch.zeros(5) for _ in hosts], adds=adds)
    for sender in range(3):
        for receiver in range(3):
            if sender != receiver:
                assert torch.equal(parts[sender][receiver], sent[sender][receiver])


def test_sections_may_have_unequal_lengths_or_none():
    hosts = make_hosts(3)
    numels = [4, 0, 2]
    parts = [[torch.full((n,), float(rank)) for n in numels] for rank in range(3)]
    outs = [torch.zeros(n) for n in numels]
    reduce_scatter(hosts, parts, outs)
    assert [out.tolist() for out in outs] == [[3.0] * 4, [], [3.0] * 2]


def test_parts_that_lie_elsewhere_are_copied_into_one_piece():
    host = make_hosts(4)[0]
    parts = [torch.ones(10) for _ in range(4)]
    host.reduce_scatter(parts, out=torch.zeros(10), scratch=[], scale=1.0, adds=False)
    assert host.pool.nbytes == 3 * 40


def test_another_call_on_another_rank_raises():
    hosts = make_hosts(2)
    hosts[0].launch_all_gather_ints([1, 2, 3])
    with pytest.raises(RuntimeError, match="rank 0 exchanges something else than this rank does"):
        hosts[1].all_gather({0: torch.zeros(3)}).wait()
    hosts = make_hosts(2)
    hosts[0].launch_all_gather_ints([1, 2, 3])
    with pytest.raises(RuntimeError, match="rank 0 exchanges something else than this rank does"):
        hosts[1].launch_all_gather_ints([1, 2])()


def test_memory_is_let_go_also_where_reading_fails():
    hosts = make_hosts(2)
    hosts[0].all_gather({0: torch.ones(3)})
    with pytest.raises(ValueError, match="buffer"):
        hosts[1].all_gather({0: torch.zeros(5000)}).wait()
    hosts[0].all_gather({0: torch.ones(3)})
    assert hosts[0].pool.nbytes == 12


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_lent_again_once_all_have_read_it():
    hosts = make_hosts(3)
    pool = hosts[0].pool
    first = pool.take(100, like=torch.ones(1))
    address = first.data_ptr()
    hosts[0].all_gather({0: first.narrow(0, 0, 100)})
    pool.give_back(first)
    seen = []
    for pending in [host.all_gather({0: torch.zeros(100)}) for host in hosts[1:]]:
        other = pool.take(100, like=torch.ones(1))
        seen.append(other.data_ptr())
        pool.give_back(other)
        pending.wait()
    lent = [pool.take(100, like=torch.ones(1)).data_ptr() for _ in range(2)]
    assert address not in seen
    assert address in lent


def test_a_sender_that_is_ahead_gets_other_memory_and_never_waits():
    hosts = make_hosts(2)
    for value in range(5):
        hosts[0].all_gather({0: torch.full((100,), float(value))})
    assert hosts[0].pool.nbytes == 5 * 400
    received = [torch.zeros(100) for _ in range(5)]
    for place in received:
        hosts[1].all_gather({0: place}).wait()
    assert [place[0].item() for place in received] == [0, 1, 2, 3, 4]
    for _ in range(5):
        hosts[0].all_gather({0: torch.ones(100)})
        hosts[1].all_gather({0: torch.zeros(100)}).wait()
    assert hosts[0].pool.nbytes == 5 * 400


def test_tensors_elsewhere_are_lent_memory_of_their_own_kind():
    host = make_hosts(2)[0]
    memory = host.pool.take(3, like=torch.ones(1, device="meta"))
    assert memory.device.type == "meta"


# --- integers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3])
def test_integers_of_all_ranks_come_in_order(world_size):
    hosts = make_hosts(world_size)
    waits = [host.launch_all_gather_ints([rank, -rank]) for rank, host in enumerate(hosts)]
    expected = [[rank, -rank] for rank in range(world_size)]
    assert [wait() for wait in waits] == [expected] * world_size


def test_as_many_integers_as_a_message_holds_can_be_gathered():
    host = make_hosts(2)[0]
    assert (host.can_gather_ints(MAX_INTS), host.can_gather_ints(MAX_INTS + 1)) == (True, False)


# --- meeting --------------------------------------------------------------------------------------


def test_a_peer_on_another_host_is_no_error_and_logged(caplog):
    host = Host(torch, 0, [1], timeout_s=1.0)
    other = Host(torch, 1, [0], timeout_s=1.0)
    card = other.card._replace(address=other.card.address._replace(host="elsewhere"))
    with caplog.at_level(logging.INFO):
        assert not host.open([host.card, card])
    assert "memory is not shared: the peer is on another host" in caplog.text
