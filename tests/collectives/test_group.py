import gc
import types
import weakref

import pytest
import torch

from shardopt.collectives import Group, HybridGroup, LoneRank, Pending, RankGroup


class NamedGroup(str):
    """A process group that is told apart by name; unlike a plain string it can be referred to weakly."""


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
    given = NamedGroup("data")
    assert (LoneRank().process_group, LoneRank(given).process_group) == (None, given)


def test_a_lone_rank_is_the_first_and_only_member():
    assert (LoneRank().num_members, LoneRank().is_first, LoneRank().rank_of(0)) == (1, True, 0)


def test_a_lone_rank_has_no_replicas():
    tensor = torch.tensor([1.0, 2.0])
    LoneRank().reduce_over_replicas(tensor)
    assert (LoneRank().is_first_replica, tensor.tolist()) == (True, [1.0, 2.0])


def test_a_lone_rank_broadcasts_nothing():
    tensor = torch.tensor([1.0, 2.0])
    LoneRank().broadcast(tensor).wait()
    assert tensor.tolist() == [1.0, 2.0]


def test_a_lone_rank_gathers_nothing():
    section = torch.tensor([1.0, 2.0])
    LoneRank().all_gather({0: section}).wait()
    assert section.tolist() == [1.0, 2.0]


def test_the_sum_over_a_lone_rank_is_its_own_part():
    part, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    LoneRank().reduce_scatter([part], out=out, scratch=[]).wait()
    assert (out.tolist(), part.tolist()) == ([1.0, 2.0], [1.0, 2.0])


def test_a_lone_rank_takes_its_part_when_it_is_awaited():
    part, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    LoneRank().reduce_scatter([part], out=out, scratch=[])
    assert out.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("adds", "expected"), [(False, [0.5, 1.0]), (True, [10.5, 11.0])])
def test_the_sum_over_a_lone_rank_is_scaled_and_added_as_told(adds, expected):
    part, out = torch.tensor([1.0, 2.0]), torch.full((2,), 10.0)
    LoneRank().reduce_scatter([part], out=out, scratch=[], scale=0.5, adds=adds).wait()
    assert out.tolist() == expected


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("casts", [False, True])
def test_a_lone_rank_needs_no_scratch(adds, casts):
    assert LoneRank().num_scratch("cpu", adds=adds, casts=casts) == 0


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


@pytest.mark.parametrize("kind", [LoneRank, RankGroup, HybridGroup])
def test_a_group_offers_every_operation_of_the_protocol(kind):
    operations = {
        name
        for name, value in vars(Group).items()
        if isinstance(value, (types.FunctionType, property))
    }
    wanted = {name for name in operations if not name.startswith("_")}
    assert wanted - {"rank", "world_size", "num_members", "pool"} <= set(dir(kind))
