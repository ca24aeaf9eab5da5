import re

import pytest
import torch

from shardopt import Sharding
from shardopt.buffers import StagedBucket, ViewedBucket
from shardopt.collectives import LoneRank
from shardopt.errors import ParameterChangedError
from shardopt.frameworks.torch import TORCH
from shardopt.partition import Part
from shardopt.shards import VIEW_ALIGNMENT_NBYTES, Shards

POLICY = [("optimizer_class", "Adam")]


def make_groups(*numels, lr=0.1):
    return [{"params": [torch.nn.Parameter(torch.ones(n)) for n in numels], "lr": lr}]


def make_shards(group, *, has_views=False, **options):
    return Shards(group, TORCH, Sharding(**options), has_views=has_views)


def admitted(group, groups, **options):
    shards = make_shards(group, **options)
    shards.admit(groups, shards.plan(groups, POLICY))
    return shards


# --- plan -----------------------------------------------------------------------------------------


def test_every_rank_plans_the_same(run_threads):
    run = run_threads(3, lambda group: make_shards(group).plan(make_groups(4, 9, 5, 3), POLICY))
    assert run.results[0] == run.results[1] == run.results[2]


def test_parameters_are_owned_as_the_packing_says(run_threads):
    run = run_threads(2, lambda group: make_shards(group).plan(make_groups(4, 9, 5, 3), POLICY))
    assert run.results[0].owners == (1, 0, 1, 0)


def test_planning_touches_no_parameter():
    groups = make_groups(4, 9)
    before = [param.data_ptr() for param in groups[0]["params"]]
    make_shards(LoneRank(), has_views=True).plan(groups, POLICY)
    assert [param.data_ptr() for param in groups[0]["params"]] == before


def test_parameters_of_another_shape_are_named_on_every_rank(run_threads):
    run = run_threads(
        2, lambda group: make_shards(group).plan(make_groups(4, 9 + group.rank), POLICY)
    )
    text = (
        "RankMismatchError: every rank must make the same optimizer: rank 1 was given other things than rank 0; first "
        "difference at param 1: (10,) torch.float32 on cpu#0, trained, in group 0 on rank 1, "
        "(9,) torch.float32 on cpu#0, trained, in group 0 on rank 0"
    )
    assert run.texts == [text, text]


def test_options_that_differ_are_named(run_threads):
    run = run_threads(
        2, lambda group: make_shards(group).plan(make_groups(4, lr=0.1 + group.rank), POLICY)
    )
    assert run.texts[0].endswith("option 'lr' of group 0: 1.1 on rank 1, 0.1 on rank 0")


def test_a_policy_that_differs_is_named(run_threads):
    run = run_threads(
        2, lambda group: make_shards(group).plan(make_groups(4), [("sharding", str(group.rank))])
    )
    assert run.texts[0].endswith("first difference at sharding: 1 on rank 1, 0 on rank 0")


def transposed_on(rank, has_views):
    def plan(group):
        param = torch.zeros(2, 3) if group.rank != rank else torch.zeros(3, 2).t()
        return make_shards(group, has_views=has_views).plan([{"params": [param]}], POLICY)

    return plan


def test_strides_that_differ_matter_where_parameters_travel_in_memory_order(run_threads):
    run = run_threads(2, transposed_on(1, has_views=True))
    assert "strides (1, 2)" in run.texts[0]


def test_strides_that_differ_do_not_matter_where_parameters_are_copied(run_threads):
    assert run_threads(2, transposed_on(1, has_views=False)).texts == ["", ""]


def shared_on(rank):
    def plan(group):
        memory = torch.zeros(4)
        own = [memory[:3], memory[2:]] if group.rank == rank else [torch.zeros(3), torch.zeros(2)]
        return make_shards(group).plan([{"params": own, "param_names": ["w", "b"]}], POLICY)

    return plan


def test_parameters_that_share_memory_are_refused_with_the_way_out(run_threads):
    run = run_threads(2, shared_on(1))
    assert run.texts[1] == (
        "ValueError: param 0 'w' and param 1 'b' overlap in memory, so two ranks would overwrite each other's "
        "updates; pass one parameter for each piece of memory"
    )


def test_parameters_that_share_memory_on_one_rank_stop_the_others(run_threads):
    run = run_threads(2, shared_on(1))
    assert run.texts[0].startswith("RemoteRankError: checking parameters failed on another rank;")


def test_views_are_aligned():
    plan = make_shards(LoneRank(), has_views=True).plan(make_groups(3, 2), POLICY)
    slots = plan.layout.buckets[0].sections[0].slots
    assert [slot.start * 4 % VIEW_ALIGNMENT_NBYTES for slot in slots] == [0, 0]


def test_staged_parameters_lie_back_to_back():
    plan = make_shards(LoneRank()).plan(make_groups(3, 2), POLICY)
    assert plan.layout.nbytes == 5 * 4


def test_buckets_keep_to_the_bound():
    plan = make_shards(LoneRank(), bucket_mb=24 / 2**20).plan(make_groups(3, 3, 3), POLICY)
    assert [bucket.params for bucket in plan.layout.buckets] == [(0, 1), (2,)]


# --- admit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("has_views", "kind"), [(False, StagedBucket), (True, ViewedBucket)])
def test_admitted_parameters_lie_in_buckets_of_the_wanted_kind(has_views, kind):
    shards = admitted(LoneRank(), make_groups(4, 9), has_views=has_views)
    assert [type(bucket) for bucket in shards.buckets] == [kind]


@pytest.mark.parametrize("has_views", [False, True])
def test_admitted_parameters_keep_their_place_when_others_are_admitted(has_views):
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups, has_views=has_views)
    bucket = shards.buckets[0]
    groups += make_groups(5)
    shards.admit(groups, shards.plan(groups, POLICY))
    assert (shards.buckets[0] is bucket, shards.buckets[1].plan.params) == (True, (2,))


def test_new_parameters_go_to_the_rank_that_carries_least(run_threads):
    def serve(group):
        groups = make_groups(4, 9)
        shards = admitted(group, groups)
        groups += make_groups(3, 3)
        shards.admit(groups, shards.plan(groups, POLICY))
        return shards.owners

    assert run_threads(2, serve).results[0] == [1, 0, 1, 1]


def test_the_lists_given_out_grow_and_are_not_replaced():
    groups = make_groups(4)
    shards = admitted(LoneRank(), groups)
    params, specs, owners = shards.params, shards.specs, shards.owners
    groups += make_groups(5)
    shards.admit(groups, shards.plan(groups, POLICY))
    assert (len(params), len(specs), len(owners)) == (2, 2, 2)


# --- what a rank owns -----------------------------------------------------------------------------


def test_parts_lists_this_ranks_parameters(run_threads):
    run = run_threads(2, lambda group: admitted(group, make_groups(4, 9, 5, 3)).parts)
    assert run.results == [
        [Part(1, 0, 9, True), Part(3, 0, 3, True)],
        [Part(0, 0, 4, True), Part(2, 0, 5, True)],
    ]


def test_a_rank_can_own_nothing(run_threads):
    run = run_threads(3, lambda group: admitted(group, make_groups(4)).parts)
    assert run.results == [[Part(0, 0, 4, True)], [], []]


def test_local_groups_hold_this_ranks_parameters(run_threads):
    def serve(group):
        groups = make_groups(4, 9) + make_groups(5, 3, lr=0.2)
        local = admitted(group, groups).local_groups(groups)
        return [([p.numel() for p in g["params"]], g["lr"]) for g in local]

    assert run_threads(2, serve).results == [
        [([9], 0.1), ([3], 0.2)],
        [([4], 0.1), ([5], 0.2)],
    ]


def test_local_groups_can_start_later():
    groups = make_groups(4, 9) + make_groups(5, lr=0.2)
    local = admitted(LoneRank(), groups).local_groups(groups, start=1)
    assert [([p.numel() for p in g["params"]], g["lr"]) for g in local] == [([5], 0.2)]


def with_names():
    groups = make_groups(4, 9) + make_groups(5, 3)
    groups[1]["param_names"] = ["a", "b"]
    return groups


def test_local_groups_hold_the_names_of_the_owned_parameters(run_threads):
    def serve(group):
        groups = with_names()
        return [g.get("param_names") for g in admitted(group, groups).local_groups(groups)]

    assert run_threads(2, serve).results == [[None, ["b"]], [None, ["a"]]]


def test_local_groups_hold_the_parameters_themselves():
    groups = make_groups(4, 9)
    [local] = admitted(LoneRank(), groups).local_groups(groups)
    assert [a is b for a, b in zip(local["params"], groups[0]["params"], strict=True)] == [True] * 2


def test_the_whole_groups_are_left_alone(run_threads):
    def serve(group):
        groups = with_names()
        before = [{**g, "params": list(g["params"])} for g in groups]
        admitted(group, groups).local_groups(groups)
        return str(groups) == str(before)

    assert run_threads(2, serve).results == [True, True]


def test_versions_are_those_of_the_owned_parameters(run_threads):
    def serve(group):
        groups = make_groups(4, 9)
        with torch.no_grad():
            groups[0]["params"][0].add_(1)
        return admitted(group, groups).versions()

    assert run_threads(2, serve).results == [[0], [1]]


# --- require_intact -------------------------------------------------------------------------------


@pytest.mark.parametrize("has_views", [False, True])
def test_a_parameter_of_another_dtype_is_not_intact(has_views):
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups, has_views=has_views)
    groups[0]["params"][1].data = torch.ones(9).double()
    with pytest.raises(ParameterChangedError, match=re.escape("param 1: now (9,) torch.float64")):
        shards.require_intact()


def test_views_whose_data_was_replaced_are_taken_back():
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups, has_views=True)
    param = groups[0]["params"][1]
    place = param.data_ptr()
    param.data = torch.full((9,), 3.0)
    shards.require_intact()
    assert (param.data_ptr() == place, param.sum().item()) == (True, 27.0)


# --- buckets_for ----------------------------------------------------------------------------------


def test_parameters_exchanged_together_lie_in_one_bucket_per_dtype():
    groups = make_groups(4, 9, 5)
    groups[0]["params"].append(torch.nn.Parameter(torch.ones(2).double()))
    shards = admitted(LoneRank(), groups, bucket_mb=1e-9)
    assert [bucket.plan.params for bucket in shards.buckets_for([0, 2, 3])] == [(0, 2), (3,)]


def test_parameters_exchanged_together_lie_in_one_bucket_whatever_their_owners(run_threads):
    def serve(group):
        shards = admitted(group, make_groups(4, 9, 5, 3), bucket_mb=1e-9)
        return [bucket.plan.params for bucket in shards.buckets_for([0, 1, 2, 3])]

    assert run_threads(2, serve).results == [[(1, 3, 0, 2)]] * 2


def test_no_parameters_are_exchanged_in_no_bucket():
    assert admitted(LoneRank(), make_groups(4)).buckets_for([]) == []
