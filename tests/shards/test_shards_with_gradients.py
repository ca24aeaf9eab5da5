"""Shards whose gradients the optimizer averages, and those with master weights."""

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.gradients import ReducedGradients
from tests.sharding import admitted, by_element, make_groups, make_odd_groups, planned


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
        shards.admit(groups, planned(shards, groups))
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
    shards.admit(groups, planned(shards, groups))
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


# --- reduced gradients ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"has_views": True, "granularity": "element"}], ids=["parameter", "element"]
)
def test_reduced_gradients_of_a_bucket_are_those_of_used_parameters_this_rank_owns(
    run_threads, options
):
    def serve(group):
        shards = admitted(group, make_groups(40, 9, 5), gradients=True, **options)
        used = [True, False, True]
        found = {}
        for number in range(len(shards.buckets)):
            found.update(ReducedGradients(shards, None).held(number, used))
        owned = {part.param for part in shards.parts}
        shapes = {i: tuple(g.shape) for i, g in found.items()}
        expected = {i: tuple(shards.tensors[i].shape) for i in owned if used[i]}
        return shapes == expected

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [True, True])


def test_a_reduced_gradient_is_the_memory_it_is_kept_in(run_threads):
    def serve(group):
        shards = by_element(group, make_odd_groups(), gradients=True)
        for bucket in shards.gradient_buckets:
            bucket.shard.fill_(5.0)
        found = [
            ReducedGradients(shards, None).part(part.param) for part in shards.parts if part.numel
        ]
        return {value for gradient in found for value in gradient.flatten().tolist()}

    assert run_threads(2, serve).results == [{5.0}, {5.0}]


def test_of_what_others_own_there_is_no_reduced_gradient(run_threads):
    def serve(group):
        shards = admitted(group, make_groups(4, 9), gradients=True)
        return [ReducedGradients(shards, None).part(param) is None for param in range(2)]

    assert run_threads(2, serve).results == [[True, False], [False, True]]


@pytest.mark.parametrize(
    ("options", "wire", "kept"),
    [
        ({}, 4, torch.float32),
        ({"reduce_dtype": torch.bfloat16}, 2, torch.bfloat16),
        ({"reduce_dtype": torch.bfloat16, "sum_dtype": torch.float32}, 2, torch.float32),
    ],
    ids=["own", "wire", "wire and sum"],
)
def test_gradients_travel_and_are_kept_in_the_dtypes_asked_for(options, wire, kept):
    shards = admitted(LoneRank(), make_groups(4), gradients=True, **options)
    [bucket] = shards.gradient_buckets
    assert (bucket.nbytes, bucket.shard.dtype) == (4 * wire, kept)


def test_averages_over_a_grid_are_over_all_its_members(run_hybrid):
    def serve(grid):
        return admitted(grid, make_groups(4), gradients=True).gradient_buckets[0].sum_scale

    assert run_hybrid(2, 2, serve).results == [0.25] * 4


# --- master weights -------------------------------------------------------------------------------


def make_low_groups(*numels):
    return [{"params": [torch.nn.Parameter(torch.ones(n).bfloat16()) for n in numels], "lr": 0.1}]


WITH_MASTERS = [
    {},
    {"has_views": True},
    {"has_views": True, "granularity": "element"},
]
with_masters = pytest.mark.parametrize("options", WITH_MASTERS, ids=["staged", "views", "element"])


@with_masters
def test_masters_are_what_is_updated(run_threads, options):
    def serve(group):
        groups = make_low_groups(40, 9)
        shards = admitted(group, groups, master_dtype=torch.float32, **options)
        masters = shards.masters()
        [local] = shards.local_groups(groups)
        assert [id(p) for p in local["params"]] == [id(masters[i]) for i in sorted(masters)]
        return {master.dtype for master in masters.values()}

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [{torch.float32}] * 2)


def test_parameters_that_have_the_dtype_of_masters_have_none():
    groups = [{"params": make_low_groups(4)[0]["params"] + make_groups(9)[0]["params"]}]
    shards = admitted(LoneRank(), groups, master_dtype=torch.float32)
    assert list(shards.masters()) == [0]


@with_masters
def test_masters_follow_parameters_that_were_changed_before_the_step(options):
    shards = admitted(LoneRank(), make_low_groups(4, 9), master_dtype=torch.float32, **options)
    with torch.no_grad():
        shards.params[0][1] = 3.0
    shards.require_intact()
    assert shards.masters()[0].tolist() == [1.0, 3.0, 1.0, 1.0]


@with_masters
def test_masters_follow_parameters_whose_data_was_replaced(options):
    shards = admitted(LoneRank(), make_low_groups(4, 9), master_dtype=torch.float32, **options)
    shards.params[1].data = torch.full((9,), 5.0).bfloat16()
    shards.require_intact()
    assert shards.masters()[1].tolist() == [5.0] * 9


@with_masters
def test_masters_do_not_follow_what_was_touched(options):
    shards = admitted(LoneRank(), make_low_groups(4), master_dtype=torch.float32, **options)
    with torch.no_grad():
        shards.masters()[0].fill_(7.0)
        shards.params[0].fill_(3.0)
    shards.touch(0, [0])
    shards.require_intact()
    assert shards.masters()[0].tolist() == [7.0] * 4


@with_masters
def test_masters_of_replicas_made_equal_are_those_of_rank_0(run_threads, options):
    def serve(group):
        groups = make_low_groups(40, 9)
        with torch.no_grad():
            for param in groups[0]["params"]:
                param.fill_(1.0 + group.rank)
        shards = admitted(group, groups, master_dtype=torch.float32, gradients=True, **options)
        return {value for m in shards.masters().values() for value in m.tolist()}

    assert run_threads(2, serve).results == [{1.0}] * 2


@with_masters
def test_a_rank_that_owns_nothing_has_no_masters(run_threads, options):
    def serve(group):
        shards = admitted(group, make_low_groups(1), master_dtype=torch.float32, **options)
        return sorted(shards.masters())

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[0], []])
