"""Sums over ranks: their bits, whichever place the parts lie in."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardopt.collectives import LoneRank
from shardopt.collectives.group import add_up

values = st.floats(-1e6, 1e6, width=32)
scales = st.sampled_from([1.0, 0.5, 1 / 3])


def tensors(numbers, dtype=torch.float32):
    return [torch.tensor([number, -number]).to(dtype) for number in numbers]


def expected_sum(numbers, *, scale, dtype=torch.float32):
    """The sum in the order of ranks, scaled."""
    parts = tensors(numbers, dtype)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total * scale if scale != 1.0 else total


# --- add_up ---------------------------------------------------------------------------------------


@given(
    st.lists(values, min_size=1, max_size=5),
    scales,
    st.sampled_from([None, 0, 1]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_sum_is_taken_in_the_order_of_ranks_wherever_out_stands(numbers, scale, place, dtype):
    parts = tensors(numbers, dtype)
    out = torch.full((2,), 7.0, dtype=dtype)
    if place is not None and place < len(parts):
        out = parts[place]
    add_up(parts, out=out, scale=scale, adds=False)
    assert torch.equal(out, expected_sum(numbers, scale=scale, dtype=dtype))


@given(st.lists(values, min_size=1, max_size=5), scales, values)
def test_the_scaled_sum_is_added_to_what_is_there(numbers, scale, start):
    out = torch.tensor([start, start])
    before = out.clone()
    add_up(tensors(numbers), out=out, scale=scale, adds=True)
    assert torch.equal(out, before + expected_sum(numbers, scale=scale))


@given(st.lists(values, min_size=1, max_size=5), scales)
def test_parts_of_another_dtype_are_summed_in_that_of_out(numbers, scale):
    parts = tensors(numbers, torch.bfloat16)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    out = torch.zeros(2)
    add_up(parts, out=out, scale=scale, adds=False)
    assert torch.equal(out, expected * scale if scale != 1.0 else expected)


@given(st.lists(values, min_size=1, max_size=5), scales, values)
def test_parts_of_another_dtype_are_added_to_out_one_by_one(numbers, scale, start):
    """Each in the dtype of ``out``, which is more precise; a product and a sum may be one rounding."""
    parts = tensors(numbers, torch.bfloat16)
    out = torch.tensor([start, start])
    exact = out.double() + scale * sum(part.double() for part in parts)
    add_up(parts, out=out, scale=scale, adds=True)
    largest = max(map(abs, [start, *numbers])) * (len(numbers) + 1)
    # at most 2 roundings per part, each by 2**-24 of a partial sum
    bound = 2 * len(numbers) * largest * 2.0**-24
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=bound)


@pytest.mark.parametrize("numel", [0, 1])
def test_as_many_elements_are_summed_as_there_are(numel):
    out = torch.zeros(numel)
    add_up([torch.ones(numel), torch.ones(numel)], out=out, scale=1.0, adds=False)
    assert out.tolist() == [2.0] * numel


def test_out_in_second_place_is_not_added_twice():
    out = torch.tensor([2.0])
    add_up([torch.tensor([1.0]), out, torch.tensor([4.0])], out=out, scale=1.0, adds=False)
    assert out.tolist() == [7.0]


# --- over ranks -----------------------------------------------------------------------------------


def reduced(numels, values, *, dtype=torch.float32, sum_dtype=None, scale=1.0, start=None):
    """A function that reduces parts of ``numels`` elements, filled with the value of each rank.

    ``start`` is what ``out`` holds, to be added to.
    """

    def serve(group):
        parts = [torch.full((numel,), values[group.rank], dtype=dtype) for numel in numels]
        numel, adds = numels[group.rank], start is not None
        out = torch.full((numel,), 7.0 if start is None else start, dtype=sum_dtype or dtype)
        num = group.num_scratch("cpu", adds=adds, casts=out.dtype != dtype)
        scratch = [torch.full((numel,), 5.0, dtype=dtype) for _ in range(num)]
        group.reduce_scatter(parts, out=out, scratch=scratch, scale=scale, adds=adds).wait()
        return out.tolist()

    return serve


@pytest.mark.parametrize("numels", [(2, 2, 2), (3, 1, 4), (0, 2, 5), (0, 0, 0)])
def test_every_rank_gets_the_sum_of_its_part(run_threads, numels):
    run = run_threads(3, reduced(numels, [1.0, 2.0, 4.0]))
    assert (run.texts, run.results) == (["", "", ""], [[7.0] * numel for numel in numels])


def test_the_sum_is_taken_in_the_order_of_ranks(run_threads):
    """1 + 2**53 rounds to 2**53, so ((1 + 2**53) - 2**53) is 0 and any other order gives 1."""
    numbers = [1.0, 2.0**53, -(2.0**53)]
    run = run_threads(3, reduced((2, 2, 2), numbers, dtype=torch.float64))
    assert run.results == [[0.0, 0.0]] * 3


@given(st.lists(values, min_size=1, max_size=4), scales, st.sampled_from([None, 0.0, 3.5]))
def test_every_rank_gets_the_bits_of_the_sum_in_the_order_of_ranks(
    run_threads, numbers, scale, start
):
    expected = expected_sum(numbers, scale=scale)[:1]
    if start is not None:
        expected = torch.tensor([start]) + expected
    serve = reduced((2,) * len(numbers), numbers, scale=scale, start=start)
    is_alone = len(numbers) == 1
    results = [serve(LoneRank())] if is_alone else run_threads(len(numbers), serve).results
    assert repr(results) == repr([[expected.item()] * 2] * len(numbers))


@pytest.mark.parametrize("start", [None, 1.0])
def test_sums_can_be_taken_in_another_dtype_than_the_wire(run_threads, start):
    """In bfloat16 256 + 1 + 1 is 256."""
    numbers = [256.0, 1.0, 1.0]
    run = run_threads(
        3,
        reduced((1, 1, 1), numbers, dtype=torch.bfloat16, sum_dtype=torch.float32, start=start),
    )
    assert run.results == [[258.0 + (start or 0.0)]] * 3


def test_each_rank_sends_every_other_its_part_once(run_threads):
    run = run_threads(3, reduced((3, 1, 4), [1.0, 2.0, 4.0]))
    assert sorted((m.src, m.dst, m.numel) for m in run.world.messages) == [
        (0, 1, 1),
        (0, 2, 4),
        (1, 0, 3),
        (1, 2, 4),
        (2, 0, 3),
        (2, 1, 1),
    ]
    assert run.num_left_over == 0


def test_parts_that_others_own_are_sent_as_they_are(run_threads):
    """A rank's own part is scratch memory to a sum that is added, those of others are not."""

    def serve(group):
        parts = [torch.full((2,), 1.0 + group.rank) for _ in range(3)]
        scratch = [torch.zeros(2) for _ in range(2)]
        group.reduce_scatter(parts, out=torch.zeros(2), scratch=scratch, adds=True).wait()
        return [part.tolist() for rank, part in enumerate(parts) if rank != group.rank]

    run = run_threads(3, serve)
    assert run.results == [[[1.0 + rank] * 2] * 2 for rank in range(3)]


@pytest.mark.parametrize("missing", [(), (1,), (0, 2)])
def test_sections_gathered_are_those_of_their_ranks(run_threads, missing):
    def serve(group):
        sections = {
            rank: torch.full((rank + 1,), 10.0 * group.rank)
            for rank in range(3)
            if rank not in missing
        }
        group.all_gather(sections).wait()
        return {rank: section.unique().tolist() for rank, section in sections.items()}

    run = run_threads(3, serve)
    assert run.results == [{r: [10.0 * r] for r in range(3) if r not in missing}] * 3
