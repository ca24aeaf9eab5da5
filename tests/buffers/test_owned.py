"""What a rank's local optimizer sees of a bucket: parameters, flat parts of them, or master weights."""

import pytest
import torch

from shardopt.buffers import OwnedSection, StagedBucket, ViewedBucket
from shardopt.frameworks.torch import TORCH
from tests.buffers.conftest import in_memory_order, make_params

KINDS = ["staged", "viewed", "element"]
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def make_section(plan_for, cut_bucket, pool, copy_all):
    """What rank 0 of 2 owns of a bucket, and the bucket, unless told otherwise."""

    def make(params, *, kind="staged", rank=0, owners=None, master_dtype=None):
        if kind == "element":
            specs, plan = cut_bucket(params, alignment_nbytes=64)
        else:
            specs, layout = plan_for(params, owners=owners)
            [plan] = layout.buckets
        if kind == "staged":
            bucket = StagedBucket(plan, params, pool=pool, copy_all=copy_all)
        else:
            bucket = ViewedBucket(plan, params, specs)
        section = OwnedSection(
            bucket,
            params,
            specs,
            rank=rank,
            master_dtype=master_dtype,
            pool=pool,
            copy_all=copy_all,
            make_param=TORCH.make_param,
        )
        return section, bucket

    return make


def trained(dtype=torch.float32, *, seed=0):
    return [torch.nn.Parameter(param) for param in make_params(dtype, seed=seed)]


def part_of(bucket, params, index, *, rank=0):
    """The elements of a parameter that a rank owns, in memory order."""
    [slot] = [slot for slot in bucket.plan.sections[rank].slots if slot.param == index]
    return in_memory_order(params[index]).narrow(0, slot.offset, slot.numel)


# --- what is updated ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["staged", "viewed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_whole_parameters_are_updated_themselves(make_section, kind, rank):
    params = trained()
    section, _ = make_section(params, kind=kind, rank=rank)
    assert {i: id(tensor) for i, tensor in section.tensors.items()} == {
        i: id(params[i]) for i in range(rank, 6, 2)
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_parts_are_updated_as_flat_leaves_in_the_memory_of_their_parameters(make_section, rank):
    params = trained()
    section, bucket = make_section(params, kind="element", rank=rank)
    for index, tensor in section.tensors.items():
        part = part_of(bucket, params, index, rank=rank)
        assert (tensor.data_ptr(), tensor.shape) == (part.data_ptr(), part.shape)
        assert (tensor.is_leaf, tensor.requires_grad) == (True, True)


@kinds
def test_a_dtype_that_is_that_of_the_parameters_makes_no_masters(make_section, kind):
    section, _ = make_section(trained(), kind=kind, master_dtype=torch.float32)
    assert section.masters is None


def test_complex_parameters_have_no_masters(make_section):
    section, _ = make_section(trained(torch.complex64), master_dtype=torch.float64)
    assert section.masters is None


@pytest.mark.parametrize("kind", ["staged", "viewed"])
def test_a_rank_that_owns_nothing_updates_nothing(make_section, kind):
    params = [torch.nn.Parameter(torch.ones(3).bfloat16())]
    options = {"kind": kind, "rank": 1, "owners": [0], "master_dtype": torch.float32}
    section, _ = make_section(params, **options)
    section.bind({})
    section.write_back()
    section.follow([])
    section.unbind(keep=False)
    assert (section.tensors, section.masters.numel()) == ({}, 0)


# --- master weights -------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("rank", [0, 1])
def test_masters_start_as_the_parameters(make_section, kind, rank):
    params = trained(torch.bfloat16)
    section, bucket = make_section(params, kind=kind, rank=rank, master_dtype=torch.float32)
    for index, master in section.tensors.items():
        expected = params[index].detach()
        if kind == "element":
            expected = part_of(bucket, params, index, rank=rank)
        assert (master.dtype, master.tolist()) == (torch.float32, expected.float().tolist())


@kinds
def test_masters_have_the_shape_of_what_they_stand_for(make_section, kind):
    params = trained(torch.bfloat16)
    section, bucket = make_section(params, kind=kind, master_dtype=torch.float32)
    for index, master in section.tensors.items():
        expected = params[index]
        if kind == "element":
            expected = part_of(bucket, params, index)
        assert (master.shape, master.is_leaf, master.requires_grad) == (expected.shape, True, True)


@kinds
def test_an_update_of_masters_is_rounded_into_the_parameters(make_section, kind):
    params = trained(torch.bfloat16)
    section, bucket = make_section(params, kind=kind, master_dtype=torch.float32)
    with torch.no_grad():
        for master in section.tensors.values():
            master.add_(1 / 3)
    expected = {i: master.detach().bfloat16() for i, master in section.tensors.items()}
    section.write_back()
    for index, values in expected.items():
        found = params[index].detach()
        if kind == "element":
            found = part_of(bucket, params, index)
        assert torch.equal(found, values)


@kinds
def test_rounding_leaves_what_others_own_alone(make_section, kind):
    params = trained(torch.bfloat16)
    section, bucket = make_section(params, kind=kind, master_dtype=torch.float32)
    others = [slot.param for slot in bucket.plan.sections[1].slots]
    before = [part_of(bucket, params, i, rank=1).clone() for i in others]
    with torch.no_grad():
        for master in section.tensors.values():
            master.add_(1.0)
    section.write_back()
    after = [part_of(bucket, params, i, rank=1) for i in others]
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True] * len(others)


@kinds
def test_without_masters_nothing_is_written_back(make_section, kind):
    params = trained()
    section, _ = make_section(params, kind=kind)
    before = [param._version for param in params]
    section.write_back()
    assert [param._version for param in params] == before


def test_masters_add_up_what_the_parameters_cannot_hold(make_section):
    """In bfloat16 1 + 2**-9 is 1; two of them are one unit in the last place."""
    params = [torch.nn.Parameter(torch.ones(1).bfloat16())]
    section, _ = make_section(params, owners=[0], master_dtype=torch.float32)
    seen = []
    for _ in range(4):
        with torch.no_grad():
            section.tensors[0].add_(2.0**-9)
        section.write_back()
        section.note()
        seen.append(params[0].item())
    assert seen == [1.0, 1.0, 1 + 2.0**-7, 1 + 2.0**-7]


# --- parameters that somebody else changes --------------------------------------------------------


def with_masters_between(make_section, kind):
    """Two parameters of two ones each; their masters are 1 + 2**-12, which rounds to 1."""
    params = [torch.nn.Parameter(torch.ones(2).bfloat16()) for _ in range(2)]
    section, bucket = make_section(params, kind=kind, owners=[0, 0], master_dtype=torch.float32)
    with torch.no_grad():
        for master in section.tensors.values():
            master.fill_(1 + 2.0**-12)
    section.write_back()
    section.note()
    return params, section, bucket


def masters_of(section):
    return {index: master.tolist() for index, master in sorted(section.tensors.items())}


KEPT = 1 + 2.0**-12


@pytest.mark.parametrize("kind", ["staged", "viewed"])
def test_masters_follow_only_the_elements_that_changed(make_section, kind):
    params, section, _ = with_masters_between(make_section, kind)
    with torch.no_grad():
        params[1][0] = 5.0
    section.follow([])
    assert masters_of(section) == {0: [KEPT, KEPT], 1: [5.0, KEPT]}


def test_masters_of_parts_follow_only_the_elements_that_changed(make_section):
    params = [torch.nn.Parameter(torch.ones(40).bfloat16())]
    section, _ = make_section(params, kind="element", master_dtype=torch.float32)
    with torch.no_grad():
        section.tensors[0].fill_(KEPT)
    section.write_back()
    section.note()
    with torch.no_grad():
        params[0][3] = 5.0
        params[0][39] = 7.0  # of rank 1
    section.follow([])
    [values] = masters_of(section).values()
    assert values == [KEPT] * 3 + [5.0] + [KEPT] * 28


@kinds
def test_masters_of_parameters_that_nobody_changed_keep_their_precision(make_section, kind):
    _, section, bucket = with_masters_between(make_section, kind)
    section.follow(bucket.reattach())
    values = [value for master in section.tensors.values() for value in master.tolist()]
    assert values == [KEPT] * len(values)


@pytest.mark.parametrize("kind", ["staged", "viewed"])
def test_masters_follow_a_parameter_whose_data_was_replaced(make_section, kind):
    params, section, bucket = with_masters_between(make_section, kind)
    params[0].data = torch.tensor([1.0, 3.0]).bfloat16()
    section.follow(bucket.reattach())
    assert masters_of(section) == {0: [KEPT, 3.0], 1: [KEPT, KEPT]}


def test_masters_follow_a_parameter_that_moved_even_if_its_version_did_not(make_section):
    params, section, _ = with_masters_between(make_section, "viewed")
    params[0].data.fill_(3.0)  # no version counter of the parameter moves
    section.follow([0])
    assert masters_of(section)[0] == [3.0, 3.0]


@pytest.mark.parametrize("kind", ["staged", "viewed"])
def test_what_was_followed_once_is_not_followed_again(make_section, kind):
    params, section, _ = with_masters_between(make_section, kind)
    with torch.no_grad():
        params[1][0] = 5.0
    section.follow([])
    with torch.no_grad():
        section.tensors[1].fill_(9.0)
    section.follow([])
    assert masters_of(section)[1] == [9.0, 9.0]


@pytest.mark.parametrize("kind", ["staged", "viewed"])
def test_changes_that_were_noted_are_ones_own(make_section, kind):
    params, section, _ = with_masters_between(make_section, kind)
    with torch.no_grad():
        params[1][0] = 5.0
    section.note()
    section.follow([])
    assert masters_of(section) == {0: [KEPT, KEPT], 1: [KEPT, KEPT]}


def test_a_nan_is_followed(make_section):
    params, section, _ = with_masters_between(make_section, "staged")
    with torch.no_grad():
        params[0][0] = float("nan")
    section.follow([])
    assert (str(masters_of(section)[0]), masters_of(section)[1]) == (f"[nan, {KEPT}]", [KEPT] * 2)


@kinds
def test_without_masters_nothing_is_followed(make_section, kind):
    params = trained()
    section, _ = make_section(params, kind=kind)
    before = [param.detach().clone() for param in params]
    section.follow([0, 1])
    assert [torch.equal(p, b) for p, b in zip(params, before, strict=True)] == [True] * 6


# --- gradients ------------------------------------------------------------------------------------


def gradients_for(section, dtype):
    """One gradient, of ascending elements, for each tensor."""
    return {
        index: torch.arange(float(tensor.numel())).view(tensor.shape).to(dtype)
        for index, tensor in section.tensors.items()
    }


@kinds
def test_gradients_of_the_dtype_of_what_is_updated_are_seen_as_they_are(make_section, pool, kind):
    section, _ = make_section(trained(), kind=kind)
    gradients = gradients_for(section, torch.float32)
    section.bind(gradients)
    assert [section.tensors[i].grad is gradient for i, gradient in gradients.items()] == [
        True
    ] * len(gradients)
    assert pool.num_out == 0


@kinds
def test_gradients_of_another_dtype_are_cast(make_section, kind):
    section, _ = make_section(trained(torch.bfloat16), kind=kind, master_dtype=torch.float32)
    gradients = gradients_for(section, torch.bfloat16)
    section.bind(gradients)
    for index, gradient in gradients.items():
        bound = section.tensors[index].grad
        assert (bound.dtype, torch.equal(bound, gradient.float())) == (torch.float32, True)


@kinds
def test_memory_for_casts_is_given_back(make_section, pool, kind):
    section, _ = make_section(trained(torch.bfloat16), kind=kind, master_dtype=torch.float32)
    held = []
    for _ in range(3):
        section.bind(gradients_for(section, torch.bfloat16))
        assert pool.num_out == 1
        section.unbind(keep=False)
        held.append((pool.nbytes, pool.num_out))
    assert held == [held[0]] * 3
    assert held[0][1] == 0


@kinds
def test_what_has_no_gradient_is_bound_to_none(make_section, kind):
    section, _ = make_section(trained(torch.bfloat16), kind=kind, master_dtype=torch.float32)
    gradients = gradients_for(section, torch.bfloat16)
    last = max(gradients)
    del gradients[last]
    section.bind(gradients)
    assert section.tensors[last].grad is None


@pytest.mark.parametrize(("keep", "is_kept"), [(True, True), (False, False)])
def test_gradients_of_parameters_themselves_are_kept_if_asked_for(make_section, keep, is_kept):
    params = trained()
    section, _ = make_section(params)
    section.bind(gradients_for(section, torch.float32))
    section.unbind(keep=keep)
    assert [params[i].grad is not None for i in section.tensors] == [is_kept] * 3


@pytest.mark.parametrize(("kind", "master_dtype"), [("element", None), ("staged", torch.float32)])
def test_gradients_of_stand_ins_for_parameters_are_never_kept(make_section, kind, master_dtype):
    params = trained(torch.bfloat16)
    section, _ = make_section(params, kind=kind, master_dtype=master_dtype)
    section.bind(gradients_for(section, torch.bfloat16))
    section.unbind(keep=True)
    assert [tensor.grad for tensor in section.tensors.values()] == [None] * len(section.tensors)


def test_gradients_of_the_parameters_are_left_to_them(make_section):
    params = trained(torch.bfloat16)
    section, _ = make_section(params, master_dtype=torch.float32)
    params[0].grad = torch.ones_like(params[0])
    section.bind({0: params[0].grad})
    section.unbind(keep=True)
    assert params[0].grad is not None
