"""Rows that shard and columns that replicate, over ranks that are threads."""

import pytest
import torch

SHAPES = pytest.mark.parametrize(
    ("num_rows", "num_columns"), [(2, 2), (2, 3), (3, 2), (2, 1), (1, 2)]
)


def place(grid):
    """Row and column of a member."""
    return grid._column.rank, grid._row.rank


def test_a_grid_knows_its_place(run_hybrid):
    run = run_hybrid(
        2, 3, lambda grid: (grid.rank, grid.world_size, grid.num_members, grid.process_group)
    )
    assert run.results == [(rank, 3, 6, None) for _ in range(2) for rank in range(3)]


def test_the_first_rank_of_the_first_row_is_the_first_member(run_hybrid):
    assert run_hybrid(2, 2, lambda grid: grid.is_first).results == [True, False, False, False]


def test_the_first_row_is_the_first_replica(run_hybrid):
    assert run_hybrid(2, 2, lambda grid: grid.is_first_replica).results == [
        True,
        True,
        False,
        False,
    ]


@SHAPES
def test_members_are_numbered_row_by_row(run_hybrid, num_rows, num_columns):
    run = run_hybrid(
        num_rows, num_columns, lambda grid: [grid.rank_of(m) for m in range(grid.num_members)]
    )
    assert run.results[0] == [*range(num_columns)] * num_rows


@SHAPES
def test_a_broadcast_reaches_every_member_from_the_first(run_hybrid, num_rows, num_columns):
    def serve(grid):
        row, column = place(grid)
        tensor = torch.tensor([10.0 * row + column + 1])
        grid.broadcast(tensor).wait()
        return tensor.item()

    run = run_hybrid(num_rows, num_columns, serve)
    assert (run.results, run.num_left_over) == ([1.0] * (num_rows * num_columns), 0)


@SHAPES
def test_sections_are_gathered_within_rows(run_hybrid, num_rows, num_columns):
    def serve(grid):
        row, _ = place(grid)
        sections = {r: torch.tensor([10.0 * row + grid.rank]) for r in range(num_columns)}
        grid.all_gather(sections).wait()
        return [section.item() for section in sections.values()]

    run = run_hybrid(num_rows, num_columns, serve)
    assert run.results == [
        [10.0 * row + rank for rank in range(num_columns)]
        for row in range(num_rows)
        for _ in range(num_columns)
    ]


def reduced(grid, value, *, adds=False):
    """The sum over the row of a part per rank, full of a value each."""
    parts = [torch.full((2,), value) for _ in range(grid.world_size)]
    out = torch.full((2,), 1000.0)
    num = grid.num_scratch("cpu", adds=adds, casts=False)
    scratch = [torch.zeros(2) for _ in range(max(num, 0))]
    grid.reduce_scatter(parts, out=out, scratch=scratch, scale=0.5, adds=adds).wait()
    return out


@pytest.mark.parametrize(("adds", "start"), [(False, 0.0), (True, 1000.0)])
def test_sums_are_taken_within_rows(run_hybrid, adds, start):
    def serve(grid):
        row, column = place(grid)
        return reduced(grid, 10.0 * row + column, adds=adds).tolist()

    sums = [start + 0.5 * (0 + 1), start + 0.5 * (10 + 11)]
    assert run_hybrid(2, 2, serve).results == [[total] * 2 for total in sums for _ in range(2)]


def test_sums_over_replicas_are_taken_within_columns(run_hybrid):
    def serve(grid):
        row, column = place(grid)
        tensor = torch.tensor([100.0 * row + column])
        grid.reduce_over_replicas(tensor)
        return tensor.item()

    assert run_hybrid(3, 2, serve).results == [300.0, 303.0] * 3


def test_both_sums_together_are_over_every_member(run_hybrid):
    def serve(grid):
        row, column = place(grid)
        out = reduced(grid, 10.0 * row + column)
        grid.reduce_over_replicas(out)
        return out.tolist()

    assert run_hybrid(2, 2, serve).results == [[0.5 * (0 + 1 + 10 + 11)] * 2] * 4


@pytest.mark.parametrize(("maximum", "expected"), [(False, [1.0, 21.0]), (True, [1.0, 11.0])])
def test_what_is_equal_in_columns_is_reduced_within_rows(run_hybrid, maximum, expected):
    def serve(grid):
        row, column = place(grid)
        tensor = torch.tensor([10.0 * row + column])
        grid.all_reduce(tensor, maximum=maximum)
        return tensor.item()

    assert run_hybrid(2, 2, serve).results == [expected[0]] * 2 + [expected[1]] * 2


@SHAPES
def test_ints_of_every_member_are_gathered_in_their_order(run_hybrid, num_rows, num_columns):
    def serve(grid):
        row, column = place(grid)
        return grid.all_gather_ints([row, column, -(2**62)])

    expected = [[r, c, -(2**62)] for r in range(num_rows) for c in range(num_columns)]
    assert run_hybrid(num_rows, num_columns, serve).results == [expected] * len(expected)


def test_no_ints_are_gathered_as_such(run_hybrid):
    assert run_hybrid(2, 2, lambda grid: grid.all_gather_ints([])).results == [[[]] * 4] * 4


def test_gathers_of_ints_can_be_launched_before_the_first_is_awaited(run_hybrid):
    def serve(grid):
        waits = [grid.launch_all_gather_ints([10 * n + sum(place(grid))]) for n in range(3)]
        return [[value for (value,) in wait()] for wait in waits]

    expected = [[10 * n, 10 * n + 1, 10 * n + 1, 10 * n + 2] for n in range(3)]
    assert run_hybrid(2, 2, serve).results == [expected] * 4


@SHAPES
def test_objects_of_every_member_are_gathered_in_their_order(run_hybrid, num_rows, num_columns):
    run = run_hybrid(num_rows, num_columns, lambda grid: grid.all_gather_object(place(grid)))
    expected = [(r, c) for r in range(num_rows) for c in range(num_columns)]
    assert run.results == [expected] * len(expected)


def test_tensors_are_sent_within_rows(run_hybrid):
    def serve(grid):
        row, column = place(grid)
        tensor = torch.tensor([10.0 * row])
        if column == 0:
            grid.send(tensor + 1, dst=1).wait()
        else:
            grid.recv(tensor, src=0).wait()
        return tensor.item()

    assert run_hybrid(2, 2, serve).results == [0.0, 1.0, 10.0, 11.0]
