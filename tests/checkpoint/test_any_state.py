"""Lossless, whatever the model, the groups, the optimizer and the two world sizes: ranks are threads."""

import copy
import tempfile
from pathlib import Path

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardopt import Sharding
from shardopt.checkpoint import ShardedState
from shardopt.frameworks.torch import TORCH
from shardopt.shards import Shards
from shardopt.step import copy_options

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1}, True),
    "Adam, tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.1)}, True),
    "SGD, momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, True),
    "SGD": (torch.optim.SGD, {"lr": 0.1}, True),
    "RMSprop, centered": (torch.optim.RMSprop, {"lr": 0.1, "centered": True}, True),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1, "etas": (0.5, 1.2)}, True),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}, True),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.1}, False),
}

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
formats = st.sampled_from(["contiguous", "transposed", "channels_last", "gaps", "transposed, gaps"])
params = st.tuples(shapes, formats, st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))


@st.composite
def models(draw):
    groups = draw(st.lists(st.lists(params, min_size=1, max_size=4), min_size=1, max_size=3))
    return [[*group] for group in groups]


def make_param(shape, kind, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if kind == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif kind == "channels_last" and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    elif "gaps" in kind and tensor.dim():
        if "transposed" in kind:
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
            kept = torch.empty_strided(tensor.shape, [2 * s for s in tensor.stride()], dtype=dtype)
            return torch.nn.Parameter(kept.copy_(tensor))
        tensor = torch.stack([tensor, tensor], -1)[..., 0]
    return torch.nn.Parameter(tensor)


class Rank:
    """One rank's part of an optimizer over a model."""

    def __init__(self, group, model, name, granularity, *, master_dtype=None):
        optimizer_class, options, _ = OPTIMIZERS[name]
        options = copy.deepcopy(options)
        self.groups = []
        for number, group_params in enumerate(model):
            made = [make_param(*p, seed=10 * number + n) for n, p in enumerate(group_params)]
            self.groups.append({"params": made, "lr": options["lr"] if not number else 0.5})
        sharding = Sharding(granularity=granularity, master_dtype=master_dtype, bucket_mb=0.0001)
        has_views = granularity == "element"
        self.shards = Shards(group, TORCH, sharding, has_views=has_views)
        plan = self.shards.plan(self.groups, [granularity] * len(model), [])
        self.shards.admit(self.groups, plan)

        def make_optimizer(groups):
            return optimizer_class(groups, **options)

        self.local = make_optimizer(self.shards.local_groups(self.groups))
        copy_options(self.local.param_groups, self.groups)
        self.state = ShardedState(
            group, TORCH, self.shards, self.local, make_optimizer=make_optimizer, chunk_nbytes=64
        )

    def step(self, *, without):
        """Elements get gradients by their place in the parameter, so that every way of cutting sees the same."""
        for part in self.shards.parts:
            tensor = self.shards.tensors[part.param]
            values = torch.arange(part.offset, part.offset + part.numel).to(tensor.dtype)
            tensor.grad = None
            if part.param not in without:
                ordered = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                flat = values * 0.1 + part.param + 1
                dense = ordered.numel() == ordered.untyped_storage().nbytes() // ordered.itemsize
                if part.is_whole and dense:
                    ordered.as_strided((part.numel,), (1,)).copy_(flat)
                else:
                    ordered.copy_(flat.view(tensor.shape))
                tensor.grad = ordered
        self.local.step()

    def collected(self):
        self.state.consolidate(self.groups, to=0)
        return self.state.snapshot() if self.state._group.rank == 0 else None


def plain(value):
    """With tensors as values that compare and print their bits.

    Without the dtype of single numbers, which torch's own ``load_state_dict()`` makes that of the parameter (so ASGD, whose
    rate is one, is not lossless unsharded either).
    """
    if torch.is_tensor(value):
        dtype = str(value.dtype) if value.dim() else ""
        return (dtype, tuple(value.shape), value.double().tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@settings(max_examples=40)
@given(
    model=models(),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    granularities=st.tuples(*[st.sampled_from(["parameter", "element"])] * 2),
    has_masters=st.booleans(),
    without=st.sets(st.integers(0, 4), max_size=2),
)
def test_every_bit_comes_back_from_files_at_any_world_size(
    run_threads, model, name, sizes, granularities, has_masters, without
):
    if not OPTIMIZERS[name][2]:
        granularities = ("parameter", "parameter")
        assume(all(0 not in shape for group in model for shape, _, _ in group))  # its own bug
    options = {"master_dtype": torch.float64 if has_masters else None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)

        def save(group):
            rank = Rank(group, model, name, granularities[0], **options)
            for _ in range(2):
                rank.step(without=without)
            rank.state.save(rank.groups, path / "folder")
            rank.state.save_full(rank.groups, path / "full.safetensors", to=sizes[0] - 1)
            return rank.collected()

        def load(group):
            found = []
            for source in ("folder", "full.safetensors"):
                rank = Rank(group, model, name, granularities[1], **options)
                rank.state.load_saved(rank.groups, path / source, strict=True)
                found.append(rank.collected())
                rank = Rank(group, model, name, granularities[1], **options)
                rank.state.load_full(rank.groups, path / source, src=sizes[1] - 1, strict=True)
                found.append(rank.collected())
            return found

        saved = run_threads(sizes[0], save)
        assert saved.texts == [""] * sizes[0]
        loaded = run_threads(sizes[1], load)
        assert loaded.texts == [""] * sizes[1]
        assert (saved.num_left_over, loaded.num_left_over) == (0, 0)
    expected = plain(saved.results[0])
    for found in loaded.results[0]:
        assert plain(found) == expected


def test_parts_of_a_parameter_with_gaps_count_elements_as_its_bucket_does(run_threads, tmp_path):
    """Row by row, whatever the order of its own strides was."""
    model = [[((3, 4), "transposed, gaps", torch.float32), ((5,), "contiguous", torch.float32)]]

    def save(group):
        rank = Rank(group, model, "AdamW", "element")
        rank.step(without=())
        rank.state.save(rank.groups, tmp_path)
        return rank.collected()

    def load(group):
        rank = Rank(
            group, [[((3, 4), "contiguous", torch.float32), model[0][1]]], "AdamW", "parameter"
        )
        rank.state.load_saved(rank.groups, tmp_path, strict=True)
        return rank.collected()

    saved, loaded = run_threads(2, save), run_threads(1, load)
    assert (saved.texts, loaded.texts) == (["", ""], [""])
    assert plain(loaded.results[0]["state"]) == plain(saved.results[0]["state"])
