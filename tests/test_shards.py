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


# --- element granularity --------------------------------------------------------------------------


def by_element(group, groups, **options):
    return admitted(group, groups, has_views=True, granularity="element", **options)


def make_odd_groups():
    """A channels-last parameter, one with gaps, an empty one, and two more in a second group."""
    tensors = [
        torch.arange(24.0).view(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        torch.arange(24.0).view(3, 8)[:, ::2],
        torch.zeros(0, 2),
        torch.tensor(7.0),
        torch.arange(40.0),
    ]
    params = [torch.nn.Parameter(tensor) for tensor in tensors]
    return [{"params": params[:3], "lr": 0.1}, {"params": params[3:], "lr": 0.2}]


def in_memory_order(tensor):
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def test_elements_are_laid_out_alike_on_every_rank(run_threads):
    def serve(group):
        return make_shards(group, has_views=True, granularity="element").plan(
            make_odd_groups(), POLICY
        )

    run = run_threads(3, serve)
    assert run.results[0] == run.results[1] == run.results[2]


def test_parts_of_all_ranks_cover_every_element_once(run_threads):
    run = run_threads(3, lambda group: by_element(group, make_odd_groups()).parts)
    elements = sorted(
        (part.param, element)
        for parts in run.results
        for part in parts
        for element in range(part.offset, part.offset + part.numel)
    )
    assert elements == [(i, e) for i, n in enumerate((24, 12, 0, 1, 40)) for e in range(n)]


def test_what_is_updated_for_a_part_is_a_trained_leaf_in_the_memory_of_its_parameter(run_threads):
    def serve(group):
        shards = by_element(group, make_odd_groups())
        for part in shards.parts:
            tensor, param = shards.tensors[part.param], shards.params[part.param]
            assert (tensor.is_leaf, tensor.requires_grad) == (True, True)
            if part.is_whole:
                assert tensor is param
            else:
                expected = in_memory_order(param)[part.offset : part.offset + part.numel]
                assert (tensor.data_ptr(), tensor.shape) == (expected.data_ptr(), expected.shape)
        return list(shards.tensors) == [part.param for part in shards.parts]

    run = run_threads(3, serve)
    assert (run.texts, run.results) == (["", "", ""], [True] * 3)


def test_an_empty_parameter_is_updated_whole_by_rank_0(run_threads):
    run = run_threads(2, lambda group: by_element(group, make_odd_groups()).parts)
    assert [Part(2, 0, 0, True) in parts for parts in run.results] == [True, False]


def test_local_groups_hold_the_flat_parts_with_the_options_of_their_group(run_threads):
    def serve(group):
        groups = make_odd_groups()
        shards = by_element(group, groups)
        local = shards.local_groups(groups)
        of_group = [
            [id(shards.tensors[i]) for i in indices if i in shards.tensors]
            for indices in ((0, 1, 2), (3, 4))
        ]
        assert [[id(p) for p in g["params"]] for g in local] == of_group
        return [g["lr"] for g in local]

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0.1, 0.2]] * 2)


def gradient_like(param, *, strides_of=None):
    """A gradient that counts its elements in the memory order of its parameter."""
    gradient = torch.zeros_like(param)
    in_memory_order(gradient).copy_(torch.arange(float(param.numel())))
    if strides_of is None:
        return gradient
    return torch.zeros_like(strides_of).copy_(gradient)


@pytest.mark.parametrize("has_other_strides", [False, True])
def test_each_part_sees_its_part_of_the_gradient(run_threads, has_other_strides):
    def serve(group):
        shards = by_element(group, make_odd_groups())
        for param in shards.params:
            other = torch.zeros(param.shape) if has_other_strides else None
            param.grad = gradient_like(param.detach(), strides_of=other)
        shards.pass_gradients()
        for part in shards.parts:
            found = shards.tensors[part.param].grad.flatten().tolist()
            assert found == list(range(part.offset, part.offset + part.numel))
            assert shards.tensors[part.param].grad.shape == shards.tensors[part.param].shape

    assert run_threads(3, serve).texts == ["", "", ""]


def test_a_gradient_in_the_memory_order_of_its_parameter_is_not_copied():
    shards = by_element(LoneRank(), make_odd_groups())
    for param in shards.params:
        param.grad = gradient_like(param.detach())
    shards.pass_gradients()
    assert [shards.tensors[i].grad.data_ptr() for i in (0, 1, 3, 4)] == [
        shards.params[i].grad.data_ptr() for i in (0, 1, 3, 4)
    ]


def test_a_part_of_a_parameter_without_gradient_has_none_either():
    shards = by_element(LoneRank(), make_odd_groups())
    shards.params[0].grad = gradient_like(shards.params[0].detach())
    shards.pass_gradients()
    shards.params[0].grad = None
    shards.pass_gradients()
    assert [tensor.grad for tensor in shards.tensors.values()] == [None] * 5


def test_all_gradients_are_dropped():
    shards = by_element(LoneRank(), make_odd_groups())
    for param in shards.params:
        param.grad = gradient_like(param.detach())
    shards.pass_gradients()
    shards.drop_gradients()
    assert [tensor.grad for tensor in shards.tensors.values()] == [None] * 5
    assert [param.grad for param in shards.params] == [None] * 5


def test_what_was_admitted_keeps_its_parts_when_others_are_admitted(run_threads):
    def serve(group):
        groups = make_groups(4, 9)
        shards = by_element(group, groups)
        parts, tensors = list(shards.parts), dict(shards.tensors)
        groups += make_groups(33)
        shards.admit(groups, shards.plan(groups, POLICY))
        assert shards.parts[: len(parts)] == parts
        assert all(shards.tensors[i] is tensor for i, tensor in tensors.items())
        return [part.numel for part in shards.parts[len(parts) :]]

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[32], [1]])


# --- retract --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"has_views": True}, {"has_views": True, "granularity": "element"}, {"gradients": True}],
    ids=["staged", "views", "element", "gradients"],
)
def test_retracted_parameters_leave_no_trace(options):
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups, **options)
    before = [list(kept) for kept in everything_of(shards)]
    more = groups + make_groups(5)
    shards.admit(more, shards.plan(more, POLICY))
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
        shards.buckets,
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
    shards.admit(more, shards.plan(more, POLICY))
    shards.retract(2)
    shards.require_intact()


# --- gradients that the optimizer averages --------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"has_views": True}, {"has_views": True, "granularity": "element"}],
    ids=["staged", "views", "element"],
)
def test_admitted_parameters_become_those_of_rank_0(run_threads, options):
    def serve(group):
        groups = make_groups(4, 9)
        with torch.no_grad():
            for param in groups[0]["params"]:
                param.add_(group.rank)
        admitted(group, groups, gradients=True, **options)
        return [param.detach().unique().tolist() for param in groups[0]["params"]]

    assert run_threads(3, serve).results == [[[1.0], [1.0]]] * 3


def test_only_new_parameters_become_those_of_rank_0(run_threads):
    def serve(group):
        groups = make_groups(4)
        shards = admitted(group, groups, gradients=True)
        groups += make_groups(5)
        with torch.no_grad():
            for g in groups:
                g["params"][0].add_(group.rank)
        shards.admit(groups, shards.plan(groups, POLICY))
        return [g["params"][0][0].item() for g in groups]

    assert run_threads(2, serve).results == [[1.0, 1.0], [2.0, 1.0]]


def test_parameters_stay_as_they_are_where_others_average(run_threads):
    def serve(group):
        groups = make_groups(4)
        with torch.no_grad():
            groups[0]["params"][0].add_(group.rank)
        shards = admitted(group, groups)
        return groups[0]["params"][0][0].item(), shards.gradient_buckets

    run = run_threads(2, serve)
    assert (run.results, run.world.messages) == ([(1.0, []), (2.0, [])], [])


def test_there_is_a_gradient_bucket_for_every_bucket():
    groups = make_groups(4, 9)
    shards = admitted(LoneRank(), groups, gradients=True, bucket_mb=1e-9)
    groups += make_groups(5)
    shards.admit(groups, shards.plan(groups, POLICY))
    assert [b.plan for b in shards.gradient_buckets] == [b.plan for b in shards.buckets]
    assert len(shards.buckets) == 3


def with_sparse_gradient(**options):
    groups = make_groups(4, 9)
    groups[0]["param_names"] = ["table", "b"]
    shards = admitted(LoneRank(), groups, **options)
    groups[0]["params"][0].grad = torch.ones(4).to_sparse()
    return shards


def test_a_sparse_gradient_cannot_be_averaged():
    with pytest.raises(ValueError, match="sparse") as caught:
        with_sparse_gradient(gradients=True).require_intact()
    assert str(caught.value).startswith("param 0 'table': its gradient is sparse, which Sharding(")
    assert str(caught.value).endswith(
        "can neither cut nor reduce; use dense gradients (nn.Embedding(sparse=False)), or DDP and the default Sharding()"
    )


def test_a_sparse_gradient_that_others_average_is_fine_for_whole_parameters():
    with_sparse_gradient().require_intact()


def test_a_sparse_gradient_cannot_be_cut():
    with pytest.raises(ValueError, match="sparse"):
        with_sparse_gradient(has_views=True, granularity="element").require_intact()


def test_gradients_of_what_a_rank_updates_are_reduced_ones(run_threads):
    def serve(group):
        shards = admitted(group, make_groups(4, 9), gradients=True)
        for tensor in shards.tensors.values():
            tensor.grad = torch.ones_like(tensor)
        shards.require_reduced_only()

    assert run_threads(2, serve).texts == ["", ""]


def test_gradients_of_what_other_ranks_update_came_after_the_reduction(run_threads):
    def serve(group):
        shards = admitted(group, make_groups(4, 9), gradients=True)
        shards.params[0].grad = torch.ones(4)
        shards.require_reduced_only()

    run = run_threads(2, serve)
    assert [shards_text.partition(":")[0] for shards_text in run.texts] == ["RuntimeError", ""]


# --- what is updated ------------------------------------------------------------------------------


def updating(shards, *indices):
    for index in indices:
        shards.params[index].grad = torch.ones_like(shards.params[index])
    return shards.updating_sections()


def test_a_section_is_updated_where_a_parameter_of_this_rank_has_a_gradient(run_threads):
    def serve(group):  # each a bucket: parameters 9 and 3 of rank 0, 4 and 5 of rank 1
        return updating(admitted(group, make_groups(4, 9, 5, 3), bucket_mb=1e-9), 1, 2)

    assert run_threads(2, serve).results == [[True, False], [False, True]]


def test_the_sections_of_all_ranks_that_hold_used_parameters(run_threads):
    def serve(group):
        shards = admitted(group, make_groups(4, 9, 5, 3), bucket_mb=1e-9)
        return shards.sections_with([False, True, True, False])

    assert run_threads(2, serve).results == [[[0], [1]]] * 2


def test_a_parameter_that_is_cut_is_in_the_sections_of_several_ranks(run_threads):
    def serve(group):
        shards = by_element(group, make_groups(4, 60))
        return shards.sections_with([False, True]), updating(shards, 1)

    assert run_threads(2, serve).results == [([[0, 1]], [True])] * 2


def test_a_parameter_that_lies_in_one_section_is_in_no_other(run_threads):
    def serve(group):
        shards = by_element(group, make_groups(60, 4))
        return shards.sections_with([False, True]), updating(shards, 1)

    assert run_threads(2, serve).results == [([[0]], [True]), ([[0]], [False])]
