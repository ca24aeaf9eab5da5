"""Whole parameters packed by what their update costs."""

import pytest

from tests.sharding import admitted, make_groups, planned


def test_whole_parameters_are_packed_by_their_cost(run_threads):
    """Of 4, 9 and 5 elements the first costs as much as the others together."""

    def cost(spec):
        return {4: 10.0, 9: 5.0, 5: 5.0}[spec.numel]

    run = run_threads(2, lambda group: admitted(group, make_groups(4, 9, 5), cost=cost).owners)
    assert run.results == [[0, 1, 1]] * 2


def test_costs_that_differ_are_named_on_every_rank(run_threads):
    def serve(group):
        admitted(group, make_groups(4, 9), cost=lambda spec: 1.0 + group.rank * spec.index)

    run = run_threads(2, serve)
    text = (
        "RankMismatchError: every rank must make the same optimizer: rank 1 was given other things than rank 0; first "
        "difference at param 1: (9,) torch.float32 on cpu#0, trained, in group 0, cost 2.0 on rank 1, "
        "(9,) torch.float32 on cpu#0, trained, in group 0, cost 1.0 on rank 0"
    )
    assert run.texts == [text, text]


def test_a_cost_that_is_refused_on_one_rank_stops_every_rank(run_threads):
    def serve(group):
        admitted(group, make_groups(4), cost=lambda spec: -1.0 if group.rank else 1.0)

    run = run_threads(2, serve)
    assert run.texts[0].startswith("RemoteRankError: checking parameters failed on another rank;")
    assert run.texts[1].startswith("ValueError: param 0: cost() returned -1.0")


@pytest.mark.parametrize(
    ("numels", "expected"), [((4, 4), 1.0), ((9, 3), 1.5), ((8,), 2.0), ((9, 3, 6), 1.0)]
)
def test_the_imbalance_of_whole_parameters_is_the_largest_load_over_the_mean(
    run_threads, numels, expected
):
    run = run_threads(2, lambda group: admitted(group, make_groups(*numels)).imbalance)
    assert run.results == [expected] * 2


def test_new_parameters_are_packed_by_what_ranks_carry_in_costs(run_threads):
    def serve(group):
        groups = make_groups(4, 9)
        shards = admitted(group, groups, cost=lambda spec: 1.0 if spec.numel == 9 else 3.0)
        groups += make_groups(5)
        shards.admit(groups, planned(shards, groups))
        return shards.owners

    assert run_threads(2, serve).results == [[0, 1, 1]] * 2
