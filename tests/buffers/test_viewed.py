import pytest
import torch

from shardopt.arguments import read_specs
from shardopt.buffers import ViewedBucket
from shardopt.buffers.viewed import view_slot
from shardopt.partition import Slot

ALIGNMENT = 64


@pytest.fixture
def make_bucket(plan_for):
    """The bucket of some parameters, which become views of it."""

    def make(params, *, alignment_nbytes=ALIGNMENT, owners=None):
        specs, layout = plan_for(params, owners=owners, alignment_nbytes=alignment_nbytes)
        assert len(layout.buckets) == 1
        return ViewedBucket(layout.buckets[0], params, specs)

    return make


def trained(*shapes):
    return [
        torch.nn.Parameter(torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape))
        for shape in shapes
    ]


# --- moving in ------------------------------------------------------------------------------------


def test_parameters_keep_their_values(make_bucket, params, assert_equal):
    before = [param.clone() for param in params]
    make_bucket(params)
    for param, expected in zip(params, before, strict=True):
        assert_equal(param, expected)


def test_all_parameters_become_views_of_one_memory(make_bucket, params):
    make_bucket(params)
    assert len({param.untyped_storage().data_ptr() for param in params}) == 1


def test_every_parameter_lies_where_the_plan_says(make_bucket, params):
    bucket = make_bucket(params)
    base = params[0].untyped_storage().data_ptr()
    itemsize = params[0].element_size()
    starts = {slot.param: slot.start for s in bucket.plan.sections for slot in s.slots}
    offsets = [(param.data_ptr() - base) // itemsize for param in params]
    assert offsets == [starts[index] for index in range(len(params))]


def test_every_parameter_is_aligned_within_the_bucket(make_bucket, params):
    make_bucket(params)
    base = params[0].untyped_storage().data_ptr()
    assert [(param.data_ptr() - base) % ALIGNMENT for param in params] == [0] * len(params)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5])
def test_a_dense_parameter_keeps_its_strides(make_bucket, params, index):
    stride = params[index].stride()
    make_bucket(params)
    assert params[index].stride() == stride


def test_a_channels_last_parameter_stays_channels_last(make_bucket, params):
    make_bucket(params)
    assert params[2].is_contiguous(memory_format=torch.channels_last)


def test_a_parameter_with_gaps_becomes_contiguous(make_bucket, params):
    make_bucket(params)
    assert params[4].is_contiguous()


def test_parameters_stay_the_same_trained_leaves(make_bucket):
    params = trained((2, 3), (4,))
    kept = list(params)
    make_bucket(params)
    assert [(p is k, p.is_leaf, p.requires_grad) for p, k in zip(params, kept, strict=True)] == [
        (True, True, True)
    ] * 2


def test_padding_is_zero(make_bucket):
    params = trained((3,), (2,))
    bucket = make_bucket(params, owners=[0, 0])
    section = bucket.open([0]).outgoing(0)
    assert section.tolist() == [1.0, 2.0, 3.0, *[0.0] * 13, 1.0, 2.0]


# --- travel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_section_sent_is_a_section_received(make_bucket, params, others, assert_equal, rank):
    sender, receiver = make_bucket(params), make_bucket(others)
    sent, received = sender.open([rank]), receiver.open([rank])
    received.incoming(rank).copy_(sent.outgoing(rank))
    received.close([rank])
    for slot in sender.plan.sections[rank].slots:
        assert_equal(others[slot.param], params[slot.param])


def test_a_section_is_the_memory_of_its_first_parameter(make_bucket):
    params = trained((3,), (2,))
    opened = make_bucket(params).open([0, 1])
    sections = [opened.outgoing(0), opened.incoming(1)]
    assert [s.data_ptr() for s in sections] == [param.data_ptr() for param in params]


def test_a_section_ends_with_its_last_parameter(make_bucket):
    bucket = make_bucket(trained((3,), (2,), (5,)))
    opened = bucket.open([0, 1])
    assert (opened.outgoing(0).numel(), opened.incoming(1).numel()) == (16 + 5, 2)


def test_outgoing_and_incoming_are_the_same_memory(make_bucket):
    opened = make_bucket(trained((3,), (2,))).open([1])
    assert opened.outgoing(1).data_ptr() == opened.incoming(1).data_ptr()


def test_what_an_optimizer_writes_in_place_is_in_the_section(make_bucket):
    params = trained((3,), (2,))
    bucket = make_bucket(params)
    with torch.no_grad():
        params[1].mul_(10)
    assert bucket.open([1]).outgoing(1).tolist() == [10.0, 20.0]


# --- reattach -------------------------------------------------------------------------------------


def replaced(make_bucket):
    """A bucket whose first parameter was given other memory; where that parameter lay before."""
    params = trained((2, 3), (4,))
    bucket = make_bucket(params)
    place = params[0].data_ptr()
    params[0].data = torch.full((2, 3), 7.0)
    return bucket, params, place


def test_reattach_brings_a_replaced_parameter_back_into_its_place(make_bucket):
    bucket, params, place = replaced(make_bucket)
    bucket.reattach()
    assert params[0].data_ptr() == place


def test_reattach_keeps_the_values_that_were_assigned(make_bucket):
    bucket, params, _ = replaced(make_bucket)
    bucket.reattach()
    assert params[0].tolist() == [[7.0] * 3] * 2


def test_reattach_leaves_values_that_were_not_replaced(make_bucket):
    bucket, params, _ = replaced(make_bucket)
    bucket.reattach()
    assert params[1].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_reattach_gives_back_the_strides_of_the_plan(make_bucket):
    params = trained((2, 3), (4,))
    bucket = make_bucket(params)
    params[0].data = torch.arange(6.0).view(3, 2).t()
    bucket.reattach()
    assert (params[0].stride(), params[0].tolist()) == ((3, 1), [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]])


def test_reattach_keeps_a_transposition_in_place(make_bucket):
    params = trained((2, 2))
    bucket = make_bucket(params)
    params[0].data = params[0].data.t()
    bucket.reattach()
    assert (params[0].stride(), params[0].tolist()) == ((2, 1), [[1.0, 3.0], [2.0, 4.0]])


def test_reattach_keeps_the_values_of_two_parameters_that_swapped_their_memory(make_bucket):
    params = trained((2,), (2,))
    with torch.no_grad():
        params[1].add_(10)
    bucket = make_bucket(params)
    params[0].data, params[1].data = params[1].data, params[0].data
    bucket.reattach()
    assert [param.tolist() for param in params] == [[11.0, 12.0], [1.0, 2.0]]


def test_reattach_writes_nothing_where_nothing_was_replaced(make_bucket):
    params = trained((2, 3), (4,))
    bucket = make_bucket(params)
    before = [param._version for param in params]
    bucket.reattach()
    assert [param._version for param in params] == before


@pytest.mark.parametrize("moved", [[], [0], [1], [0, 1]], ids=str)
def test_reattach_names_the_parameters_that_had_moved(make_bucket, moved):
    params = trained((2, 3), (4,))
    bucket = make_bucket(params)
    for index in moved:
        params[index].data = params[index].detach().clone()
    assert bucket.reattach() == moved


def test_what_was_taken_back_has_not_moved_again(make_bucket):
    bucket, _, _ = replaced(make_bucket)
    bucket.reattach()
    assert bucket.reattach() == []


# --- restore --------------------------------------------------------------------------------------


def test_restore_gives_every_parameter_memory_of_its_own(make_bucket, params):
    bucket = make_bucket(params)
    bucket.restore()
    assert len({param.untyped_storage().data_ptr() for param in params}) == len(params)


def test_restored_memory_is_no_larger_than_its_parameter(make_bucket, params):
    make_bucket(params).restore()
    nbytes = [param.untyped_storage().nbytes() for param in params]
    assert nbytes == [param.numel() * param.element_size() for param in params]


def test_restore_keeps_the_values_that_parameters_have_now(make_bucket, params, assert_equal):
    bucket = make_bucket(params)
    params[2].zero_()
    expected = [param.clone() for param in params]
    bucket.restore()
    for param, value in zip(params, expected, strict=True):
        assert_equal(param, value)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5])
def test_restore_keeps_the_strides_of_dense_parameters(make_bucket, params, index):
    stride = params[index].stride()
    make_bucket(params).restore()
    assert params[index].stride() == stride


def test_restored_parameters_are_not_taken_back(make_bucket):
    params = trained((2, 3), (4,))
    bucket = make_bucket(params)
    bucket.restore()
    before = [param.data_ptr() for param in params]
    bucket.reattach()
    assert [param.data_ptr() for param in params] == before


# --- buckets that are cut by element --------------------------------------------------------------


@pytest.fixture
def make_cut_bucket(cut_bucket):
    """A bucket cut for three ranks, whose parameters are views of it."""

    def make(params):
        specs, plan = cut_bucket(params, world_size=3, alignment_nbytes=ALIGNMENT)
        return ViewedBucket(plan, params, specs)

    return make


def in_memory_order(param):
    return param.detach().as_strided((param.numel(),), (1,), param.storage_offset())


def test_parameters_of_a_cut_bucket_keep_values_and_strides(make_cut_bucket, params, assert_equal):
    before = [param.clone() for param in params]
    strides = [param.stride() for param in params]
    strides[4] = (4, 1)  # has gaps, becomes contiguous
    make_cut_bucket(params)
    for param, expected in zip(params, before, strict=True):
        assert_equal(param, expected)
    assert [param.stride() for param in params] == strides


def test_flat_ranges_are_the_memory_of_their_parameters(make_cut_bucket, params):
    bucket = make_cut_bucket(params)
    for section in bucket.plan.sections:
        for slot in section.slots:
            flat = bucket.flat_range(slot.start, slot.numel)
            memory = in_memory_order(params[slot.param])
            part = memory[slot.offset : slot.offset + slot.numel]
            assert (flat.data_ptr(), flat.shape) == (part.data_ptr(), part.shape)


def test_flat_ranges_of_all_ranks_make_up_the_parameters(make_cut_bucket, params, assert_equal):
    bucket = make_cut_bucket(params)
    slots = [slot for section in bucket.plan.sections for slot in section.slots]
    for index, param in enumerate(params):
        mine = [slot for slot in slots if slot.param == index]
        flats = [bucket.flat_range(slot.start, slot.numel) for slot in mine]
        assert_equal(torch.cat(flats), in_memory_order(param))


def test_what_arrives_in_a_cut_section_is_in_the_parameters(make_cut_bucket):
    params = trained((40,), (3,))
    bucket = make_cut_bucket(params)
    opened = bucket.open([1])
    opened.incoming(1).zero_()
    opened.close([1])
    zeros = {
        slot.param: list(range(slot.offset, slot.offset + slot.numel))
        for slot in bucket.plan.sections[1].slots
    }
    assert [p.detach().eq(0).nonzero().flatten().tolist() for p in params] == [
        zeros.get(0, []),
        zeros.get(1, []),
    ]


def test_a_flat_range_of_a_section_is_what_travels(make_cut_bucket, params, assert_equal):
    bucket = make_cut_bucket(params)
    for section in bucket.plan.sections:
        if section.numel:
            sent = bucket.open([section.rank]).outgoing(section.rank)
            flat = bucket.flat_range(section.start, section.numel)
            assert (flat.data_ptr(), flat.shape) == (sent.data_ptr(), sent.shape)


# --- view_slot ------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5])
def test_a_slot_of_a_dense_parameter_has_its_shape_and_strides(params, index):
    spec = read_specs([{"params": params}])[index]
    flat = params[0].new_zeros(200)
    view = view_slot(flat, Slot(index, 7, 7 + spec.numel), spec)
    assert (tuple(view.shape), view.stride()) == (spec.shape, spec.stride)
    assert view.data_ptr() == flat[7:].data_ptr()


def test_a_slot_of_a_parameter_with_gaps_is_contiguous(params):
    spec = read_specs([{"params": params}])[4]
    view = view_slot(params[0].new_zeros(200), Slot(4, 7, 7 + spec.numel), spec)
    assert (tuple(view.shape), view.is_contiguous()) == (spec.shape, True)


def test_a_slot_of_a_flat_tensor_that_does_not_start_its_memory_lies_where_it_says(params):
    spec = read_specs([{"params": params}])[0]
    memory = params[0].new_zeros(200)
    view = view_slot(memory[50:], Slot(0, 7, 7 + spec.numel), spec)
    assert view.data_ptr() == memory[57:].data_ptr()
