import dataclasses
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.partition import Box, boxes_of, memory_order


@dataclasses.dataclass(frozen=True)
class Case:
    """Elements ``[start, stop)`` of a tensor of a shape."""

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def boxes(self):
        return boxes_of(self.shape, self.start, self.stop)


@st.composite
def cases(draw, least=0):
    shape = tuple(draw(st.lists(st.integers(least, 5), max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return Case(shape, start, stop)


@st.composite
def dense_tensors(draw):
    """Tensors whose elements are their positions in memory, gapless in any order of the dimensions.

    A dimension of one element can have any stride.
    """
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    strides = [draw(st.integers(0, 7)) if size == 1 else 0 for size in shape]
    step = 1
    for dim in draw(st.permutations(range(len(shape)))):
        if shape[dim] > 1:
            strides[dim] = step
            step *= shape[dim]
    return torch.arange(step).as_strided(shape, strides)


def region(tensor, box):
    """What a box addresses."""
    assert len(box.offsets) == len(box.sizes) == tensor.dim()
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def elements(tensor, box):
    """What a box addresses, in row-major order."""
    return region(tensor, box).reshape(-1).tolist()


def row_major(shape):
    return torch.arange(prod(shape)).view(shape)


# --- boxes_of -------------------------------------------------------------------------------------


@given(cases())
def test_boxes_hold_each_element_of_the_range_once_and_in_order(case):
    tensor = row_major(case.shape)
    held = [element for box in case.boxes for element in elements(tensor, box)]
    assert held == list(range(case.start, case.stop))


@given(cases())
def test_a_range_is_at_most_two_boxes_a_dimension_less_one(case):
    assert len(case.boxes) <= max(1, 2 * len(case.shape) - 1)


@given(cases())
def test_boxes_lie_within_the_tensor_and_are_not_empty(case):
    for box in case.boxes:
        for offset, size, length in zip(box.offsets, box.sizes, case.shape, strict=True):
            assert 0 <= offset < offset + size <= length


@given(cases())
def test_the_flat_range_splits_into_its_boxes_by_their_numels(case):
    flat = torch.arange(case.start, case.stop)
    pieces = flat.split([box.numel for box in case.boxes]) if case.boxes else []
    tensor = row_major(case.shape)
    for box, piece in zip(case.boxes, pieces, strict=True):
        assert torch.equal(piece.view(box.sizes), region(tensor, box))


@given(cases())
def test_an_empty_range_has_no_boxes(case):
    assert boxes_of(case.shape, case.start, case.start) == []


@given(cases(least=1))
def test_a_whole_tensor_is_one_box(case):
    whole = Box((0,) * len(case.shape), case.shape)
    assert boxes_of(case.shape, 0, prod(case.shape)) == [whole]


@given(cases())
def test_a_shape_may_be_a_list(case):
    assert boxes_of(list(case.shape), case.start, case.stop) == case.boxes


def test_a_range_can_need_as_many_boxes_as_the_bound_allows():
    assert len(boxes_of((3, 3, 3, 3), 1, 80)) == 7


def test_the_worked_example_of_boxes_of_holds():
    assert boxes_of((5, 7), 4, 30) == [
        Box((0, 4), (1, 3)),
        Box((1, 0), (3, 7)),
        Box((4, 0), (1, 2)),
    ]


def test_the_element_of_a_tensor_without_dimensions_is_a_box():
    [box] = boxes_of((), 0, 1)
    assert (box, box.numel) == (Box((), ()), 1)


# --- permuted and memory_order --------------------------------------------------------------------


@given(cases(least=1), st.data())
def test_a_permuted_box_addresses_the_same_elements(case, data):
    order = data.draw(st.permutations(range(len(case.shape))))
    tensor = row_major(case.shape)
    view = tensor.permute(order)  # its dimension i is dimension order[i] of the tensor
    for box in boxes_of(view.shape, case.start, case.stop):
        assert torch.equal(region(view, box), region(tensor, box.permuted(order)).permute(order))


@given(cases(), st.data())
def test_permuting_back_gives_the_same_box(case, data):
    order = data.draw(st.permutations(range(len(case.shape))))
    back = sorted(range(len(order)), key=order.__getitem__)
    for box in case.boxes:
        assert box.permuted(order).permuted(back) == box


def test_a_box_permuted_is_that_of_the_example():
    """Dimensions 0, 1 and 2 of the box are dimensions 2, 0 and 1 of the other tensor."""
    assert Box((1, 2, 3), (4, 5, 6)).permuted([2, 0, 1]) == Box((2, 3, 1), (5, 6, 4))


@given(dense_tensors())
def test_a_dense_tensor_in_memory_order_is_contiguous(tensor):
    order = memory_order(tensor.shape, tensor.stride())
    assert sorted(order) == list(range(tensor.dim()))
    assert tensor.permute(order).is_contiguous()


@given(dense_tensors(), st.data())
def test_a_range_of_memory_is_the_boxes_that_are_permuted_back(tensor, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    order = memory_order(tensor.shape, tensor.stride())
    ordered = [tensor.shape[dim] for dim in order]
    addressed = []
    for box in boxes_of(ordered, start, stop):
        addressed += region(tensor, box.permuted(order)).permute(order).reshape(-1).tolist()
    assert addressed == list(range(start, stop))


def test_the_worked_example_of_memory_order_holds():
    tensor = torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    assert tensor.stride() == (60, 1, 15, 3)
    assert memory_order((2, 3, 4, 5), (60, 1, 15, 3)) == [0, 2, 3, 1]


def test_a_range_of_a_channels_last_tensor_reaches_over_all_channels():
    """The first 5 of 2 * 2 pixels of 3 channels in memory: one pixel, and two channels of the next one."""
    order = memory_order((1, 3, 2, 2), (12, 1, 6, 3))
    boxes = [box.permuted(order) for box in boxes_of((1, 2, 2, 3), 0, 5)]
    assert boxes == [Box((0, 0, 0, 0), (1, 3, 1, 1)), Box((0, 0, 0, 1), (1, 2, 1, 1))]
