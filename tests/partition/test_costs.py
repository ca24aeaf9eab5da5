import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt import newton_schulz_work
from shardopt.partition import ParamSpec

SPEC = ParamSpec(
    index=0,
    name=None,
    group=0,
    shape=(7,),
    stride=(1,),
    dtype="torch.float32",
    itemsize=4,
    device="cpu#0",
    requires_grad=True,
)
lengths = st.integers(0, 10**5)


def work(*shape):
    return newton_schulz_work(dataclasses.replace(SPEC, shape=shape))


def test_the_worked_example_of_newton_schulz_work_holds():
    assert (work(2, 3), work(7)) == (160.0, 7.0)


@given(lengths, lengths)
def test_a_matrix_and_its_transpose_cost_the_same(rows, columns):
    assert work(rows, columns) == work(columns, rows)


@given(st.integers(1, 10**3), st.integers(1, 10**3))
def test_a_matrix_with_one_more_row_costs_more(rows, columns):
    assert work(rows + 1, columns) > work(rows, columns)


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((9,), 9), ((2, 3, 4), 24), ((0,), 0)])
def test_what_is_no_matrix_costs_its_elements(shape, numel):
    assert work(*shape) == numel


def test_costs_are_floats():
    assert (type(work(2, 3)), type(work(7))) == (float, float)
