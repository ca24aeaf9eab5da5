from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardopt.partition import Chunk, Piece, plan_chunks

numel_lists = st.lists(st.integers(0, 50), max_size=12)
chunk_numels = st.integers(1, 30)


def plan(numels, chunk_numel, *, itemsize=2):
    """Chunks of so many elements."""
    return plan_chunks(numels, chunk_nbytes=chunk_numel * itemsize, itemsize=itemsize)


def test_the_worked_example_of_plan_chunks_holds():
    assert plan_chunks([3, 5], chunk_nbytes=16, itemsize=4) == [
        Chunk((Piece(0, 0, 3), Piece(1, 0, 1))),
        Chunk((Piece(1, 1, 5),)),
    ]


@given(numel_lists, chunk_numels)
def test_pieces_cover_every_element_once_and_in_order(numels, chunk_numel):
    covered = [
        (piece.tensor, element)
        for chunk in plan(numels, chunk_numel)
        for piece in chunk.pieces
        for element in range(piece.start, piece.stop)
    ]
    assert covered == [(tensor, e) for tensor, numel in enumerate(numels) for e in range(numel)]


@given(numel_lists, chunk_numels)
def test_every_chunk_but_the_last_is_full(numels, chunk_numel):
    chunks = plan(numels, chunk_numel)
    assert [chunk.numel for chunk in chunks[:-1]] == [chunk_numel] * len(chunks[:-1])


@given(numel_lists, chunk_numels)
def test_the_last_chunk_is_not_empty_and_not_above_the_bound(numels, chunk_numel):
    chunks = plan(numels, chunk_numel)
    assert all(0 < chunk.numel <= chunk_numel for chunk in chunks[-1:])


@given(numel_lists, chunk_numels)
def test_no_piece_is_empty(numels, chunk_numel):
    pieces = [piece for chunk in plan(numels, chunk_numel) for piece in chunk.pieces]
    assert all(piece.numel > 0 for piece in pieces)


@given(numel_lists, chunk_numels)
def test_a_chunk_holds_at_most_one_piece_of_a_tensor(numels, chunk_numel):
    for chunk in plan(numels, chunk_numel):
        assert all(one.tensor < other.tensor for one, other in pairwise(chunk.pieces))


@given(numel_lists, chunk_numels)
def test_equal_arguments_give_equal_chunks(numels, chunk_numel):
    assert plan(numels, chunk_numel) == plan(tuple(numels), chunk_numel)


def test_no_tensors_need_no_chunks():
    assert plan([], 4) == []


def test_tensors_without_elements_need_no_chunks():
    assert plan([0, 0], 4) == []


def test_a_tensor_that_fills_a_chunk_exactly_leaves_no_empty_one_behind():
    assert plan([4], 4) == [Chunk((Piece(0, 0, 4),))]


@given(numel_lists, st.integers(1, 60), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_chunk_is_not_above_the_bound_unless_it_is_one_element(numels, chunk_nbytes, itemsize):
    chunks = plan_chunks(numels, chunk_nbytes=chunk_nbytes, itemsize=itemsize)
    assert all(c.numel * itemsize <= chunk_nbytes or c.numel == 1 for c in chunks)


@given(numel_lists, st.integers(1, 60), st.sampled_from([1, 2, 4, 8, 16]))
def test_another_element_would_be_above_the_bound(numels, chunk_nbytes, itemsize):
    chunks = plan_chunks(numels, chunk_nbytes=chunk_nbytes, itemsize=itemsize)
    assert all((c.numel + 1) * itemsize > chunk_nbytes for c in chunks[:-1])
