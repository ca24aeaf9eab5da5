"""A process group over a scripted ``distributed`` module: which primitive carries what, and over which group."""

import weakref

import pytest
import torch

from shardopt.collectives import LoneRank, RankGroup
from shardopt.collectives.host import Host
from tests.collectives.scripted import CONTROL, DATA, Distributed, NamedGroup


@pytest.fixture
def distributed():
    return Distributed()


@pytest.fixture
def group(distributed):
    return RankGroup(torch, distributed, DATA, control=CONTROL)


def test_a_rank_group_knows_its_place(group):
    assert (group.rank, group.world_size, group.process_group) == (1, 3, DATA)


def test_every_rank_is_a_member_and_its_own_rank(group):
    assert (group.num_members, [group.rank_of(member) for member in range(3)]) == (3, [0, 1, 2])


@pytest.mark.parametrize(("rank", "is_first"), [(0, True), (1, False), (2, False)])
def test_rank_0_is_the_first_member(rank, is_first):
    group = RankGroup(torch, Distributed(rank), DATA, control=CONTROL)
    assert group.is_first is is_first


def test_a_rank_group_has_no_replicas(group, distributed):
    tensor = torch.ones(2)
    group.reduce_over_replicas(tensor)
    assert (group.is_first_replica, tensor.tolist(), distributed.calls) == (True, [1.0, 1.0], [])


# --- broadcast ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64]
)
def test_a_broadcast_sends_the_bytes_of_any_dtype(group, distributed, dtype):
    tensor = torch.zeros(5, dtype=dtype)
    group.broadcast(tensor)
    assert distributed.calls[0][:3] == ("broadcast", torch.uint8, 5 * tensor.element_size())


def test_a_broadcast_is_asynchronous_and_from_the_global_rank_of_rank_0(group, distributed):
    group.broadcast(torch.zeros(5))
    assert distributed.calls[0][3::2] == (4, True)


def test_a_broadcast_on_the_cpu_travels_over_the_control_group(group, distributed):
    group.broadcast(torch.zeros(5))
    assert distributed.calls[0][4] == CONTROL


def test_a_broadcast_elsewhere_travels_over_the_process_group(group, distributed):
    group.broadcast(torch.zeros(5, device="meta"))
    assert distributed.calls[0][4] == DATA


def test_a_broadcast_is_pending_until_its_work_is_awaited(group, distributed):
    pending = group.broadcast(torch.zeros(5))
    assert distributed.num_waits == [0]
    pending.wait()
    assert distributed.num_waits == [1]


# --- send, recv, all_reduce -----------------------------------------------------------------------


def test_a_send_goes_as_bytes_to_the_global_rank(group, distributed):
    group.send(torch.zeros(5), dst=0).wait()
    assert distributed.calls == [("isend", torch.uint8, 20, 4, CONTROL)]


def test_a_receive_comes_as_bytes_from_the_global_rank(group, distributed):
    group.recv(torch.zeros(5), src=2).wait()
    assert distributed.calls == [("irecv", torch.uint8, 20, 9, CONTROL)]


def test_the_maximum_of_cpu_tensors_is_taken_over_the_control_group(group, distributed):
    group.all_reduce(torch.zeros(1), maximum=True)
    assert distributed.calls == [("all_reduce", torch.float32, 1, "max", CONTROL)]


@pytest.mark.parametrize(("device", "group_name"), [("cpu", "control"), ("meta", "data")])
def test_a_sum_is_taken_where_no_maximum_is_asked_for(group, distributed, device, group_name):
    group.all_reduce(torch.zeros(1, device=device))
    assert distributed.calls == [("all_reduce", torch.float32, 1, "sum", group_name)]


def test_the_maximum_of_other_tensors_is_taken_over_the_process_group(group, distributed):
    group.all_reduce(torch.zeros(1, device="meta"), maximum=True)
    assert distributed.calls == [("all_reduce", torch.float32, 1, "max", DATA)]


# --- plain values ---------------------------------------------------------------------------------


def test_gathered_ints_are_plain_and_in_rank_order(group):
    assert group.all_gather_ints([2**62, -5]) == [[2**62 + r, -5 + r] for r in range(3)]


def test_a_gather_of_ints_is_launched_before_it_is_awaited(group, distributed):
    wait = group.launch_all_gather_ints([7])
    assert (distributed.calls, distributed.num_waits) == (
        [("all_gather", torch.int64, 1, "control")],
        [0],
    )
    assert (wait(), distributed.num_waits) == ([[7], [8], [9]], [1])


def test_ints_travel_as_int64_over_the_control_group(group, distributed):
    group.all_gather_ints([1, 2])
    assert distributed.calls == [("all_gather", torch.int64, 2, CONTROL)]


def test_gathered_objects_stand_in_rank_order(group):
    assert group.all_gather_object("lr") == [(0, "lr"), (1, "lr"), (2, "lr")]


# --- all_gather on the CPU ------------------------------------------------------------------------


def test_on_the_cpu_a_section_goes_to_every_other_rank_and_the_others_come(group, distributed):
    group.all_gather({rank: torch.zeros(numel) for rank, numel in enumerate((3, 4, 5))})
    assert sorted(distributed.calls) == [
        ("irecv", torch.uint8, 12, 4, CONTROL),
        ("irecv", torch.uint8, 20, 9, CONTROL),
        ("isend", torch.uint8, 16, 4, CONTROL),
        ("isend", torch.uint8, 16, 9, CONTROL),
    ]


def test_a_rank_that_has_no_section_only_receives(group, distributed):
    group.all_gather({2: torch.zeros(5)})
    assert distributed.calls == [("irecv", torch.uint8, 20, 9, CONTROL)]


def test_each_rank_turns_to_the_one_after_it_first(group, distributed):
    group.all_gather({1: torch.zeros(4)})
    assert [call[3] for call in distributed.calls] == [9, 4]


def test_a_gather_is_pending_until_all_of_it_is_awaited(group, distributed):
    pending = group.all_gather({0: torch.zeros(3), 1: torch.zeros(4)})
    assert distributed.num_waits == [0, 0, 0]
    pending.wait()
    assert distributed.num_waits == [1, 1, 1]


def test_on_the_cpu_bytes_of_any_dtype_are_gathered(group, distributed):
    group.all_gather({0: torch.zeros(3, dtype=torch.bfloat16)})
    assert distributed.calls == [("irecv", torch.uint8, 6, 4, CONTROL)]


# --- reduce_scatter on the CPU --------------------------------------------------------------------


def scratch_for(group, out, *, adds=False, dtype=None):
    casts = dtype is not None and dtype != out.dtype
    num = group.num_scratch("cpu", adds=adds, casts=casts)
    return [torch.zeros(out.numel(), dtype=dtype) for _ in range(num)]


def test_on_the_cpu_each_part_goes_to_its_rank_as_bytes_over_the_control_group(group, distributed):
    parts, out = [torch.zeros(numel) for numel in (3, 4, 5)], torch.zeros(4)
    group.reduce_scatter(parts, out=out, scratch=scratch_for(group, out))
    assert sorted(distributed.calls) == [
        ("irecv", torch.uint8, 16, 4, CONTROL),
        ("irecv", torch.uint8, 16, 9, CONTROL),
        ("isend", torch.uint8, 12, 4, CONTROL),
        ("isend", torch.uint8, 20, 9, CONTROL),
    ]


def test_nothing_is_added_up_before_the_wait(group):
    parts, out = [torch.ones(4) for _ in range(3)], torch.zeros(4)
    scratch = [torch.ones(4)]
    pending = group.reduce_scatter(parts, out=out, scratch=scratch)
    assert out.tolist() == [0.0] * 4
    pending.wait()
    assert out.tolist() == [2.0] * 4  # what the scripted module received is nothing


def test_a_rank_that_owns_nothing_sends_its_parts_and_receives_nothing(group, distributed):
    parts, out = [torch.zeros(3), torch.zeros(0), torch.zeros(5)], torch.zeros(0)
    group.reduce_scatter(parts, out=out, scratch=scratch_for(group, out)).wait()
    assert sorted(call[:3] for call in distributed.calls) == [
        ("isend", torch.uint8, 12),
        ("isend", torch.uint8, 20),
    ]


def test_nothing_is_sent_to_a_rank_that_owns_nothing(group, distributed):
    parts, out = [torch.zeros(0), torch.zeros(4), torch.zeros(5)], torch.zeros(4)
    group.reduce_scatter(parts, out=out, scratch=scratch_for(group, out)).wait()
    assert [call[3] for call in distributed.calls if call[0] == "isend"] == [9]


@pytest.mark.parametrize(
    ("adds", "casts", "num"),
    [(False, False, 1), (True, False, 2), (False, True, 2), (True, True, 2)],
)
def test_on_the_cpu_the_first_part_received_needs_scratch_only_if_it_cannot_be_summed_in_place(
    group, adds, casts, num
):
    assert group.num_scratch("cpu", adds=adds, casts=casts) == num


@pytest.mark.parametrize(
    ("adds", "casts", "num"),
    [(False, False, 0), (True, False, 1), (False, True, 3), (True, True, 3)],
)
def test_elsewhere_scratch_is_for_what_cannot_go_straight_to_its_place(group, adds, casts, num):
    assert group.num_scratch("cuda", adds=adds, casts=casts) == num


# --- groups that go -------------------------------------------------------------------------------


def test_a_destroyed_process_group_is_named_as_such(distributed):
    short_lived = NamedGroup("gone")
    group = RankGroup(torch, distributed, short_lived, control=CONTROL)
    del short_lived
    with pytest.raises(
        RuntimeError, match="the process group of this optimizer was destroyed"
    ) as e:
        group.all_reduce(torch.zeros(1, device="meta"))
    assert str(e.value).endswith("; make the optimizer anew after init_process_group()")


def test_a_group_is_not_kept_alive(distributed):
    short_lived = NamedGroup("gone")
    seen = weakref.ref(short_lived)
    groups = [
        RankGroup(torch, distributed, short_lived, control=short_lived),
        LoneRank(short_lived),
    ]
    del short_lived
    assert seen() is None
    assert len(groups) == 2


# --- meeting --------------------------------------------------------------------------------------


class Meeting(Distributed):
    """Three ranks in one process that meet one after the other: gathers answer with what was prepared."""

    def __init__(self, rank, objects, flags):
        super().__init__(rank)
        self._objects = objects
        self._flags = flags

    def all_gather_object(self, everyone, value, *, group):
        everyone[:] = self._objects(value)

    def all_gather(self, everyone, mine, *, group, async_op):
        for theirs, flag in zip(everyone, self._flags(int(mine)), strict=True):
            theirs.fill_(flag)
        return self._work()


def meet(objects, flags=lambda mine: [mine] * 3, *, shares_memory=True):
    distributed = Meeting(1, objects, flags)
    group = RankGroup(torch, distributed, DATA, control=CONTROL)
    group.meet(shares_memory=shares_memory, timeout_s=1.0)
    return group, distributed


def test_ranks_that_meet_take_the_tag_of_rank_0(distributed):
    group, distributed = meet(lambda mine: [(77, None), mine, (5, None)], shares_memory=False)
    group.send(torch.zeros(1), dst=2)
    group.recv(torch.zeros(1), src=0)
    assert distributed.tags == [77, 77]


def test_a_rank_without_memory_to_share_leaves_all_without():
    group, _ = meet(lambda mine: [(7, None), mine, (7, mine[1])])
    assert not group.shares_memory


def test_ranks_that_can_read_each_other_share_memory():
    others = {
        rank: Host(torch, rank, [r for r in range(3) if r != rank], timeout_s=1.0)
        for rank in (0, 2)
    }
    group, _ = meet(lambda mine: [(7, others[0].card), mine, (7, others[2].card)])
    assert group.shares_memory


def test_one_rank_that_cannot_read_the_others_leaves_all_without():
    others = {
        rank: Host(torch, rank, [r for r in range(3) if r != rank], timeout_s=1.0)
        for rank in (0, 2)
    }
    group, _ = meet(
        lambda mine: [(7, others[0].card), mine, (7, others[2].card)], lambda mine: [0, mine, 1]
    )
    assert not group.shares_memory


def test_nothing_is_shared_that_was_not_asked_for():
    group, _ = meet(lambda mine: [(7, None), mine, (7, None)], shares_memory=False)
    assert not group.shares_memory
