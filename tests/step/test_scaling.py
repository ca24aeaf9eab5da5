import types

import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.step import LossScale


class Optimizer:
    """A local optimizer that divides and skips by itself, if told so."""

    def __init__(self, *, is_fused=False):
        if is_fused:
            self._step_supports_amp_scaling = True


def trained(*gradients):
    params = []
    for gradient in gradients:
        param = torch.nn.Parameter(torch.zeros(3, dtype=getattr(gradient, "dtype", torch.float32)))
        param.grad = gradient
        params.append(param)
    return params


def gradients_of(params):
    return [param.grad for param in params if param.grad is not None]


def hand_over(loss_scale, group, optimizer, params, *, in_kernel):
    """What a step does with a loss scale; returns whether it is skipped."""
    in_kernel = in_kernel and getattr(optimizer, "_step_supports_amp_scaling", False)
    is_skipped = loss_scale.wants_skip(params, in_kernel=in_kernel)
    loss_scale.apply(
        group, optimizer, lambda: gradients_of(params), params=params, in_kernel=in_kernel
    )
    return is_skipped


def scale_of(scale, found):
    return LossScale(
        None if scale is None else torch.tensor(scale),
        None if found is None else torch.tensor(found),
    )


# --- of -------------------------------------------------------------------------------------------


def test_what_the_scaler_set_is_read():
    scale, found = torch.tensor(2.0), torch.tensor(0.0)
    loss_scale = LossScale.of(types.SimpleNamespace(grad_scale=scale, found_inf=found))
    assert (loss_scale.grad_scale is scale, loss_scale.found_inf is found) == (True, True)


def test_without_a_scaler_there_is_nothing_to_read():
    assert LossScale.of(types.SimpleNamespace()) == LossScale(None, None)


def test_attributes_of_the_class_are_no_work_of_a_scaler():
    class Fused:
        grad_scale = found_inf = 1.0

    assert LossScale.of(Fused()) == LossScale(None, None)


# --- hand_over without a scaler -------------------------------------------------------------------


@pytest.mark.parametrize("in_kernel", [False, True])
def test_without_a_scaler_nothing_is_skipped_and_gradients_stay(in_kernel):
    params = trained(torch.ones(3))
    skip = hand_over(
        scale_of(None, None), LoneRank(), Optimizer(is_fused=True), params, in_kernel=in_kernel
    )
    assert (skip, params[0].grad.tolist()) == (False, [1.0, 1.0, 1.0])


def test_without_a_scaler_no_rank_talks_to_another():
    assert (
        hand_over(scale_of(None, None), object(), Optimizer(is_fused=True), [], in_kernel=True)
        is False
    )


# --- hand_over to an optimizer that leaves it to the step -----------------------------------------


@pytest.mark.parametrize(("found", "skip"), [(0.0, False), (1.0, True)])
def test_the_step_is_skipped_exactly_where_an_inf_was_found(found, skip):
    result = hand_over(scale_of(2.0, found), LoneRank(), Optimizer(), [], in_kernel=True)
    assert result is skip


def test_gradients_are_divided_by_the_scale():
    params = trained(torch.tensor([8.0, -4.0, 2.0]), None)
    hand_over(scale_of(4.0, 0.0), LoneRank(), Optimizer(), params, in_kernel=True)
    assert params[0].grad.tolist() == [2.0, -1.0, 0.5]


def test_parameters_without_a_gradient_get_none():
    params = trained(None)
    hand_over(scale_of(4.0, 0.0), LoneRank(), Optimizer(), params, in_kernel=True)
    assert params[0].grad is None


def test_gradients_that_the_scaler_has_divided_are_left_alone():
    params = trained(torch.tensor([8.0, -4.0, 2.0]))
    hand_over(scale_of(None, 0.0), LoneRank(), Optimizer(), params, in_kernel=True)
    assert params[0].grad.tolist() == [8.0, -4.0, 2.0]


@pytest.mark.parametrize("scale", [65536.0, 3.0, 1000.0])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_gradients_are_divided_bit_by_bit_as_the_scaler_does(dtype, scale):
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(500, generator=generator, dtype=torch.float64).mul(scale / 16).to(dtype)
    param = torch.nn.Parameter(torch.zeros_like(gradient))
    param.grad = gradient.clone()
    hand_over(scale_of(scale, 0.0), LoneRank(), Optimizer(), [param], in_kernel=False)
    torch._amp_foreach_non_finite_check_and_unscale_(
        [gradient], torch.zeros(1), torch.tensor(scale).double().reciprocal().float()
    )
    assert torch.equal(param.grad, gradient)


def test_no_rank_talks_to_another_where_the_host_reads_the_finding():
    assert hand_over(scale_of(2.0, 1.0), object(), Optimizer(), [], in_kernel=True) is True


def test_a_fused_optimizer_is_not_trusted_with_it_where_ranks_may_have_no_scaler():
    optimizer = Optimizer(is_fused=True)
    skip = hand_over(scale_of(2.0, 1.0), LoneRank(), optimizer, [], in_kernel=False)
    assert (skip, vars(optimizer)) == (True, {"_step_supports_amp_scaling": True})


# --- hand_over to a fused optimizer ---------------------------------------------------------------


def test_a_fused_optimizer_gets_the_scale():
    loss_scale, optimizer = scale_of(2.0, 0.0), Optimizer(is_fused=True)
    hand_over(loss_scale, LoneRank(), optimizer, [], in_kernel=True)
    assert optimizer.grad_scale is loss_scale.grad_scale


def test_a_fused_optimizer_skips_by_itself():
    assert not hand_over(
        scale_of(2.0, 1.0), LoneRank(), Optimizer(is_fused=True), [], in_kernel=True
    )


def test_a_fused_optimizer_divides_by_itself():
    params = trained(torch.tensor([8.0, -4.0, 2.0]))
    hand_over(scale_of(4.0, 0.0), LoneRank(), Optimizer(is_fused=True), params, in_kernel=True)
    assert params[0].grad.tolist() == [8.0, -4.0, 2.0]


def test_a_fused_optimizer_gets_the_finding_of_any_rank(run_threads):
    def serve(group):
        optimizer = Optimizer(is_fused=True)
        hand_over(scale_of(2.0, float(group.rank == 1)), group, optimizer, [], in_kernel=True)
        return optimizer.found_inf.item()

    assert run_threads(3, serve).results == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("scale", [None, torch.tensor(4.0)])
def test_a_rank_without_any_gradient_found_no_inf(scale):
    """The sum over no devices, which GradScaler sets, is the int 0."""
    loss_scale = LossScale(scale, 0)
    assert not hand_over(loss_scale, LoneRank(), Optimizer(), trained(None), in_kernel=False)


# --- which gradients ------------------------------------------------------------------------------


def untouchable():
    raise AssertionError("gradients that nobody divides need not be there")


@pytest.mark.parametrize(
    ("scale", "found", "in_kernel"),
    [(None, None, False), (None, 0.0, False), (2.0, 0.0, True)],
    ids=["no scaler", "divided already", "in a kernel"],
)
def test_gradients_are_not_asked_for_where_nothing_is_divided_here(scale, found, in_kernel):
    optimizer = Optimizer(is_fused=in_kernel)
    scale_of(scale, found).apply(LoneRank(), optimizer, untouchable, params=[], in_kernel=in_kernel)


def test_gradients_that_are_no_parameters_own_are_divided_in_place():
    gradient = torch.tensor([8.0, -4.0])
    scale_of(4.0, 0.0).divide(lambda: [gradient])
    assert gradient.tolist() == [2.0, -1.0]


def test_dividing_without_a_scale_asks_for_no_gradients():
    scale_of(None, 1.0).divide(untouchable)


def test_gradients_are_divided_unseen_by_autograd():
    gradient = torch.tensor([8.0], requires_grad=True)
    scale_of(4.0, 0.0).divide(lambda: [gradient])
    assert (gradient.item(), gradient.grad_fn) == (2.0, None)


# --- fingerprint ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_kernel", [False, True])
def test_ranks_compare_a_scale_on_the_cpu(in_kernel):
    assert scale_of(2.0, 0.0).fingerprint(in_kernel=in_kernel) == [("GradScaler's scale", "2.0")]


@pytest.mark.parametrize("in_kernel", [False, True])
def test_without_a_scale_ranks_compare_none(in_kernel):
    assert scale_of(None, 0.0).fingerprint(in_kernel=in_kernel) == []


def test_a_scale_elsewhere_is_not_read_where_a_kernel_divides_by_it():
    loss_scale = LossScale(torch.tensor(2.0, device="meta"), torch.tensor(0.0))
    assert loss_scale.fingerprint(in_kernel=True) == []


# --- take_back ------------------------------------------------------------------------------------


def test_nothing_of_the_step_is_left_on_the_local_optimizer():
    loss_scale, optimizer = scale_of(2.0, 0.0), Optimizer(is_fused=True)
    hand_over(loss_scale, LoneRank(), optimizer, [], in_kernel=True)
    loss_scale.take_back(optimizer)
    assert vars(optimizer) == {"_step_supports_amp_scaling": True}


def test_taking_back_nothing_is_fine():
    optimizer = Optimizer()
    scale_of(None, None).take_back(optimizer)
    assert vars(optimizer) == {}
