import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.partition import imbalance_of, loads_of, plan_owners

numel_lists = st.lists(st.integers(0, 1000), max_size=40)
cost_lists = st.lists(st.floats(0, 1000, allow_nan=False), max_size=40)
world_sizes = st.integers(1, 9)

ROUNDING = 1 + 2**-40
"""More than sums of 40 doubles can be off by, each addition by 2**-53 of the sum."""


def test_the_worked_example_of_plan_owners_holds():
    assert plan_owners([4, 9, 5, 3], [0, 0]) == [1, 0, 1, 0]


@given(numel_lists, world_sizes)
def test_every_parameter_gets_one_owner_that_exists(numels, world_size):
    owners = plan_owners(numels, [0] * world_size)
    assert [owner in range(world_size) for owner in owners] == [True] * len(numels)


@given(numel_lists, world_sizes)
def test_loads_that_start_equal_end_within_the_largest_parameter(numels, world_size):
    loads = loads_of(numels, plan_owners(numels, [0] * world_size), world_size)
    assert max(loads) - min(loads) <= max(numels, default=0)


@given(numel_lists, st.lists(st.integers(0, 2000), min_size=1, max_size=6))
def test_loads_that_start_unequal_never_end_further_apart_than_one_parameter_or_the_start(
    numels, loads
):
    owned = loads_of(numels, plan_owners(numels, loads), len(loads))
    totals = [before + new for before, new in zip(loads, owned, strict=True)]
    allowed = max(max(numels, default=0), max(loads) - min(loads))
    assert max(totals) - min(totals) <= allowed


@given(numel_lists, world_sizes)
def test_each_parameter_goes_to_a_least_loaded_rank_in_descending_order(numels, world_size):
    owners = plan_owners(numels, [0] * world_size)
    loads = [0] * world_size
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        assert owners[index] == loads.index(min(loads))
        loads[owners[index]] += numels[index]


@given(cost_lists, world_sizes)
def test_costs_that_are_no_integers_end_within_the_largest_cost(costs, world_size):
    loads = loads_of(costs, plan_owners(costs, [0] * world_size), world_size)
    assert max(loads) <= (min(loads) + max(costs, default=0)) * ROUNDING


@given(cost_lists, st.lists(st.floats(0, 2000), min_size=1, max_size=6))
def test_each_cost_goes_to_a_least_loaded_rank_in_descending_order(costs, loads):
    owners = plan_owners(costs, loads)
    totals = list(loads)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        assert owners[index] == totals.index(min(totals))
        totals[owners[index]] += costs[index]


def test_parameters_that_cost_nothing_go_to_the_rank_that_carries_least():
    assert plan_owners([0.0, 0.0, 2.5], [1.0, 0.5]) == [0, 0, 1]


@given(numel_lists, world_sizes)
def test_equal_arguments_give_equal_owners(numels, world_size):
    assert plan_owners(numels, [0] * world_size) == plan_owners(tuple(numels), (0,) * world_size)


def test_of_equal_parameters_the_earlier_goes_to_the_lower_rank():
    assert plan_owners([5, 5, 5], [0, 0, 0]) == [0, 1, 2]


def test_a_rank_that_carries_more_already_is_filled_last():
    assert plan_owners([3, 3, 3], [7, 0]) == [1, 1, 1]


def test_a_lone_rank_owns_everything():
    assert plan_owners([3, 0, 8], [0]) == [0, 0, 0]


def test_the_loads_given_by_the_caller_are_left_alone():
    loads = [1, 2]
    plan_owners([3, 4], loads)
    assert loads == [1, 2]


def test_no_parameters_have_no_owners():
    assert plan_owners([], [0, 0]) == []


@given(numel_lists, world_sizes)
def test_loads_sum_to_all_elements(numels, world_size):
    owners = plan_owners(numels, [0] * world_size)
    assert sum(loads_of(numels, owners, world_size)) == sum(numels)


def test_loads_count_the_elements_of_each_owner():
    assert loads_of([4, 9, 5, 3], [1, 0, 1, 0], 3) == [12, 9, 0]


def test_loads_reject_owners_for_other_parameters():
    with pytest.raises(ValueError, match="zip"):
        loads_of([1, 2], [0], 1)


# --- imbalance_of ---------------------------------------------------------------------------------

load_lists = st.lists(st.floats(0, 1e9), min_size=1, max_size=9)


def test_the_worked_example_of_imbalance_of_holds():
    assert imbalance_of([30, 10]) == 1.5


@given(load_lists)
def test_an_imbalance_is_1_or_more_and_not_above_the_number_of_ranks(loads):
    assert 1 / ROUNDING <= imbalance_of(loads) <= len(loads) * ROUNDING


@given(st.integers(0, 10**12), world_sizes)
def test_ranks_that_carry_the_same_are_even(load, world_size):
    assert imbalance_of([load] * world_size) == 1.0


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=9))
def test_the_largest_load_is_the_imbalance_times_the_mean(loads):
    mean = sum(loads) / len(loads)
    assert max(loads) == pytest.approx(imbalance_of(loads) * mean, rel=1e-12)


def test_ranks_that_carry_nothing_are_even():
    assert imbalance_of([0.0, 0.0, 0.0]) == 1.0


def test_one_rank_that_carries_everything_carries_as_many_times_the_mean_as_there_are_ranks():
    assert imbalance_of([0, 7, 0, 0]) == 4.0
