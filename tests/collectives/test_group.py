import gc
import types
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives import Group, LoneRank, Pending, RankGroup


class Work:
    """Counts its waits and fails if told to."""

    def __init__(self, error=None):
        self.num_waits = 0
        self._error = error

    def wait(self):
        self.num_waits += 1
        if self._error is not None:
            raise self._error


# --- Pending --------------------------------------------------------------------------------------


def test_pending_waits_once_for_each_work():
    works = [Work(), Work()]
    Pending(works).wait()
    assert [work.num_waits for work in works] == [1, 1]


def test_pending_waits_for_the_rest_after_one_raised():
    works = [Work(), Work(RuntimeError("peer is gone")), Work()]
    with pytest.raises(RuntimeError):
        Pending(works).wait()
    assert [work.num_waits for work in works] == [1, 1, 1]


def test_pending_raises_the_first_error():
    with pytest.raises(RuntimeError, match="first"):
        Pending([Work(RuntimeError("first")), Work(RuntimeError("second"))]).wait()


def test_a_second_wait_does_nothing():
    work = Work()
    pending = Pending([work])
    pending.wait()
    pending.wait()
    assert work.num_waits == 1


def test_a_second_wait_after_an_error_does_not_raise_again():
    pending = Pending([Work(RuntimeError("peer is gone"))])
    with pytest.raises(RuntimeError):
        pending.wait()
    pending.wait()


def test_pending_keeps_its_tensors_alive_until_it_is_awaited():
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    pending = Pending([Work()], [tensor])
    del tensor
    gc.collect()
    assert alive() is not None
    pending.wait()


def test_pending_lets_go_of_its_tensors_once_awaited():
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    pending = Pending([Work()], [tensor])
    del tensor
    pending.wait()
    gc.collect()
    assert alive() is None


def test_pending_nothing_is_awaited_at_once():
    Pending().wait()


def test_what_is_left_to_do_is_done_after_the_last_work():
    works = [Work(), Work()]
    done = []
    Pending(works, then=lambda: done.append([work.num_waits for work in works])).wait()
    assert done == [[1, 1]]


def test_what_is_left_to_do_is_not_done_before_the_wait():
    done = []
    Pending([Work()], then=lambda: done.append(1))
    assert done == []


def test_what_is_left_to_do_is_done_once():
    done = []
    pending = Pending(then=lambda: done.append(1))
    pending.wait()
    pending.wait()
    assert done == [1]


def test_what_is_left_to_do_is_not_done_after_an_error():
    done = []
    works = [Work(RuntimeError("peer is gone")), Work()]
    with pytest.raises(RuntimeError, match="peer is gone"):
        Pending(works, then=lambda: done.append(1)).wait()
    assert (done, works[1].num_waits) == ([], 1)


def test_what_is_left_to_do_is_not_done_by_a_second_wait_after_an_error():
    done = []
    pending = Pending([Work(RuntimeError("peer is gone"))], then=lambda: done.append(1))
    with pytest.raises(RuntimeError, match="peer is gone"):
        pending.wait()
    pending.wait()
    assert done == []


def test_what_raises_after_the_works_is_raised_and_not_done_again():
    calls = []

    def fail():
        calls.append(1)
        raise ValueError("odd")

    pending = Pending([Work()], then=fail)
    with pytest.raises(ValueError, match="odd"):
        pending.wait()
    pending.wait()
    assert calls == [1]


def test_pending_lets_go_of_what_was_left_to_do():
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    pending = Pending([Work()], then=tensor.zero_)
    pending.wait()
    del tensor
    gc.collect()
    assert alive() is None


def test_pendings_can_be_awaited_together():
    works = [Work(), Work()]
    Pending([Pending([works[0]]), Pending([works[1]])]).wait()
    assert [work.num_waits for work in works] == [1, 1]


# --- LoneRank -------------------------------------------------------------------------------------


def test_a_lone_rank_is_rank_0_of_1():
    assert (LoneRank().rank, LoneRank().world_size) == (0, 1)


def test_a_lone_rank_has_no_process_group_unless_given_one():
    given = DATA
    assert (LoneRank().process_group, LoneRank(given).process_group) == (None, given)


def test_a_lone_rank_broadcasts_nothing():
    tensor = torch.tensor([1.0, 2.0])
    LoneRank().broadcast(tensor, src=0).wait()
    assert tensor.tolist() == [1.0, 2.0]


def test_the_sum_over_a_lone_rank_is_its_own_part():
    part, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    LoneRank().reduce_scatter([part], out=out, scratch=None).wait()
    assert (out.tolist(), part.tolist()) == ([1.0, 2.0], [1.0, 2.0])


@pytest.mark.parametrize("maximum", [False, True])
def test_the_maximum_or_sum_over_a_lone_rank_is_its_own(maximum):
    tensor = torch.tensor([-1.0, 2.0])
    LoneRank().all_reduce(tensor, maximum=maximum)
    assert tensor.tolist() == [-1.0, 2.0]


def test_a_lone_rank_gathers_its_own_ints():
    assert LoneRank().all_gather_ints((3, -4)) == [[3, -4]]
    assert LoneRank().launch_all_gather_ints((3, -4))() == [[3, -4]]


def test_a_lone_rank_gathers_its_own_object():
    value = {"lr": 0.1}
    assert LoneRank().all_gather_object(value) == [value]


def test_a_lone_rank_cannot_send():
    with pytest.raises(AssertionError, match="a lone rank has no peer"):
        LoneRank().send(torch.ones(1), dst=0)


def test_a_lone_rank_cannot_receive():
    with pytest.raises(AssertionError, match="a lone rank has no peer"):
        LoneRank().recv(torch.ones(1), src=0)


@pytest.mark.parametrize("kind", [LoneRank, RankGroup])
def test_a_group_offers_every_operation_of_the_protocol(kind):
    operations = {
        name for name, value in vars(Group).items() if isinstance(value, types.FunctionType)
    }
    wanted = {name for name in operations if not name.startswith("_")}
    assert wanted <= set(dir(kind))


# --- RankGroup over a scripted ``distributed`` ----------------------------------------------------


class NamedGroup(str):
    """A process group that is told apart by name; unlike a plain string it can be referred to weakly."""


DATA, CONTROL = NamedGroup("data"), NamedGroup("control")


class Distributed:
    """Rank 1 of the group of global ranks 4, 6, 9; writes down what is asked of it."""

    ReduceOp = types.SimpleNamespace(MAX="max", SUM="sum")

    def __init__(self):
        self.calls = []
        self.work = Work()

    def get_rank(self, group):
        return 1

    def get_world_size(self, group):
        return 3

    def get_global_rank(self, group, rank):
        return [4, 6, 9][rank]

    def broadcast(self, tensor, *, src, group, async_op):
        self.calls.append(("broadcast", tensor.dtype, tensor.numel(), src, group, async_op))
        return self.work

    def isend(self, tensor, *, dst, group):
        self.calls.append(("isend", tensor.dtype, tensor.numel(), dst, group))
        return self.work

    def irecv(self, tensor, *, src, group):
        self.calls.append(("irecv", tensor.dtype, tensor.numel(), src, group))
        return self.work

    def reduce_scatter(self, out, parts, *, group, async_op):
        numels = [part.numel() for part in parts]
        self.calls.append(("reduce_scatter", out.dtype, out.numel(), numels, group, async_op))
        return self.work

    def all_reduce(self, tensor, *, op, group):
        self.calls.append(("all_reduce", tensor.dtype, tensor.numel(), op, group))

    def all_gather(self, everyone, mine, *, group, async_op):
        assert async_op
        self.calls.append(("all_gather", mine.dtype, mine.numel(), group))
        for rank, theirs in enumerate(everyone):
            theirs.copy_(mine + rank)
        return self.work

    def all_gather_object(self, everyone, value, *, group):
        self.calls.append(("all_gather_object", group))
        everyone[:] = [(rank, value) for rank in range(len(everyone))]


@pytest.fixture
def distributed():
    return Distributed()


@pytest.fixture
def group(distributed):
    return RankGroup(torch, distributed, DATA, control=CONTROL)


def test_a_rank_group_knows_its_place(group):
    assert (group.rank, group.world_size, group.process_group) == (1, 3, DATA)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64]
)
def test_a_broadcast_sends_the_bytes_of_any_dtype(group, distributed, dtype):
    tensor = torch.zeros(5, dtype=dtype)
    group.broadcast(tensor, src=0)
    assert distributed.calls[0][:3] == ("broadcast", torch.uint8, 5 * tensor.element_size())


def test_a_broadcast_is_asynchronous_and_from_the_global_rank(group, distributed):
    group.broadcast(torch.zeros(5), src=2)
    assert distributed.calls[0][3::2] == (9, True)


def test_a_broadcast_on_the_cpu_travels_over_the_control_group(group, distributed):
    group.broadcast(torch.zeros(5), src=2)
    assert distributed.calls[0][4] == CONTROL


def test_a_broadcast_elsewhere_travels_over_the_process_group(group, distributed):
    group.broadcast(torch.zeros(5, device="meta"), src=2)
    assert distributed.calls[0][4] == DATA


def test_a_broadcast_is_pending_until_its_work_is_awaited(group, distributed):
    pending = group.broadcast(torch.zeros(5), src=0)
    assert distributed.work.num_waits == 0
    pending.wait()
    assert distributed.work.num_waits == 1


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


def test_gathered_ints_are_plain_and_in_rank_order(group):
    assert group.all_gather_ints([2**62, -5]) == [[2**62 + r, -5 + r] for r in range(3)]


def test_a_gather_of_ints_is_launched_before_it_is_awaited(group, distributed):
    wait = group.launch_all_gather_ints([7])
    assert (distributed.calls, distributed.work.num_waits) == (
        [("all_gather", torch.int64, 1, "control")],
        0,
    )
    assert (wait(), distributed.work.num_waits) == ([[7], [8], [9]], 1)


def test_ints_travel_as_int64_over_the_control_group(group, distributed):
    group.all_gather_ints([1, 2])
    assert distributed.calls == [("all_gather", torch.int64, 2, CONTROL)]


def test_gathered_objects_stand_in_rank_order(group):
    assert group.all_gather_object("lr") == [(0, "lr"), (1, "lr"), (2, "lr")]


# --- reduce_scatter -------------------------------------------------------------------------------


def test_off_the_cpu_the_backend_reduces_over_the_process_group(group, distributed):
    parts = [torch.zeros(5, device="meta") for _ in range(3)]
    group.reduce_scatter(parts, out=torch.zeros(5, device="meta"), scratch=None)
    assert distributed.calls == [("reduce_scatter", torch.float32, 5, [5, 5, 5], DATA, True)]


def test_off_the_cpu_a_reduction_is_pending_until_its_work_is_awaited(group, distributed):
    parts = [torch.zeros(5, device="meta") for _ in range(3)]
    pending = group.reduce_scatter(parts, out=torch.zeros(5, device="meta"), scratch=None)
    assert distributed.work.num_waits == 0
    pending.wait()
    assert distributed.work.num_waits == 1


def test_on_the_cpu_each_part_goes_to_its_rank_as_bytes_over_the_control_group(group, distributed):
    parts = [torch.zeros(numel) for numel in (3, 4, 5)]
    group.reduce_scatter(parts, out=torch.zeros(4), scratch=torch.zeros(8))
    assert sorted(distributed.calls) == [
        ("irecv", torch.uint8, 16, 4, CONTROL),
        ("irecv", torch.uint8, 16, 9, CONTROL),
        ("isend", torch.uint8, 12, 4, CONTROL),
        ("isend", torch.uint8, 20, 9, CONTROL),
    ]


def test_on_the_cpu_every_receive_is_launched_before_a_send(group, distributed):
    parts = [torch.zeros(4) for _ in range(3)]
    group.reduce_scatter(parts, out=torch.zeros(4), scratch=torch.zeros(8))
    assert [call[0] for call in distributed.calls] == ["irecv", "irecv", "isend", "isend"]


def test_nothing_is_added_up_before_the_wait(group):
    parts, out = [torch.ones(4) for _ in range(3)], torch.zeros(4)
    pending = group.reduce_scatter(parts, out=out, scratch=torch.ones(8))
    assert out.tolist() == [0.0] * 4
    pending.wait()
    assert out.tolist() == [3.0] * 4


def test_a_rank_that_owns_nothing_still_sends_its_parts(group, distributed):
    parts = [torch.zeros(3), torch.zeros(0), torch.zeros(5)]
    group.reduce_scatter(parts, out=torch.zeros(0), scratch=torch.zeros(1)).wait()
    assert [call[:3] for call in distributed.calls if call[0] == "isend"] == [
        ("isend", torch.uint8, 12),
        ("isend", torch.uint8, 20),
    ]


def reduced(numels, values, dtype=torch.float32):
    """A function that reduces parts of ``numels`` elements, filled with the value of each rank."""

    def serve(group):
        parts = [torch.full((numel,), values[group.rank], dtype=dtype) for numel in numels]
        before = [part.clone() for part in parts]
        numel = numels[group.rank]
        out, scratch = (
            torch.zeros(numel, dtype=dtype),
            torch.zeros(len(numels) * numel, dtype=dtype),
        )
        group.reduce_scatter(parts, out=out, scratch=scratch).wait()
        assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
        return out.tolist()

    return serve


@pytest.mark.parametrize("numels", [(2, 2, 2), (3, 1, 4), (0, 2, 5), (0, 0, 0)])
def test_every_rank_gets_the_sum_of_its_part(run_threads, numels):
    run = run_threads(3, reduced(numels, [1.0, 2.0, 4.0]))
    assert (run.texts, run.results) == (["", "", ""], [[7.0] * numel for numel in numels])


def test_the_sum_is_taken_in_the_order_of_ranks(run_threads):
    """1 + 2**53 rounds to 2**53, so ((1 + 2**53) - 2**53) is 0 and any other order gives 1."""
    values = [1.0, 2.0**53, -(2.0**53)]
    run = run_threads(3, reduced((2, 2, 2), values, torch.float64))
    assert run.results == [[0.0, 0.0]] * 3


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=4))
def test_every_rank_gets_the_bits_of_the_sum_in_the_order_of_ranks(run_threads, values):
    expected = torch.tensor(values[0])
    for value in values[1:]:
        expected = expected + torch.tensor(value)
    if len(values) == 1:
        results = [reduced((2,), values)(LoneRank())]
    else:
        results = run_threads(len(values), reduced((2,) * len(values), values)).results
    assert repr(results) == repr([[expected.item()] * 2] * len(values))


def test_each_rank_sends_every_other_its_part_once(run_threads):
    run = run_threads(3, reduced((3, 1, 4), [1.0, 2.0, 4.0]))
    assert sorted((m.src, m.dst, m.numel) for m in run.world.messages) == [
        (0, 1, 1),
        (0, 2, 4),
        (1, 0, 3),
        (1, 2, 4),
        (2, 0, 3),
        (2, 1, 1),
    ]
    assert run.num_left_over == 0


def test_a_destroyed_process_group_is_named_as_such(distributed):
    short_lived = NamedGroup("gone")
    group = RankGroup(torch, distributed, short_lived, control=CONTROL)
    del short_lived
    with pytest.raises(RuntimeError, match="the process group of this optimizer was destroyed"):
        group.all_reduce(torch.zeros(1, device="meta"))


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
