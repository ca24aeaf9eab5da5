"""Shards whose parameters are cut by element, all of them or those of some groups."""

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.gradients import AveragedGradients
from shardopt.partition import Part
from tests.sharding import (
    POLICY,
    admitted,
    by_element,
    in_memory_order,
    make_groups,
    make_odd_groups,
    make_shards,
    planned,
)


def test_elements_are_laid_out_alike_on_every_rank(run_threads):
    def serve(group):
        shards = make_shards(group, has_views=True, granularity="element")
        return planned(shards, make_odd_groups(), granularity="element")

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


def all_gradients(shards):
    """Those of what this rank owns, of all buckets."""
    numbers = range(len(shards.buckets))
    return {
        i: gradient for n in numbers for i, gradient in AveragedGradients(shards).take(n).items()
    }


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
        found = all_gradients(shards)
        for part in shards.parts:
            if part.numel:
                expected = list(range(part.offset, part.offset + part.numel))
                assert found[part.param].tolist() == expected
                assert found[part.param].shape == shards.tensors[part.param].shape
        return sorted(found) == sorted(part.param for part in shards.parts if part.numel)

    run = run_threads(3, serve)
    assert (run.texts, run.results) == (["", "", ""], [True] * 3)


def test_a_gradient_in_the_memory_order_of_its_parameter_is_not_copied():
    shards = by_element(LoneRank(), make_odd_groups())
    for param in shards.params:
        param.grad = gradient_like(param.detach())
    found = all_gradients(shards)
    assert [found[i].data_ptr() for i in (0, 1, 3, 4)] == [
        shards.params[i].grad.data_ptr() for i in (0, 1, 3, 4)
    ]


def test_a_part_of_a_parameter_without_gradient_has_none_either():
    shards = by_element(LoneRank(), make_odd_groups())
    shards.params[0].grad = gradient_like(shards.params[0].detach())
    assert list(all_gradients(shards)) == [0]


def test_what_was_admitted_keeps_its_parts_when_others_are_admitted(run_threads):
    def serve(group):
        groups = make_groups(4, 9)
        shards = by_element(group, groups)
        parts, tensors = list(shards.parts), dict(shards.tensors)
        groups += make_groups(33)
        shards.admit(groups, planned(shards, groups))
        assert shards.parts[: len(parts)] == parts
        assert all(shards.tensors[i] is tensor for i, tensor in tensors.items())
        return [part.numel for part in shards.parts[len(parts) :]]

    run = run_threads(2, serve)
    assert (run.texts, run.results) == (["", ""], [[32], [1]])


# --- groups of both kinds -------------------------------------------------------------------------


def mixed(group, groups, *granularities, **options):
    """Shards of groups of which each has a granularity of its own."""
    shards = make_shards(group, has_views=True, **options)
    shards.admit(groups, shards.plan(groups, granularities, POLICY))
    return shards


def make_mixed_groups():
    return make_groups(4, 9) + make_groups(40) + make_groups(5, 3)


MIXED = ("parameter", "element", "parameter")


def test_groups_can_be_cut_side_by_side_with_whole_ones(run_threads):
    run = run_threads(2, lambda group: mixed(group, make_mixed_groups(), *MIXED).parts)
    assert run.results == [
        [Part(1, 0, 9, True), Part(2, 0, 32, False), Part(4, 0, 3, True)],
        [Part(0, 0, 4, True), Part(2, 32, 8, False), Part(3, 0, 5, True)],
    ]


def test_local_groups_hold_whole_parameters_and_parts(run_threads):
    def serve(group):
        groups = make_mixed_groups()
        local = mixed(group, groups, *MIXED).local_groups(groups)
        return [[p.numel() for p in g["params"]] for g in local]

    assert run_threads(2, serve).results == [[[9], [32], [3]], [[4], [8], [5]]]


def test_what_is_cut_is_no_load_of_any_rank(run_threads):
    run = run_threads(2, lambda group: mixed(group, make_mixed_groups(), *MIXED).owners)
    assert run.results == [[1, 0, 0, 1, 0]] * 2


def test_what_is_cut_is_carried_evenly(run_threads):
    """9 and 4 elements of whole parameters, and 40 that are cut: 29 over 26.5."""

    def serve(group):
        groups = make_groups(4, 9) + make_groups(40)
        return mixed(group, groups, "parameter", "element").imbalance

    assert run_threads(2, serve).results == [pytest.approx(29 / 26.5)] * 2


def test_each_parameter_lies_in_the_bucket_that_is_on_record(run_threads):
    def serve(group):
        shards = mixed(group, make_mixed_groups(), *MIXED)
        return all(p in shards.buckets[n].plan.params for p, n in shards.bucket_of.items()), sorted(
            shards.bucket_of
        )

    assert run_threads(2, serve).results == [(True, [0, 1, 2, 3, 4])] * 2


def test_granularities_that_differ_are_named(run_threads):
    def serve(group):
        mixed(group, make_groups(4), "element" if group.rank else "parameter")

    run = run_threads(2, serve)
    assert run.texts[0].endswith(
        "(4,) strides (1,) torch.float32 on cpu#0, trained, in group 0, by element on rank 1, "
        "(4,) strides (1,) torch.float32 on cpu#0, trained, in group 0 on rank 0"
    )


def test_an_empty_parameter_of_a_whole_group_is_packed_as_the_others(run_threads):
    run = run_threads(
        2, lambda group: mixed(group, make_groups(4, 0) + make_groups(3), *MIXED[:2]).parts
    )
    assert [Part(1, 0, 0, True) in parts for parts in run.results] == [False, True]


# --- what is updated ------------------------------------------------------------------------------


def updating(shards, *indices):
    for index in indices:
        shards.params[index].grad = torch.ones_like(shards.params[index])
    return AveragedGradients(shards).updating_sections()


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
