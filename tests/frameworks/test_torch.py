"""The torch adapter: what of it is no tensor method."""

import gc
import types
import weakref
from datetime import timedelta

import pytest
import torch

from shardopt.frameworks.sharded_gradient import ShardedGradient
from shardopt.frameworks.torch import TORCH, timeout_of

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


# --- scale_into -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.5, 1 / 3])
def test_a_multiple_is_written_as_a_product_rounds(dtype, factor):
    source = torch.linspace(-3.0, 5.0, 12, dtype=torch.float64).to(dtype).view(3, 4)
    destination = torch.zeros(4, 3, dtype=dtype).t()
    TORCH.scale_into(destination, source, factor)
    assert torch.equal(destination, source * factor)


def test_a_multiple_is_rounded_once_to_another_dtype():
    destination = torch.zeros(1, dtype=torch.float16)
    TORCH.scale_into(destination, torch.tensor([90000.0]), 1 / 3)  # above the largest float16
    assert destination.item() == 30000.0


def test_a_multiple_is_written_unseen_by_autograd():
    source = torch.ones(2, requires_grad=True) * 2
    destination = torch.zeros(2)
    TORCH.scale_into(destination, source, 0.5)
    assert (destination.requires_grad, destination.tolist()) == (False, [1.0, 1.0])


# --- touch, make_param ----------------------------------------------------------------------------


def test_touching_moves_the_version_counters_of_all():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    TORCH.touch(params)
    assert [param._version for param in params] == [1, 1, 1]


def test_autograd_raises_where_it_saved_a_parameter_that_was_touched_since():
    param = torch.nn.Parameter(torch.ones(2))
    loss = (param * param).sum()
    TORCH.touch([param])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_parameter_is_made_in_the_memory_it_is_given():
    flat = torch.ones(3)
    made = TORCH.make_param(flat)
    made.detach().zero_()
    assert (made.is_leaf, made.requires_grad, flat.tolist()) == (True, True, [0.0] * 3)


def test_what_is_known_of_optimizers():
    assert (TORCH.is_elementwise(torch.optim.Adam), TORCH.is_separable(torch.optim.Muon)) == (
        True,
        True,
    )


# --- autograd -------------------------------------------------------------------------------------


def watched(param):
    """What is called around accumulation, with the gradient at that time."""
    events = []

    def note(name):
        return lambda: events.append((name, None if param.grad is None else param.grad.tolist()))

    TORCH.autograd.watch(param, note("before"), note("after"))
    return events


def test_accumulation_is_watched_from_both_sides():
    param = torch.nn.Parameter(torch.ones(2))
    events = watched(param)
    for _ in range(2):
        (param * 3).sum().backward()
    assert events == [
        ("before", None),
        ("after", [3.0, 3.0]),
        ("before", [3.0, 3.0]),
        ("after", [6.0, 6.0]),
    ]


def test_a_parameter_that_is_used_twice_is_accumulated_once():
    param = torch.nn.Parameter(torch.ones(2))
    events = watched(param)
    (param * 3 + param).sum().backward()
    assert events == [("before", None), ("after", [4.0, 4.0])]


def test_the_end_of_a_backward_comes_after_all_of_it():
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    events = []
    for param in params:
        TORCH.autograd.watch(
            param,
            lambda: events.append("before"),
            lambda: TORCH.autograd.at_end_of_backward(lambda: events.append("end")),
        )
    sum(param.sum() for param in params).backward()
    assert events == ["before"] * 3 + ["end"] * 3


def test_a_backward_that_fails_lets_go_of_what_waits_for_its_end():
    class Ending:
        def __call__(self):
            raise AssertionError("a backward that failed does not end")

    param = torch.nn.Parameter(torch.ones(2))
    alive = []

    def after():
        ending = Ending()
        alive.append(weakref.ref(ending))
        TORCH.autograd.at_end_of_backward(ending)
        raise ValueError("odd")

    TORCH.autograd.watch(param, lambda: None, after)
    with pytest.raises(ValueError, match="odd"):
        param.sum().backward()
    gc.collect()
    assert [reference() for reference in alive] == [None]


def test_a_stand_in_is_a_gradient_that_a_parameter_takes():
    param = torch.nn.Parameter(torch.ones(2, 3))
    param.grad = TORCH.autograd.placeholder(param, None, 7)
    assert (type(param.grad), param.grad._index) == (ShardedGradient, 7)


# --- timeout_of -----------------------------------------------------------------------------------


class Group:
    """A process group whose backend for the CPU has these options, or none."""

    def __init__(self, **options):
        self._options = options

    def _get_backend(self, device):
        assert device == torch.device("cpu")
        if not self._options:
            raise RuntimeError("Backend made up does not implement getBackendOptions")
        return types.SimpleNamespace(options=types.SimpleNamespace(**self._options))


def test_the_timeout_of_a_group_is_in_seconds():
    assert timeout_of(Group(_timeout=timedelta(minutes=2, milliseconds=500))) == 120.5


@pytest.mark.parametrize("group", [Group(), Group(other=1)], ids=["no backend", "no timeout"])
def test_a_group_that_does_not_tell_its_timeout_has_that_of_torch(group):
    assert timeout_of(group) == torch.distributed.default_pg_timeout.total_seconds()
