import pytest

from shardopt.collectives import LoneRank
from shardopt.errors import RankMismatchError
from shardopt.step import Intent, agree

GROUPS = [{"params": [], "lr": 0.1}]
OTHERS = [{"params": [], "lr": 0.2}]


def agreeing(groups_by_rank, **options_by_rank):
    """A function that gives each rank its part of the arguments."""
    return lambda group: agree(
        group,
        groups_by_rank[group.rank],
        **{name: values[group.rank] for name, values in options_by_rank.items()},
    )


def test_equal_options_make_every_rank_active(run_threads):
    run = run_threads(3, agreeing([GROUPS] * 3))
    assert run.results == [Intent(is_skipped=False, joined=(), active=(0, 1, 2), updating=())] * 3


def test_agreement_costs_one_gather_of_ints(run_threads):
    run = run_threads(2, agreeing([GROUPS] * 2))
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


def test_options_that_differ_are_named_on_every_rank(run_threads):
    run = run_threads(3, agreeing([GROUPS, GROUPS, OTHERS]))
    text = (
        "RankMismatchError: options differ between ranks; set learning rates and schedules alike: rank 2 was given "
        "other things than rank 0; first difference at option 'lr' of group 0: 0.2 on rank 2, 0.1 on rank 0"
    )
    assert run.texts == [text] * 3


def test_a_skip_of_one_rank_is_a_skip_of_all(run_threads):
    run = run_threads(3, agreeing([GROUPS] * 3, skip=[False, True, False]))
    assert [intent.is_skipped for intent in run.results] == [True] * 3


def test_ranks_without_inputs_are_known_to_all(run_threads):
    run = run_threads(3, agreeing([GROUPS] * 3, is_joined=[True, False, True]))
    assert run.results == [Intent(is_skipped=False, joined=(0, 2), active=(1,), updating=())] * 3


def test_options_of_ranks_without_inputs_are_not_compared(run_threads):
    run = run_threads(3, agreeing([OTHERS, GROUPS, GROUPS], is_joined=[True, False, False]))
    assert run.texts == [""] * 3


def test_ranks_without_inputs_raise_where_the_others_differ(run_threads):
    run = run_threads(3, agreeing([GROUPS, GROUPS, OTHERS], is_joined=[True, False, False]))
    assert [type(error) for error in run.errors] == [RankMismatchError] * 3


def test_a_rank_without_inputs_is_not_the_measure_of_the_others(run_threads):
    run = run_threads(3, agreeing([GROUPS, GROUPS, OTHERS], is_joined=[True, False, False]))
    assert run.texts[0].endswith("option 'lr' of group 0: 0.2 on rank 2, 0.1 on rank 1")


def test_an_error_of_one_rank_stops_all(run_threads):
    run = run_threads(2, agreeing([GROUPS] * 2, error=[None, ValueError("odd")]))
    assert run.texts == [
        "RemoteRankError: preparing the step failed on another rank; rank 1: ValueError: odd",
        "ValueError: odd",
    ]


def test_an_error_comes_before_a_difference_of_options(run_threads):
    run = run_threads(2, agreeing([GROUPS, OTHERS], error=[None, ValueError("odd")]))
    assert run.texts[1] == "ValueError: odd"


def test_a_lone_rank_agrees_with_itself():
    assert agree(LoneRank(), GROUPS, skip=True) == Intent(
        is_skipped=True, joined=(), active=(0,), updating=()
    )


def test_a_lone_rank_raises_its_own_error():
    with pytest.raises(ValueError, match="odd"):
        agree(LoneRank(), GROUPS, error=ValueError("odd"))


def test_what_each_rank_updates_is_known_to_all(run_threads):
    updates = [[True, False, False], [True, False, True], [False] * 3]
    run = run_threads(3, agreeing([GROUPS] * 3, updates=updates))
    assert [intent.updating for intent in run.results] == [((0, 1), (), (1,))] * 3
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 3


def test_more_buckets_than_flags_in_an_int_are_known_to_all(run_threads):
    updates = [[number % 3 == 0 for number in range(130)], [number == 129 for number in range(130)]]
    run = run_threads(2, agreeing([GROUPS] * 2, updates=updates))
    expected = tuple(
        (*((0,) if number % 3 == 0 else ()), *((1,) if number == 129 else ()))
        for number in range(130)
    )
    assert [intent.updating for intent in run.results] == [expected] * 2


# --- extra integers ------------------------------------------------------------------------------


def with_extra(extra_by_rank, *, groups_by_rank=None, error_on=None, updates=()):
    """A function that agrees with further ints and returns what it was told of the others'."""

    def serve(group):
        told = []
        try:
            agree(
                group,
                (groups_by_rank or [GROUPS] * group.world_size)[group.rank],
                error=ValueError("odd") if group.rank == error_on else None,
                updates=updates,
                extra=extra_by_rank[group.rank],
                on_extra=told.append,
            )
        except (ValueError, RuntimeError):
            return ["raised", *told]
        return told

    return serve


def test_extra_ints_of_every_rank_are_told_in_rank_order(run_threads):
    run = run_threads(3, with_extra([[1, 2**60], [-3, 0], [5, 6]]))
    assert run.results == [[[[1, 2**60], [-3, 0], [5, 6]]]] * 3


def test_extra_ints_cost_no_gather_of_their_own(run_threads):
    run = run_threads(2, with_extra([[1], [2]]))
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


def test_extra_ints_are_not_taken_for_updates(run_threads):
    def serve(group):
        return agree(group, GROUPS, updates=[group.rank == 0], extra=[7]).updating

    assert run_threads(2, serve).results == [((0,),)] * 2


def test_no_extra_ints_are_told_as_such(run_threads):
    assert run_threads(2, with_extra([[], []])).results == [[[[], []]]] * 2


def test_extra_ints_are_told_before_an_error_is_raised(run_threads):
    run = run_threads(2, with_extra([[1], [2]], error_on=1))
    assert run.results == [["raised", [[1], [2]]]] * 2


def test_extra_ints_are_told_before_a_difference_of_options_is_raised(run_threads):
    run = run_threads(2, with_extra([[1], [2]], groups_by_rank=[GROUPS, OTHERS]))
    assert run.results == [["raised", [[1], [2]]]] * 2


def test_what_is_told_may_be_collective(run_threads):
    def serve(group):
        sums = []

        def finalize(ints):
            sums.append(group.all_gather_ints([10 * one for (one,) in ints]))

        agree(group, GROUPS, extra=[group.rank], on_extra=finalize)
        return sums

    assert run_threads(2, serve).results == [[[[0, 10], [0, 10]]]] * 2


def test_what_telling_raises_is_raised():
    def refuse(ints):
        raise KeyError("dropped")

    with pytest.raises(KeyError, match="dropped"):
        agree(LoneRank(), GROUPS, error=ValueError("odd"), on_extra=refuse)


# --- fingerprint ----------------------------------------------------------------------------------------


def test_facts_that_differ_are_named(run_threads):
    run = run_threads(
        2, agreeing([GROUPS] * 2, fingerprint=[[("max_norm", "1.0")], [("max_norm", "2.0")]])
    )
    assert run.texts[0].endswith("first difference at max_norm: 2.0 on rank 1, 1.0 on rank 0")


def test_facts_of_ranks_without_inputs_are_not_compared(run_threads):
    fingerprint = [[("scale", "1")], [("scale", "2")]]
    run = run_threads(2, agreeing([GROUPS] * 2, fingerprint=fingerprint, is_joined=[True, False]))
    assert run.texts == ["", ""]
