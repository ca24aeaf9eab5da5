"""The backend's own collectives, where tensors do not lie on the CPU; the scripted module does what they do."""

import pytest
import torch

from shardopt.collectives import RankGroup
from tests.collectives.scripted import CONTROL, DATA, Distributed, elsewhere


@pytest.fixture
def distributed():
    return Distributed()


@pytest.fixture
def group(distributed):
    return RankGroup(torch, distributed, DATA, control=CONTROL)


def side_by_side(*numels, dtype=torch.float32):
    """Sections of one memory, back to back."""
    memory = elsewhere(torch.arange(float(sum(numels))).to(dtype))
    return memory, list(memory.split(list(numels)))


# --- all_gather -----------------------------------------------------------------------------------


def test_equal_sections_side_by_side_are_gathered_in_place(group, distributed):
    memory, sections = side_by_side(4, 4, 4)
    group.all_gather(dict(enumerate(sections)))
    assert distributed.calls == [
        ("all_gather_into_tensor", memory.data_ptr(), 48, 16),
        ("over", DATA, True),
    ]


def test_sections_are_gathered_in_rank_order_whatever_the_order_of_the_mapping(group, distributed):
    memory, sections = side_by_side(4, 4, 4)
    group.all_gather({2: sections[2], 0: sections[0], 1: sections[1]})
    assert distributed.calls[0][:2] == ("all_gather_into_tensor", memory.data_ptr())


@pytest.mark.parametrize("numels", [(4, 5, 4), (3, 3, 4), (5, 4, 4)])
def test_unequal_sections_are_broadcast_each_from_its_rank(group, distributed, numels):
    _, sections = side_by_side(*numels)
    group.all_gather(dict(enumerate(sections)))
    assert distributed.calls == [
        ("broadcast", torch.uint8, 4 * numel, src, DATA, True)
        for numel, src in zip(numels, (4, 6, 9), strict=True)
    ]


def test_equal_sections_that_lie_apart_are_broadcast(group, distributed):
    group.all_gather({rank: elsewhere(torch.zeros(4)) for rank in range(3)})
    assert [call[0] for call in distributed.calls] == ["broadcast"] * 3


def test_equal_sections_in_another_order_in_memory_are_broadcast(group, distributed):
    _, sections = side_by_side(4, 4, 4)
    group.all_gather({0: sections[1], 1: sections[0], 2: sections[2]})
    assert [call[0] for call in distributed.calls] == ["broadcast"] * 3


def test_sections_of_some_ranks_are_broadcast(group, distributed):
    _, sections = side_by_side(4, 4, 4)
    group.all_gather({0: sections[0], 1: sections[1]})
    assert [call[3] for call in distributed.calls] == [4, 6]


def test_broadcasts_are_launched_in_rank_order_on_every_rank(group, distributed):
    sections = {rank: elsewhere(torch.zeros(4 + rank)) for rank in (2, 0, 1)}
    group.all_gather(sections)
    assert [call[3] for call in distributed.calls] == [4, 6, 9]


def test_equal_sections_that_touch_but_are_not_one_memory_are_broadcast(group, distributed):
    """Blocks of an allocator may lie side by side, but no tensor reaches from one into the next."""
    memory = bytearray(48)
    sections = {
        rank: elsewhere(torch.frombuffer(memory, dtype=torch.float32, count=4, offset=16 * rank))
        for rank in range(3)
    }
    group.all_gather(sections)
    assert [call[0] for call in distributed.calls] == ["broadcast"] * 3


def test_a_gather_in_place_is_pending_until_its_work_is_awaited(group, distributed):
    _, sections = side_by_side(4, 4, 4)
    pending = group.all_gather(dict(enumerate(sections)))
    assert distributed.num_waits == [0]
    pending.wait()
    assert distributed.num_waits == [1]


# --- reduce_scatter -------------------------------------------------------------------------------


def reduce(group, distributed, parts, out, *, theirs=(10.0, 100.0), scale=1.0, adds=False):
    """Reduce with ranks 0 and 2, whose parts are full of one value each; returns what ``out`` is then."""
    for rank, value in zip((0, 2), theirs, strict=True):
        distributed.theirs[rank] = torch.full((out.numel(),), value).to(parts[0].dtype)
    casts = out.dtype != parts[0].dtype
    num = group.num_scratch("cuda", adds=adds, casts=casts)
    scratch = [elsewhere(torch.zeros(out.numel(), dtype=parts[0].dtype)) for _ in range(num)]
    group.reduce_scatter(parts, out=out, scratch=scratch, scale=scale, adds=adds).wait()
    return out.tolist()


def test_equal_parts_side_by_side_are_reduced_as_one_tensor(group, distributed):
    memory, parts = side_by_side(2, 2, 2)
    found = reduce(group, distributed, parts, elsewhere(torch.zeros(2)))
    assert found == [112.0, 113.0]
    assert distributed.calls == [
        ("reduce_scatter_tensor", memory.data_ptr(), 6, 2),
        ("over", DATA, True),
    ]


def test_unequal_parts_are_reduced_as_a_list(group, distributed):
    _, parts = side_by_side(3, 2, 1)
    found = reduce(group, distributed, parts, elsewhere(torch.zeros(2)))
    assert found == [113.0, 114.0]
    assert distributed.calls == [("reduce_scatter", [3, 2, 1], 2), ("over", DATA, True)]


@pytest.mark.parametrize("numels", [(2, 2, 2), (3, 2, 1)])
def test_the_sum_is_scaled(group, distributed, numels):
    _, parts = side_by_side(*numels)
    parts[1].fill_(2.0)
    found = reduce(group, distributed, parts, elsewhere(torch.zeros(2)), scale=0.25)
    assert found == [28.0, 28.0]


@pytest.mark.parametrize("numels", [(2, 2, 2), (3, 2, 1)])
def test_the_scaled_sum_is_added_to_what_is_there(group, distributed, numels):
    _, parts = side_by_side(*numels)
    parts[1].fill_(2.0)
    out = elsewhere(torch.full((2,), 1000.0))
    assert reduce(group, distributed, parts, out, scale=0.25, adds=True) == [1028.0, 1028.0]


def test_sums_of_another_dtype_than_the_wire_are_taken_here(group, distributed):
    """In bfloat16 256 + 1 + 1 is 256, whatever the order."""
    _, parts = side_by_side(2, 2, 2, dtype=torch.bfloat16)
    parts[1].fill_(1.0)
    found = reduce(group, distributed, parts, elsewhere(torch.zeros(2)), theirs=(256.0, 1.0))
    assert found == [258.0, 258.0]
    assert distributed.calls == [("all_to_all", [2, 2, 2], 3), ("over", DATA, True)]


@pytest.mark.parametrize(("adds", "expected"), [(False, 129.0), (True, 1129.0)])
def test_sums_of_another_dtype_are_scaled_and_added(group, distributed, adds, expected):
    _, parts = side_by_side(2, 2, 2, dtype=torch.bfloat16)
    parts[1].fill_(1.0)
    out = elsewhere(torch.full((2,), 1000.0))
    found = reduce(group, distributed, parts, out, theirs=(256.0, 1.0), scale=0.5, adds=adds)
    assert found == [expected, expected]


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_written_before_the_wait(group, adds, dtype):
    _, parts = side_by_side(2, 2, 2, dtype=dtype)
    out = elsewhere(torch.full((2,), 7.0))
    num = group.num_scratch("cuda", adds=adds, casts=dtype != torch.float32)
    scratch = [elsewhere(torch.zeros(2, dtype=dtype)) for _ in range(num)]
    group.reduce_scatter(parts, out=out, scratch=scratch, scale=0.5, adds=adds)
    assert out.tolist() == [7.0, 7.0]
