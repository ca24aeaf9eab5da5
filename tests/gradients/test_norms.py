import pytest
import torch

from shardopt.arguments import read_specs
from shardopt.collectives import LoneRank
from shardopt.gradients import norms_of, scale_to
from shardopt.partition import parts_of, plan_element_layout, plan_layout, plan_owners

SHAPES = [(5,), (3, 4), (), (7, 2), (0,)]
NORM_TYPES = [1.0, 2.0, 3.0, 0.5, float("inf")]


def make_gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def unsharded_norms(gradients, norm_type, *, unused=()):
    """The norm of each gradient as ``clip_grad_norm_`` takes it; 0 of those without elements."""
    return [
        torch.linalg.vector_norm(g, norm_type) if g.numel() and i not in unused else g.new_zeros(())
        for i, g in enumerate(gradients)
    ]


def norms_on(group, *, granularity, norm_type, dtype=torch.float32, unused=(), like=None):
    """The norms as a rank takes them that holds its part of the averaged gradients only."""
    gradients = make_gradients(dtype)
    specs = read_specs([{"params": gradients}], [granularity])
    owners = plan_owners([spec.numel for spec in specs], [0] * group.world_size)
    options = {"world_size": group.world_size, "bucket_nbytes": 2**20, "alignment_nbytes": 1}
    if granularity == "element":
        layout = plan_element_layout(specs, **options)
    else:
        layout = plan_layout(specs, owners, **options)
    parts = parts_of(specs, owners, layout.buckets, group.rank)
    mine = {}
    for part in parts:
        if part.param not in unused:
            flat = gradients[part.param].flatten()[part.offset : part.offset + part.numel]
            mine[part.param] = flat.reshape(SHAPES[part.param]) if part.is_whole else flat
    return norms_of(
        group,
        mine,
        parts,
        like=torch.zeros(1, dtype=dtype) if like is None else like,
        is_cut=[spec.is_cut for spec in specs],
        norm_type=norm_type,
        norm=torch.linalg.vector_norm,
    )


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_norms_of_whole_parameters_are_bitwise_the_unsharded_ones(
    run_threads, norm_type, dtype, world_size
):
    run = run_threads(
        world_size,
        lambda group: norms_on(group, granularity="parameter", norm_type=norm_type, dtype=dtype),
    )
    expected = torch.stack(unsharded_norms(make_gradients(dtype), norm_type))
    assert [torch.equal(norms, expected) for norms in run.results] == [True] * world_size


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_norms_of_parts_are_the_unsharded_ones_but_for_rounding(run_threads, norm_type, world_size):
    run = run_threads(
        world_size, lambda group: norms_on(group, granularity="element", norm_type=norm_type)
    )
    expected = torch.stack(unsharded_norms(make_gradients(), norm_type))
    assert all(torch.equal(norms, run.results[0]) for norms in run.results)
    # partial norms are rounded to 2**-24 once, and added in double precision
    torch.testing.assert_close(run.results[0], expected, rtol=2**-20, atol=0)


@pytest.mark.parametrize("granularity", ["parameter", "element"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_norms_on_a_lone_rank_are_the_unsharded_ones(granularity, norm_type):
    norms = norms_on(LoneRank(), granularity=granularity, norm_type=norm_type)
    expected = torch.stack(unsharded_norms(make_gradients(), norm_type))
    torch.testing.assert_close(norms, expected, rtol=2**-20, atol=0)


def test_the_largest_element_is_found_to_the_bit_whatever_the_parts(run_threads):
    run = run_threads(
        3, lambda group: norms_on(group, granularity="element", norm_type=float("inf"))
    )
    expected = torch.stack(unsharded_norms(make_gradients(), float("inf")))
    assert torch.equal(run.results[0], expected)


@pytest.mark.parametrize("granularity", ["parameter", "element"])
def test_a_parameter_without_gradient_has_norm_0(run_threads, granularity):
    run = run_threads(
        2, lambda group: norms_on(group, granularity=granularity, norm_type=2.0, unused={1, 3})
    )
    assert [norms[[1, 3]].tolist() for norms in run.results] == [[0.0, 0.0]] * 2
    assert [norms[[0, 2]].ne(0).all().item() for norms in run.results] == [True, True]


@pytest.mark.parametrize("granularity", ["parameter", "element"])
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_without_any_gradient_every_norm_is_0(run_threads, granularity, norm_type):
    run = run_threads(
        2,
        lambda group: norms_on(
            group, granularity=granularity, norm_type=norm_type, unused=range(5)
        ),
    )
    assert [norms.tolist() for norms in run.results] == [[0.0] * 5] * 2


def test_norms_are_of_the_wanted_dtype(run_threads):
    run = run_threads(
        2,
        lambda group: norms_on(
            group,
            granularity="parameter",
            norm_type=2.0,
            dtype=torch.bfloat16,
            like=torch.zeros(1),
        ),
    )
    assert [norms.dtype for norms in run.results] == [torch.float32] * 2


def test_norms_cost_one_all_reduce_and_no_message(run_threads):
    run = run_threads(2, lambda group: norms_on(group, granularity="element", norm_type=2.0))
    assert (run.world.messages, run.world.num_gathers_by_rank) == (
        [],
        [{"ints": 0, "object": 0}] * 2,
    )


def test_norms_that_would_overflow_in_the_dtype_of_the_gradients_are_added_in_double_precision(
    run_threads,
):
    """1e25 squared is above the largest float32."""

    def serve(group):
        [spec] = read_specs([{"params": [torch.zeros(2)]}], ["element"])
        layout = plan_element_layout([spec], world_size=2, bucket_nbytes=99, alignment_nbytes=1)
        return norms_of(
            group,
            {0: torch.tensor([3e25 if group.rank else 4e25])},
            parts_of([spec], [0], layout.buckets, group.rank),
            like=torch.zeros(1),
            is_cut=[True],
            norm_type=2.0,
            norm=torch.linalg.vector_norm,
        ).item()

    assert run_threads(2, serve).results == [pytest.approx(5e25, rel=1e-6)] * 2


# --- scale_to -------------------------------------------------------------------------------------


def scaled(norm, max_norm, *gradients):
    scale_to(torch.tensor(norm), iter(gradients), max_norm=max_norm)
    return [gradient.tolist() for gradient in gradients]


@pytest.mark.parametrize("max_norm", [0.5, 4.99, 5.0, 7.0, 0.0])
def test_gradients_are_scaled_as_torch_scales_them(max_norm):
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    torch.nn.utils.clip_grad_norm_([param], max_norm)
    assert scaled(5.0, max_norm, torch.tensor([3.0, 4.0])) == [param.grad.tolist()]


def test_gradients_below_the_norm_keep_their_bits():
    assert scaled(5.0, 6.0, torch.tensor([3.1, 4.7])) == [torch.tensor([3.1, 4.7]).tolist()]


def test_no_gradients_need_no_scaling():
    assert scaled(5.0, 2.5) == []


def test_gradients_are_scaled_in_place():
    gradient = torch.tensor([30.0, 40.0])
    scaled(50.0, 5.0, gradient)
    assert gradient.norm().item() == pytest.approx(5.0, rel=1e-6)


def test_gradients_of_several_dtypes_keep_them():
    gradients = [torch.tensor([3.0]), torch.tensor([4.0]).bfloat16()]
    scaled(5.0, 2.5, *gradients)
    assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.bfloat16]
