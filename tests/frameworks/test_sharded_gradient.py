"""What can be done to a gradient of which each rank has a part, and what is refused."""

import copy
import pickle

import pytest
import torch

from shardopt.frameworks.sharded_gradient import ShardedGradient

NUMELS = (4, 6, 2)


class Source:
    """The parts of three gradients on one rank, which has none of the last; norms are of gradients of its own."""

    def __init__(self):
        self.parts = [torch.arange(1.0, 3.0), torch.arange(1.0, 4.0), None]
        self.norms = [3.0, 4.0, 12.0]
        self.asked = []
        self.reduced = []
        self.found = 0.0

    def part(self, index):
        self.asked.append(("part", index))
        return self.parts[index]

    def norm(self, index, norm_type):
        self.asked.append(("norm", index, norm_type))
        return torch.tensor(self.norms[index])

    def all_reduce_max(self, tensor):
        self.reduced.append(tensor.item())
        tensor.fill_(max(tensor.item(), self.found))

    @property
    def values(self):
        return [None if part is None else part.tolist() for part in self.parts]


@pytest.fixture
def source():
    return Source()


@pytest.fixture
def params(source):
    """Parameters whose gradients are sharded."""
    params = [torch.nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
    for index, param in enumerate(params):
        param.grad = ShardedGradient(param, source, index)
    return params


# --- what it looks like ---------------------------------------------------------------------------


def test_a_stand_in_looks_like_its_parameter_and_has_no_memory():
    param = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    gradient = ShardedGradient(param, None, 0)
    assert (gradient.shape, gradient.dtype, gradient.device) == (
        param.shape,
        param.dtype,
        param.device,
    )
    assert gradient.untyped_storage().nbytes() == 0 or gradient.data_ptr() == 0


def test_it_can_be_printed_without_any_rank_being_asked(source, params):
    assert repr(params[0].grad) == "ShardedGradient((4,), torch.float32, cpu)"
    assert source.asked == []


def test_a_detached_one_stands_for_the_same_gradient(source, params):
    detached = params[1].grad.detach()
    detached.mul_(2)
    assert source.values[1] == [2.0, 4.0, 6.0]


# --- in place, one at a time ----------------------------------------------------------------------

IN_PLACE = {
    "mul_": (lambda g: g.mul_(2), [2.0, 4.0]),
    "mul_ by a tensor": (lambda g: g.mul_(torch.tensor(2.0)), [2.0, 4.0]),
    "div_": (lambda g: g.div_(2), [0.5, 1.0]),
    "div_ by a tensor": (lambda g: g.div_(torch.tensor(2.0)), [0.5, 1.0]),
    "neg_": (lambda g: g.neg_(), [-1.0, -2.0]),
    "zero_": (lambda g: g.zero_(), [0.0, 0.0]),
    "clamp_": (lambda g: g.clamp_(1.25, 1.5), [1.25, 1.5]),
    "clamp_min_": (lambda g: g.clamp_min_(1.5), [1.5, 2.0]),
    "clamp_max_": (lambda g: g.clamp_max_(1.5), [1.0, 1.5]),
    "nan_to_num_": (lambda g: g.nan_to_num_(), [1.0, 2.0]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_changes_each_element_on_its_own_changes_this_ranks_part(source, params, name):
    change, expected = IN_PLACE[name]
    change(params[0].grad)
    assert source.values == [expected, [1.0, 2.0, 3.0], None]


def test_a_change_returns_the_stand_in(params):
    assert params[0].grad.mul_(2) is params[0].grad


def test_a_rank_that_has_no_part_takes_part_all_the_same(source, params):
    params[2].grad.mul_(2)
    assert source.asked == [("part", 2)]


def test_augmented_assignment_keeps_the_stand_in(source, params):
    gradient = params[0].grad
    params[0].grad *= 3
    assert (params[0].grad is gradient, source.values[0]) == (True, [3.0, 6.0])


def test_zeroing_gradients_in_place_is_a_change(source, params):
    torch.optim.SGD(params, lr=0.1).zero_grad(set_to_none=False)
    assert source.values == [[0.0, 0.0], [0.0] * 3, None]


# --- in place, in lists ---------------------------------------------------------------------------

EACH = {
    "mul": (lambda gs: torch._foreach_mul_(gs, 2.0), [2.0, 4.0]),
    "mul by a tensor": (lambda gs: torch._foreach_mul_(gs, torch.tensor(2.0)), [2.0, 4.0]),
    "div": (lambda gs: torch._foreach_div_(gs, 2.0), [0.5, 1.0]),
    "div by a tensor": (lambda gs: torch._foreach_div_(gs, torch.tensor(2.0)), [0.5, 1.0]),
    "zero": (lambda gs: torch._foreach_zero_(gs), [0.0, 0.0]),
    "clamp_min": (lambda gs: torch._foreach_clamp_min_(gs, 1.5), [1.5, 2.0]),
    "clamp_max": (lambda gs: torch._foreach_clamp_max_(gs, 1.5), [1.0, 1.5]),
    "maximum": (lambda gs: torch._foreach_maximum_(gs, 1.5), [1.5, 2.0]),
    "minimum": (lambda gs: torch._foreach_minimum_(gs, 1.5), [1.0, 1.5]),
}


@pytest.mark.parametrize("name", EACH)
def test_what_changes_a_list_changes_this_ranks_parts(source, params, name):
    change, expected = EACH[name]
    change([param.grad for param in params])
    assert (source.values[0], source.asked) == (expected, [("part", index) for index in range(3)])


def test_a_list_of_gradients_of_which_this_rank_has_none_is_fine(source, params):
    torch._foreach_mul_([params[2].grad], 2.0)
    assert source.values[2] is None


def test_ordinary_gradients_in_a_list_are_changed_as_they_are(params):
    ordinary = torch.ones(2)
    torch._foreach_mul_([params[0].grad, ordinary], 2.0)
    assert ordinary.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_by_value_changes_this_ranks_parts(source, params, foreach):
    torch.nn.utils.clip_grad_value_(params, 1.5, foreach=foreach)
    assert source.values == [[1.0, 1.5], [1.0, 1.5, 1.5], None]


# --- norms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_norm_scales_parts_by_the_norm_over_all_ranks(source, params, foreach):
    norm = torch.nn.utils.clip_grad_norm_(params, 6.5, foreach=foreach)
    assert norm.item() == 13.0
    expected = torch.arange(1.0, 3.0) * (6.5 / (13.0 + 1e-6))
    torch.testing.assert_close(source.parts[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
def test_norms_are_of_the_order_that_was_asked_for(source, params, norm_type, foreach):
    torch.nn.utils.get_total_norm([p.grad for p in params], norm_type, foreach=foreach)
    assert source.asked == [("norm", index, norm_type) for index in range(3)]


def test_a_norm_without_order_is_euclidean(source, params):
    torch.linalg.vector_norm(params[0].grad)
    assert source.asked == [("norm", 0, 2.0)]


def test_norms_of_ordinary_gradients_are_taken_beside_them(params):
    norms = torch._foreach_norm([params[0].grad, torch.tensor([3.0, 4.0])], 2.0)
    assert [norm.item() for norm in norms] == [3.0, 5.0]


def test_a_norm_along_a_dimension_is_refused():
    gradient = ShardedGradient(torch.zeros(2, 2), Source(), 0)
    with pytest.raises(RuntimeError, match="along some dimensions on a gradient that is sharded"):
        torch.linalg.vector_norm(gradient, 2.0, dim=1)


# --- unscaling ------------------------------------------------------------------------------------


def unscale(gradients, *, found=0.0):
    found_inf = torch.tensor([found])
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, torch.tensor(0.5))
    return found_inf.item()


def test_unscaling_multiplies_this_ranks_parts(source, params):
    assert unscale([param.grad for param in params]) == 0.0
    assert source.values == [[0.5, 1.0], [0.5, 1.0, 1.5], None]


def test_an_inf_on_this_rank_is_told_to_all(source, params):
    source.parts[1][2] = float("inf")
    assert (unscale([param.grad for param in params]), source.reduced) == (1.0, [1.0])


def test_an_inf_on_another_rank_is_found_here(source, params):
    source.found = 1.0
    assert (unscale([param.grad for param in params]), source.reduced) == (1.0, [0.0])


def test_a_rank_that_has_no_part_learns_of_an_inf(source, params):
    source.found = 1.0
    assert unscale([params[2].grad]) == 1.0


def test_ordinary_gradients_are_unscaled_beside_them(params):
    ordinary = torch.ones(2)
    unscale([ordinary, params[0].grad])
    assert ordinary.tolist() == [0.5, 0.5]


# --- what is refused ------------------------------------------------------------------------------

TEXT = (
    " on a gradient that is sharded over ranks (Sharding(gradients=True)): between backward and step() each rank holds a "
    "part of the average only; clip with torch.nn.utils.clip_grad_norm_() or optimizer.clip_grad_norm_(), read norm() on "
    "all ranks, scale in place, or read gradients in a tensor hook (param.register_hook) before they are averaged; and do "
    "not wrap the model in DistributedDataParallel"
)
REFUSED = {
    "aten.add.Tensor": lambda g: g + 1,
    "aten.add_.Tensor": lambda g: g.add_(torch.ones(4)),
    "aten.clone.default": lambda g: g.clone(),
    "aten.sum.default": lambda g: g.sum(),
    "aten.mul.Tensor": lambda g: g * 2,
    "aten._to_copy.default": lambda g: g.double(),
    "aten.fill_.Scalar": lambda g: g.fill_(1.0),
    "copy.deepcopy()": copy.deepcopy,
    "pickling": pickle.dumps,
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_with_the_way_out(params, name):
    with pytest.raises(RuntimeError) as caught:
        REFUSED[name](params[0].grad)
    assert str(caught.value) == name + TEXT


def test_nothing_is_asked_for_by_what_is_refused(source, params):
    with pytest.raises(RuntimeError, match="sharded over ranks"):
        params[0].grad.sum()
    assert source.asked == []


def test_a_product_of_two_is_refused(params):
    with pytest.raises(RuntimeError, match=r"aten.mul_.Tensor of two of them on a gradient"):
        params[0].grad.mul_(params[0].grad)


def test_a_factor_for_each_is_refused(params):
    with pytest.raises(RuntimeError, match="sharded over ranks"):
        torch._foreach_mul_([param.grad for param in params], [1.0, 2.0, 3.0])


def test_an_optimizer_that_would_step_with_it_is_refused(params):
    with pytest.raises(RuntimeError, match="sharded over ranks"):
        torch.optim.SGD(params, lr=0.1).step()
