import re

import pytest
import torch

from shardopt.buffers import StagedBucket, ViewedBucket
from shardopt.collectives import LoneRank
from shardopt.errors import ParameterChangedError
from shardopt.gradients import AveragedGradients
from shardopt.partition import Part
from shardopt.shards import VIEW_ALIGNMENT_NBYTES
from tests.sharding import admitted, make_groups, make_shards, planned

# --- plan -----------------------------------------------------------------------------------------


def test_every_rank_plans_the_same(run_threads):
    run = run_threads(3, lambda group: planned(make_shards(group), make_groups(4, 9, 5, 3)))
    assert run.results[0] == run.results[1] == run.results[2]


def test_parameters_are_owned_as_the_packing_says(run_threads):
    run = run_threads(2, lambda group: planned(make_shards(group), make_groups(4, 9, 5, 3)))
    assert run.results[0].owners == (1, 0, 1, 0)


def test_planning_touches_no_parameter():
    groups = make_groups(4, 9)
    before = [param.data_ptr() for param in groups[0]["params"]]
    planned(make_shards(LoneRank(), has_views=True), groups)
    assert [param.data_ptr() for param in groups[0]["params"]] == before


def test_parameters_of_another_shape_are_named_on_every_rank(run_threads):
    run = run_threads(2, lambda group: planned(make_shards(group), make_groups(4, 9 + group.rank)))
    text = (
        "RankMismatchError: every rank must make the same optimizer: rank 1 was given other things than rank 0; first "
        "difference at param 1: (10,) torch.float32 on cpu#0, trained, in group 0 on rank 1, "
        "(9,) torch.float32 on cpu#0, trained, in group 0 on rank 0"
    )
    assert run.texts == [text, text]


def test_options_that_differ_are_named(run_threads):
    run = run_threads(
        2, lambda group: planned(make_shards(group), make_groups(4, lr=0.1 + group.rank))
    )
    assert run.texts[0].endswith("option 'lr' of group 0: 1.1 on rank 1, 0.1 on rank 0")


def test_a_policy_that_differs_is_named(run_threads):
    run = run_threads(
        2,
        lambda group: planned(
            make_shards(group), make_groups(4), policy=[("sharding", str(group.rank))]
        ),
    )
    assert run.texts[0].endswith("first difference at sharding: 1 on rank 1, 0 on rank 0")


def transposed_on(rank, has_views):
    def plan(group):
        param = torch.zeros(2, 3) if group.rank != rank else torch.zeros(3, 2).t()
        return planned(make_shards(group, has_views=has_views), [{"params": [param]}])

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
        return planned(make_shards(group), [{"params": own, "param_names": ["w", "b"]}])

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
    plan = planned(make_shards(LoneRank(), has_views=True), make_groups(3, 2))
    slots = plan.layout.buckets[0].sections[0].slots
    assert [slot.start * 4 % VIEW_ALIGNMENT_NBYTES for slot in slots] == [0, 0]


def test_staged_parameters_lie_back_to_back():
    plan = planned(make_shards(LoneRank()), make_groups(3, 2))
    assert plan.layout.nbytes == 5 * 4


def test_buckets_keep_to_the_bound():
    plan = planned(make_shards(LoneRank(), bucket_mb=24 / 2**20), make_groups(3, 3, 3))
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
    shards.admit(groups, planned(shards, groups))
    assert (shards.buckets[0] is bucket, shards.buckets[1].plan.params) == (True, (2,))


def test_new_parameters_go_to_the_rank_that_carries_least(run_threads):
    def serve(group):
        groups = make_groups(4, 9)
        shards = admitted(group, groups)
        groups += make_groups(3, 3)
        shards.admit(groups, planned(shards, groups))
        return shards.owners

    assert run_threads(2, serve).results[0] == [1, 0, 1, 1]


def test_the_lists_given_out_grow_and_are_not_replaced():
    groups = make_groups(4)
    shards = admitted(LoneRank(), groups)
    params, specs, owners = shards.params, shards.specs, shards.owners
    groups += make_groups(5)
    shards.admit(groups, planned(shards, groups))
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


# --- retract --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"has_views": True},
        {"has_views": True, "granularity": "element"},
        {"gradients": True},
        {"master_dtype": torch.float64},
    ],
    ids=["staged", "views", "element", "gradients", "masters"],
)
def test_retracted_parameters_leave_no_trace(options):
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups, **options)
    before = [list(kept) for kept in everything_of(shards)]
    more = groups + make_groups(5)
    shards.admit(more, planned(shards, more))
    assert [list(kept) for kept in everything_of(shards)] != before
    shards.retract(2)
    assert list(map(str, map(list, everything_of(shards)))) == list(map(str, before))


def everything_of(shards):
    return (
        shards.params,
        shards.specs,
        shards.owners,
        shards.parts,
        shards.tensors,
        shards.bucket_of,
        shards.buckets,
        shards.sections,
        shards.gradient_buckets,
    )


def test_retracted_views_get_memory_of_their_own_with_their_values():
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups, has_views=True)
    shards.retract(0)
    nbytes = [param.untyped_storage().nbytes() for param in groups[0]["params"]]
    values = [param.sum().item() for param in groups[0]["params"]]
    assert (nbytes, values) == ([16, 36], [4.0, 9.0])


def test_what_is_left_after_a_retraction_is_intact():
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups)
    more = groups + make_groups(5)
    shards.admit(more, planned(shards, more))
    shards.retract(2)
    shards.require_intact()


# --- gradients of one bucket ----------------------------------------------------------------------


def test_gradients_of_a_bucket_are_those_of_what_this_rank_owns(run_threads):
    def serve(group):
        shards = admitted(group, make_groups(4, 9, 5, 3))
        for param in shards.params[:3]:
            param.grad = torch.ones_like(param)
        found = AveragedGradients(shards).take(0)
        assert all(found[i] is shards.params[i].grad for i in found)
        return sorted(found)

    assert run_threads(2, serve).results == [[1], [0, 2]]


def test_touching_a_bucket_moves_the_version_counters_of_its_parameters_only():
    shards = admitted(LoneRank(), make_groups(4, 9), bucket_mb=1e-9)
    before = [param._version for param in shards.params]
    shards.touch(1, [0])
    moved = [p._version - b for p, b in zip(shards.params, before, strict=True)]
    assert moved == [int(i in shards.buckets[1].plan.params) for i in range(2)]


def test_touching_a_section_leaves_the_version_counters_of_the_others_alone(run_threads):
    def serve(group):
        shards = admitted(group, make_groups(4, 9, 5, 3))
        before = [param._version for param in shards.params]
        shards.touch(0, [1])
        moved = [p._version - b for p, b in zip(shards.params, before, strict=True)]
        return moved == [int(owner == 1) for owner in shards.owners]

    assert run_threads(2, serve).results == [True, True]


@pytest.mark.parametrize("change", ["removed", "added", "swapped"])
def test_groups_edited_by_hand_are_refused_with_the_way_out(change):
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups)
    params = groups[0]["params"]
    edited = {
        "removed": params[:1],
        "added": [*params, torch.nn.Parameter(torch.ones(1))],
        "swapped": params[::-1],
    }[change]
    with pytest.raises(ParameterChangedError) as caught:
        shards.require_listed([{"params": edited}])
    assert str(caught.value) == (
        f"param_groups hold {len(edited)} parameters, which are not the 2 that were planned for; "
        "add parameters with add_param_group(), and make a new optimizer to remove or reorder some"
    )


def test_groups_as_they_were_admitted_are_listed():
    groups = make_groups(4) + make_groups(9)
    admitted(LoneRank(), groups).require_listed(groups)
