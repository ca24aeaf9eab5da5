import pytest
import torch

from shardopt.collectives import LoneRank
from shardopt.param_groups import read_specs
from shardopt.partition import element_parts, plan_element_layout, plan_owners, whole_parts
from shardopt.step import scale_to, total_norm

SHAPES = [(5,), (3, 4), (), (7, 2), (0,)]
NORM_TYPES = [1.0, 2.0, 3.0, 0.5, float("inf")]


def make_gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def unsharded_norm(gradients, norm_type):
    """What the unsharded ``clip_grad_norm_`` returns; it cannot take the maximum of an empty gradient."""
    counted = [gradient for gradient in gradients if gradient.numel()]
    params = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in counted]
    for param, gradient in zip(params, counted, strict=True):
        param.grad = gradient.clone()
    return torch.nn.utils.clip_grad_norm_(params, 1.0, norm_type, foreach=False)


def norm_on(group, *, granularity, norm_type, dtype=torch.float32, unused=()):
    """The norm as a rank takes it that holds its part of the averaged gradients only."""
    gradients = make_gradients(dtype)
    params = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    specs = read_specs([{"params": params}])
    if granularity == "element":
        layout = plan_element_layout(
            specs, world_size=group.world_size, bucket_nbytes=2**20, alignment_nbytes=1
        )
        parts = element_parts(specs, layout, group.rank)
    else:
        owners = plan_owners([spec.numel for spec in specs], [0] * group.world_size)
        parts = whole_parts(specs, owners, group.rank)
    tensors = {}
    for part in parts:
        flat = gradients[part.param].flatten()[part.offset : part.offset + part.numel]
        gradient = flat.reshape(SHAPES[part.param]) if part.is_whole else flat
        tensors[part.param] = torch.nn.Parameter(torch.zeros_like(gradient))
        if part.param not in unused:
            tensors[part.param].grad = gradient
    return total_norm(
        group,
        params,
        specs,
        parts,
        tensors,
        used=[index not in unused for index in range(len(params))],
        norm_type=norm_type,
        norm=torch.linalg.vector_norm,
    )


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norm_of_whole_parameters_is_bitwise_the_unsharded_one(
    run_threads, norm_type, dtype, world_size
):
    run = run_threads(
        world_size,
        lambda group: norm_on(group, granularity="parameter", norm_type=norm_type, dtype=dtype),
    )
    expected = unsharded_norm(make_gradients(dtype), norm_type)
    assert [(n.item(), n.dtype, n.shape) for n in run.results] == [
        (expected.item(), dtype, ())
    ] * world_size


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_norm_of_parts_is_the_unsharded_one_but_for_rounding(
    run_threads, norm_type, world_size
):
    run = run_threads(
        world_size, lambda group: norm_on(group, granularity="element", norm_type=norm_type)
    )
    expected = unsharded_norm(make_gradients(), norm_type)
    assert len({norm.item() for norm in run.results}) == 1
    # partial norms are rounded to 2**-24 once, and added in double precision
    torch.testing.assert_close(run.results[0], expected, rtol=2**-20, atol=0)


@pytest.mark.parametrize("granularity", ["parameter", "element"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_the_norm_on_a_lone_rank_is_the_unsharded_one(granularity, norm_type):
    norm = norm_on(LoneRank(), granularity=granularity, norm_type=norm_type)
    expected = unsharded_norm(make_gradients(), norm_type)
    torch.testing.assert_close(norm, expected, rtol=2**-20, atol=0)


def test_a_parameter_without_gradient_does_not_count(run_threads):
    run = run_threads(
        2, lambda group: norm_on(group, granularity="parameter", norm_type=2.0, unused={1})
    )
    gradients = [gradient for i, gradient in enumerate(make_gradients()) if i != 1]
    norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
    assert [n.item() for n in run.results] == [torch.linalg.vector_norm(norms).item()] * 2


@pytest.mark.parametrize("step", [2, 3, 5])
def test_parameters_without_gradient_do_not_change_the_order_of_the_sum(step):
    """A sum of squares is vectorized, so zeros among them would round otherwise."""
    gradients = torch.randn(101, 3, generator=torch.Generator().manual_seed(0)).unbind()
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in gradients]
    for index in range(0, len(params), step):
        params[index].grad = gradients[index]
    specs = read_specs([{"params": params}])
    norm = total_norm(
        LoneRank(),
        params,
        specs,
        whole_parts(specs, [0] * len(params), 0),
        dict(enumerate(params)),
        used=[param.grad is not None for param in params],
        norm_type=2.0,
        norm=torch.linalg.vector_norm,
    )
    expected = torch.nn.utils.clip_grad_norm_(params, 1e9)
    assert norm.item() == expected.item()


@pytest.mark.parametrize("granularity", ["parameter", "element"])
def test_without_any_gradient_the_norm_is_zero(run_threads, granularity):
    run = run_threads(
        2, lambda group: norm_on(group, granularity=granularity, norm_type=2.0, unused=range(5))
    )
    assert [norm.item() for norm in run.results] == [0.0, 0.0]


# --- scale_to -------------------------------------------------------------------------------------


def scaled(norm, max_norm, *gradients):
    tensors = {}
    for index, gradient in enumerate(gradients):
        tensors[index] = torch.nn.Parameter(torch.zeros(2))
        tensors[index].grad = gradient
    scale_to(torch.tensor(norm), tensors, max_norm=max_norm)
    return [None if t.grad is None else t.grad.tolist() for t in tensors.values()]


@pytest.mark.parametrize("max_norm", [0.5, 4.99, 5.0, 7.0, 0.0])
def test_gradients_are_scaled_as_torch_scales_them(max_norm):
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    torch.nn.utils.clip_grad_norm_([param], max_norm)
    assert scaled(5.0, max_norm, torch.tensor([3.0, 4.0])) == [param.grad.tolist()]


def test_gradients_below_the_norm_keep_their_bits():
    assert scaled(5.0, 6.0, torch.tensor([3.1, 4.7])) == [torch.tensor([3.1, 4.7]).tolist()]


def test_what_has_no_gradient_gets_none():
    assert scaled(5.0, 2.5, None, torch.tensor([3.0, 4.0]))[0] is None


def test_gradients_are_scaled_in_place():
    gradient = torch.tensor([30.0, 40.0])
    scaled(50.0, 5.0, gradient)
    assert gradient.norm().item() == pytest.approx(5.0, rel=1e-6)
