import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives import StagingPool

LIKE = torch.ones(1)


@pytest.fixture
def pool():
    return StagingPool()


def test_what_is_taken_has_room_and_the_kind_of_its_model(pool):
    taken = pool.take(5, like=torch.ones(1, dtype=torch.bfloat16))
    assert (taken.numel(), taken.dtype, taken.dim()) == (5, torch.bfloat16, 1)


def test_memory_that_was_given_back_is_taken_again(pool):
    first = pool.take(5, like=LIKE)
    pool.give_back(first)
    assert pool.take(4, like=LIKE) is first


def test_memory_is_not_lent_twice_at_once(pool):
    assert pool.take(5, like=LIKE) is not pool.take(5, like=LIKE)


def test_kinds_do_not_mix(pool):
    pool.give_back(pool.take(5, like=LIKE))
    assert pool.take(5, like=LIKE.double()).dtype == torch.float64
    assert pool.nbytes == 5 * 4


def test_the_smallest_that_fits_is_taken(pool):
    taken = [pool.take(numel, like=LIKE) for numel in (9, 5, 7)]
    for tensor in taken:
        pool.give_back(tensor)
    assert pool.take(6, like=LIKE) is taken[2]


def test_of_equal_ones_the_last_used_is_taken(pool):
    taken = [pool.take(5, like=LIKE) for _ in range(3)]
    for number in (0, 2, 1):
        pool.give_back(taken[number])
    assert pool.take(5, like=LIKE) is taken[1]


def test_the_largest_size_that_was_announced_is_made_at_once(pool):
    pool.expect(9, like=LIKE)
    pool.expect(4, like=LIKE)
    assert pool.take(2, like=LIKE).numel() == 9


def test_one_that_is_too_small_makes_room(pool):
    pool.give_back(pool.take(5, like=LIKE))
    pool.give_back(pool.take(8, like=LIKE))
    assert pool.nbytes == 8 * 4


def test_memory_that_is_not_idle_is_left_alone():
    busy = set()
    pool = StagingPool(is_idle=lambda tensor: tensor.data_ptr() not in busy)
    first = pool.take(5, like=LIKE)
    busy.add(first.data_ptr())
    pool.give_back(first)
    second = pool.take(5, like=LIKE)
    assert second is not first
    pool.give_back(second)
    larger = pool.take(8, like=LIKE)  # drops the one that is idle, not the one that is read
    pool.give_back(larger)
    assert pool.nbytes == (5 + 8) * 4
    busy.clear()
    assert pool.take(5, like=LIKE) is first


def test_memory_is_made_as_told():
    made = []
    pool = StagingPool(
        make=lambda numel, like: made.append((numel, like.dtype)) or like.new_ones(numel)
    )
    assert pool.take(3, like=LIKE).tolist() == [1.0] * 3
    assert made == [(3, torch.float32)]


@given(st.lists(st.tuples(st.integers(1, 20), st.booleans()), max_size=40))
def test_as_many_are_held_as_were_ever_in_use_at_once(orders):
    pool, lent, most = StagingPool(), [], 0
    for numel, is_take in orders:
        if is_take or not lent:
            lent.append(pool.take(numel, like=LIKE))
            most = max(most, len(lent))
        else:
            pool.give_back(lent.pop(0))
        addresses = {tensor.data_ptr() for tensor in lent}
        assert len(addresses) == len(lent)
    for tensor in lent:
        pool.give_back(tensor)
    assert sum(map(len, pool._free.values())) <= most
