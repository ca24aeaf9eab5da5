from itertools import pairwise

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardopt.buffers import StagedBucket


@pytest.fixture
def make_bucket(plan_for, pool, copy_all):
    """The first bucket of some parameters."""

    def make(params, **options):
        _, layout = plan_for(params, **options)
        return StagedBucket(layout.buckets[0], params, pool=pool, copy_all=copy_all)

    return make


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_a_section_sent_is_a_section_received(make_bucket, params, others, assert_equal, rank):
    sender, receiver = make_bucket(params), make_bucket(others)
    sent, received = sender.open([rank]), receiver.open([rank])
    received.incoming(rank).copy_(sent.outgoing(rank))
    received.close([rank])
    for slot in sender.plan.sections[rank].slots:
        assert_equal(others[slot.param], params[slot.param])


@pytest.mark.parametrize("rank", [0, 1])
def test_sections_of_other_ranks_are_left_alone(make_bucket, others, assert_equal, rank):
    before = [param.clone() for param in others]
    bucket = make_bucket(others)
    opened = bucket.open([0, 1])
    opened.incoming(rank).zero_()
    opened.close([rank])
    for slot in bucket.plan.sections[1 - rank].slots:
        assert_equal(others[slot.param], before[slot.param])


def test_parameters_keep_memory_and_strides(make_bucket, params):
    before = [(param.data_ptr(), param.stride()) for param in params]
    bucket = make_bucket(params)
    opened = bucket.open([0, 1])
    opened.outgoing(0)
    opened.close([1])
    assert [(param.data_ptr(), param.stride()) for param in params] == before


def test_outgoing_holds_the_parameters_back_to_back_in_logical_order(make_bucket, params):
    bucket = make_bucket(params)
    opened = bucket.open([0])
    expected = torch.cat([params[i].reshape(-1) for i in (0, 2, 4)])
    assert torch.equal(opened.outgoing(0), expected)


def test_outgoing_holds_the_values_of_the_time_it_is_asked_for(make_bucket, params):
    bucket = make_bucket(params)
    opened = bucket.open([0])
    params[0].zero_()
    assert not opened.outgoing(0)[: params[0].numel()].any()


def test_every_section_is_a_flat_contiguous_tensor_of_its_numel(make_bucket, params):
    bucket = make_bucket(params)
    opened = bucket.open([0, 1])
    flats = [opened.outgoing(0), opened.incoming(1)]
    numels = [(section.numel,) for section in bucket.plan.sections]
    assert [(f.shape, f.is_contiguous()) for f in flats] == [(numel, True) for numel in numels]


def test_open_sections_do_not_overlap(make_bucket, params):
    opened = make_bucket(params).open([0, 1])
    spans = sorted(
        (f.data_ptr(), f.data_ptr() + f.numel() * f.element_size())
        for f in (opened.outgoing(0), opened.incoming(1))
    )
    assert all(one[1] <= other[0] for one, other in pairwise(spans))


def test_nothing_received_changes_no_parameter(make_bucket, params, assert_equal):
    before = [param.clone() for param in params]
    opened = make_bucket(params).open([0, 1])
    opened.incoming(0).zero_()
    opened.close([])
    for param, expected in zip(params, before, strict=True):
        assert_equal(param, expected)


def test_parameters_that_are_trained_can_be_received_without_autograd_noticing(make_bucket):
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3, 2).t())]
    opened = make_bucket(params, owners=[0, 0]).open([0])
    opened.incoming(0).zero_()
    opened.close([0])
    assert [(p.is_leaf, p.requires_grad, p.sum().item()) for p in params] == [(True, True, 0.0)] * 2


# --- sections that need no staging ----------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 5), (), (1,)])
def test_a_section_of_one_contiguous_parameter_is_that_parameters_memory(make_bucket, shape):
    param = torch.zeros(shape)
    opened = make_bucket([param], owners=[0]).open([0])
    assert opened.outgoing(0).data_ptr() == param.data_ptr()


def test_what_arrives_in_a_direct_section_is_in_the_parameter_at_once(make_bucket):
    param = torch.zeros(2, 2)
    opened = make_bucket([param], owners=[0]).open([0])
    opened.incoming(0).fill_(3.0)
    assert param.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_direct_sections_take_no_staging_memory(make_bucket, pool):
    bucket = make_bucket([torch.zeros(4), torch.zeros(5)], owners=[0, 1])
    bucket.open([0, 1]).close([1])
    assert pool.nbytes == 0


@pytest.mark.parametrize(
    "param",
    [
        torch.zeros(3, 4).t(),
        torch.zeros(3, 8)[:, ::2],
        torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "gappy", "channels_last"],
)
def test_a_section_of_one_parameter_that_is_not_contiguous_is_staged(make_bucket, param):
    opened = make_bucket([param], owners=[0]).open([0])
    assert opened.outgoing(0).data_ptr() != param.data_ptr()


def test_staging_memory_is_taken_for_the_staged_sections_only(make_bucket, pool):
    params = [torch.zeros(1000), torch.zeros(2), torch.zeros(3)]
    make_bucket(params, owners=[0, 1, 1]).open([0, 1]).close([])
    assert pool.nbytes == 5 * 4


def test_staging_memory_is_made_large_enough_for_all_ranks_at_once(make_bucket, pool):
    params = [torch.zeros(100), torch.zeros(100), torch.zeros(2), torch.zeros(3)]
    make_bucket(params, owners=[0, 0, 1, 1]).open([1]).close([])
    assert pool.nbytes == 205 * 4


# --- nothing to undo ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reattach", "restore"])
def test_a_staged_bucket_has_nothing_to_reattach_or_restore(make_bucket, method):
    param = torch.ones(3)
    bucket = make_bucket([param], owners=[0])
    before = param.data_ptr()
    getattr(bucket, method)()
    assert param.data_ptr() == before


def test_no_parameter_of_a_staged_bucket_counts_as_moved(make_bucket):
    param = torch.nn.Parameter(torch.ones(3))
    bucket = make_bucket([param], owners=[0])
    param.data = torch.zeros(3)
    assert bucket.reattach() == []


def test_a_parameter_that_moved_to_other_memory_is_followed(make_bucket):
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    bucket = make_bucket(params, owners=[0, 0])
    bucket.open([0]).outgoing(0)
    params[0].data = torch.tensor([5.0, 6.0])
    assert bucket.open([0]).outgoing(0).tolist() == [5.0, 6.0, 1.0, 1.0]


def test_a_parameter_that_was_transposed_in_place_is_followed(make_bucket):
    params = [torch.nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), torch.zeros(1)]
    bucket = make_bucket(params, owners=[0, 0])
    bucket.open([0]).outgoing(0)
    params[0].data = params[0].data.t()
    assert bucket.open([0]).outgoing(0).tolist() == [1.0, 3.0, 2.0, 4.0, 0.0]


def test_what_arrives_is_put_into_a_parameter_that_moved(make_bucket):
    params = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))]
    bucket = make_bucket(params, owners=[0, 0])
    bucket.open([0]).close([0])
    params[0].data = torch.tensor([5.0, 6.0])
    opened = bucket.open([0])
    opened.incoming(0).fill_(7.0)
    opened.close([0])
    assert [param.tolist() for param in params] == [[7.0, 7.0], [7.0, 7.0]]


def test_a_bucket_follows_its_staging_memory(make_bucket):
    params = [torch.ones(2), torch.ones(3)]
    bucket = make_bucket(params, owners=[0, 0])
    both = [bucket.open([0]), bucket.open([0])]
    assert [opened.outgoing(0).tolist() for opened in both] == [[1.0] * 5] * 2


def test_buckets_that_were_made_together_share_memory_from_the_first_exchange_on(make_bucket, pool):
    small = make_bucket([torch.ones(2), torch.ones(3)], owners=[0, 0])
    large = make_bucket([torch.ones(20), torch.ones(30)], owners=[0, 0])
    places = []
    for bucket in (small, large, small):
        opened = bucket.open([0])
        places.append(opened.outgoing(0).untyped_storage().data_ptr())
        opened.close([])
    assert (len(set(places)), pool.nbytes) == (1, 50 * 4)


def test_memory_that_a_bucket_made_later_replaced_is_freed_at_the_next_exchange(make_bucket):
    small = make_bucket([torch.ones(2), torch.ones(3)], owners=[0, 0])
    opened = small.open([0])
    memory = StorageWeakRef(opened.outgoing(0).untyped_storage())
    opened.close([])
    del opened
    make_bucket([torch.ones(20), torch.ones(30)], owners=[0, 0]).open([0]).close([])
    opened = small.open([0])
    opened.outgoing(0)
    opened.close([])
    assert memory.expired()


# --- the pool -------------------------------------------------------------------------------------


def test_repeated_exchanges_hold_a_steady_number_of_bytes(make_bucket, params, pool):
    bucket = make_bucket(params)
    held = []
    for _ in range(4):
        bucket.open([0, 1]).close([1])
        held.append(pool.nbytes)
    numel = sum(section.numel for section in bucket.plan.sections)
    assert held == [numel * params[0].element_size()] * 4


def test_closing_twice_gives_the_memory_back_once(make_bucket, params, pool):
    opened = make_bucket(params).open([0])
    opened.close([])
    held = pool.nbytes
    opened.close([])
    assert pool.nbytes == held


def test_memory_taken_twice_at_once_is_two_pieces_of_memory(pool):
    like = torch.zeros(1)
    assert pool.take(4, like=like).data_ptr() != pool.take(4, like=like).data_ptr()


def test_memory_given_back_is_taken_again(pool):
    like = torch.zeros(1)
    memory = pool.take(4, like=like)
    pool.give_back(memory)
    assert pool.take(3, like=like) is memory


def test_memory_that_fits_exactly_is_taken_again(pool):
    like = torch.zeros(1)
    memory = pool.take(4, like=like)
    pool.give_back(memory)
    assert pool.take(4, like=like) is memory


def test_of_the_free_pieces_the_smallest_that_fits_is_taken(pool):
    like = torch.zeros(1)
    pieces = [pool.take(numel, like=like) for numel in (9, 3, 5)]
    for piece in pieces:
        pool.give_back(piece)
    assert pool.take(4, like=like) is pieces[2]


def test_a_larger_piece_replaces_one_that_is_too_small(pool):
    like = torch.zeros(1)
    pool.give_back(pool.take(4, like=like))
    pool.give_back(pool.take(6, like=like))
    assert pool.nbytes == 6 * 4


def test_as_many_pieces_are_held_as_were_taken_at_once(pool):
    like = torch.zeros(1)
    for numel in range(1, 9):
        taken = [pool.take(numel, like=like), pool.take(numel, like=like)]
        for memory in taken:
            pool.give_back(memory)
    assert pool.nbytes == 2 * 8 * 4


@pytest.mark.parametrize("like", [torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1).bool()])
def test_memory_is_of_the_wanted_dtype(pool, like):
    pool.give_back(pool.take(4, like=torch.zeros(1)))
    assert pool.take(2, like=like).dtype == like.dtype


def test_memory_is_on_the_wanted_device(pool):
    pool.give_back(pool.take(4, like=torch.zeros(1)))
    assert pool.take(2, like=torch.zeros(1, device="meta")).device.type == "meta"


def test_memory_like_a_trained_parameter_needs_no_gradient(pool):
    assert not pool.take(2, like=torch.nn.Parameter(torch.zeros(1))).requires_grad


def test_an_empty_pool_holds_nothing(pool):
    assert pool.nbytes == 0


def test_the_largest_size_that_was_announced_is_made_at_once(pool):
    like = torch.zeros(1)
    for numel in (6, 9, 4):
        pool.expect(numel, like=like)
    assert pool.take(2, like=like).numel() == 9


def test_more_than_was_announced_can_be_taken(pool):
    like = torch.zeros(1)
    pool.expect(6, like=like)
    assert pool.take(9, like=like).numel() == 9


def test_what_is_announced_counts_for_its_dtype_only(pool):
    pool.expect(6, like=torch.zeros(1))
    assert pool.take(2, like=torch.zeros(1).double()).numel() == 2


def test_announcing_holds_no_memory(pool):
    pool.expect(6, like=torch.zeros(1))
    assert pool.nbytes == 0


def test_memory_that_is_out_does_not_count_as_held(pool):
    pool.take(4, like=torch.zeros(1))
    assert pool.nbytes == 0
