import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives import (
    LoneRank,
    any_over_ranks,
    digest,
    raise_failures,
    raise_if_any_failed,
    raise_together,
    require_equal,
)
from shardopt.collectives.flags import FLAGS_PER_INT
from shardopt.errors import RankMismatchError, RemoteRankError

facts_lists = st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=5)

COMMON = [("lr", "0.1"), ("param 7", "(512, 512)"), ("param 8", "(3,)")]
CHANGED = [("lr", "0.1"), ("param 7", "(512,)"), ("param 8", "(4,)")]


def compare(fingerprints_by_rank, **options):
    """A function that gives each rank its fingerprint."""
    return lambda group: require_equal(
        group, fingerprints_by_rank[group.rank], subject="plans", **options
    )


# --- digest ---------------------------------------------------------------------------------------


@given(facts_lists, facts_lists)
def test_digests_differ_exactly_where_facts_do(one, other):
    assert (digest(one) == digest(other)) == (one == other)


@given(facts_lists)
def test_a_digest_is_a_non_negative_int_of_62_bits(fingerprint):
    assert 0 <= digest(fingerprint) < 2**62


def test_a_digest_depends_on_nothing_but_the_words():
    assert digest([("lr", "0.1")]) == 3778389692756709768


def test_a_digest_depends_on_the_order_of_the_facts():
    assert digest(COMMON) != digest(COMMON[::-1])


# --- require_equal --------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_equal_facts_raise_nowhere(run_threads, world_size):
    run = run_threads(world_size, compare([COMMON] * world_size))
    assert run.texts == [""] * world_size


def test_equal_facts_cost_one_gather_of_ints(run_threads):
    run = run_threads(2, compare([COMMON] * 2))
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


def test_a_difference_is_named_in_the_same_words_on_every_rank(run_threads):
    run = run_threads(3, compare([COMMON, COMMON, CHANGED]))
    text = (
        "RankMismatchError: plans: rank 2 was given other things than rank 0; first difference at "
        "param 7: (512,) on rank 2, (512, 512) on rank 0"
    )
    assert run.texts == [text] * 3


def test_a_difference_is_a_value_error(run_threads):
    run = run_threads(2, compare([COMMON, CHANGED]))
    assert [type(e).__mro__[2] for e in run.errors] == [ValueError, ValueError]


def test_the_first_rank_is_the_measure_even_where_it_is_the_odd_one_out(run_threads):
    run = run_threads(3, compare([CHANGED, COMMON, COMMON]))
    assert run.texts[2].endswith("(512, 512) on rank 1, (512,) on rank 0")


def test_facts_missing_at_the_end_of_the_other_rank_are_absent(run_threads):
    run = run_threads(2, compare([COMMON, COMMON[:2]]))
    assert run.texts[0].endswith("first difference at param 8: absent on rank 1, (3,) on rank 0")


def test_facts_missing_at_the_end_of_the_first_rank_are_absent(run_threads):
    run = run_threads(2, compare([COMMON[:2], COMMON]))
    assert run.texts[0].endswith("first difference at param 8: (3,) on rank 1, absent on rank 0")


def test_facts_missing_in_the_middle_are_absent(run_threads):
    run = run_threads(2, compare([COMMON, [COMMON[0], COMMON[2]]]))
    assert run.texts[0].endswith(
        "first difference at param 7: absent (next is param 8) on rank 1, (512, 512) on rank 0"
    )


def test_only_the_given_ranks_are_compared(run_threads):
    run = run_threads(3, compare([CHANGED, COMMON, COMMON], ranks=(1, 2)))
    assert run.texts == [""] * 3


def test_of_the_given_ranks_the_first_is_the_measure(run_threads):
    run = run_threads(3, compare([[], COMMON, CHANGED], ranks=(1, 2)))
    assert run.texts[0] == (
        "RankMismatchError: plans: rank 2 was given other things than rank 1; first difference at "
        "param 7: (512,) on rank 2, (512, 512) on rank 1"
    )


def test_ranks_that_are_not_compared_raise_as_well(run_threads):
    run = run_threads(3, compare([[], COMMON, CHANGED], ranks=(1, 2)))
    assert [type(error) for error in run.errors] == [RankMismatchError] * 3


# --- raise_if_any_failed, raise_failures, raise_together -----------------------------------------------------


def failing_on(*ranks):
    """A function that raises inside ``raise_together`` on some ranks."""

    def run(group):
        with raise_together(group, doing="making the optimizer"):
            if group.rank in ranks:
                raise KeyError(f"lr {group.rank}")
        return "done"

    return run


def test_raise_together_lets_a_block_pass_that_raises_nowhere(run_threads):
    run = run_threads(3, failing_on())
    assert run.results == ["done"] * 3


def test_raise_together_costs_one_gather_of_ints_while_all_is_well(run_threads):
    run = run_threads(2, failing_on())
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


def test_raise_together_raises_the_own_error_on_the_failing_rank(run_threads):
    run = run_threads(3, failing_on(1))
    assert (type(run.errors[1]), run.errors[1].args) == (KeyError, ("lr 1",))


def test_raise_together_names_the_failing_rank_on_the_others(run_threads):
    run = run_threads(3, failing_on(1))
    text = "RemoteRankError: making the optimizer failed on another rank; rank 1: KeyError: 'lr 1'"
    assert [run.texts[0], run.texts[2]] == [text, text]


def test_raise_together_names_every_failing_rank(run_threads):
    run = run_threads(3, failing_on(0, 2))
    assert run.texts[1] == (
        "RemoteRankError: making the optimizer failed on another rank; "
        "rank 0: KeyError: 'lr 0'; rank 2: KeyError: 'lr 2'"
    )


def test_each_of_several_failing_ranks_raises_its_own_error(run_threads):
    run = run_threads(3, failing_on(0, 2))
    assert (run.texts[0], run.texts[2]) == ("KeyError: 'lr 0'", "KeyError: 'lr 2'")


def test_a_lone_rank_raises_its_own_error():
    with pytest.raises(KeyError, match="lr 0"):
        failing_on(0)(LoneRank())


def test_raise_together_keeps_the_traceback_of_the_block():
    with pytest.raises(KeyError) as caught:
        failing_on(0)(LoneRank())
    assert any(entry.name == "run" for entry in caught.traceback)


def test_raise_together_lets_an_interrupt_through_at_once(run_threads):
    class Untouchable:
        pass

    with pytest.raises(KeyboardInterrupt):
        with raise_together(Untouchable(), doing="waiting"):
            raise KeyboardInterrupt


def test_settle_passes_where_no_rank_has_an_error(run_threads):
    run = run_threads(2, lambda group: raise_if_any_failed(group, None, doing="loading"))
    assert run.texts == ["", ""]


def test_settle_raises_on_every_rank(run_threads):
    run = run_threads(
        2,
        lambda g: raise_if_any_failed(
            g, ValueError("odd") if g.rank == 0 else None, doing="loading"
        ),
    )
    assert run.texts == [
        "ValueError: odd",
        "RemoteRankError: loading failed on another rank; rank 0: ValueError: odd",
    ]


def test_raise_as_settled_needs_no_gather_of_ints(run_threads):
    run = run_threads(
        2, lambda g: raise_failures(g, ValueError("odd") if g.rank else None, doing="loading")
    )
    assert run.world.num_gathers_by_rank == [{"ints": 0, "object": 1}] * 2


def test_a_remote_error_is_a_runtime_error():
    assert issubclass(RemoteRankError, RuntimeError)


# --- any_over_ranks ---------------------------------------------------------------------------


def test_a_gradient_of_any_rank_counts_for_all(run_threads):
    present = [[True, False, False, True], [False, False, True, True], [False] * 4]
    run = run_threads(3, lambda group: any_over_ranks(group, present[group.rank]))
    assert run.results == [[True, False, True, True]] * 3


def test_agreeing_on_gradients_costs_one_gather_of_ints(run_threads):
    run = run_threads(2, lambda group: any_over_ranks(group, [True]))
    assert run.world.num_gathers_by_rank == [{"ints": 1, "object": 0}] * 2


@given(
    st.lists(st.booleans(), max_size=5)
    | st.lists(st.booleans(), min_size=FLAGS_PER_INT, max_size=2 * FLAGS_PER_INT + 1)
)
def test_a_lone_rank_agrees_with_itself(present):
    assert any_over_ranks(LoneRank(), present) == present
