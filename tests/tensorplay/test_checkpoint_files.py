"""Files of checkpoints, on TensorPlay."""

from __future__ import annotations

from pathlib import Path

import pytest

tp = pytest.importorskip("tensorplay")

import tensorplay.distributed as dist  # noqa: E402

from shardopt import CheckpointError, Sharding, StateMismatchError  # noqa: E402
from shardopt.tensorplay import ZeroRedundancyOptimizer  # noqa: E402
from shardopt.testing import run_ranks  # noqa: E402


def make_params() -> list:
    tp.manual_seed(3)
    return [tp.nn.Parameter(tp.randn(*shape)) for shape in [(4, 5), (7,), (3, 2)]]


def make(params, granularity="parameter", optimizer_class=None):
    return ZeroRedundancyOptimizer(
        params,
        optimizer_class or tp.optim.AdamW,
        parameters_as_bucket_view=granularity == "element",
        sharding=Sharding(granularity=granularity, bucket_mb=0.0001),
        lr=0.1,
    )


def step(params, zero, number) -> None:
    for index, param in enumerate(params):
        param.grad = tp.full(tuple(param.shape), float(number + index + 1))
    zero.step()


def values(params) -> list:
    return [param.detach().tolist() for param in params]


@pytest.mark.parametrize("granularity", ["parameter", "element"])
@run_ranks(1, 2, framework="tensorplay")
def test_training_goes_on_from_files_as_it_would_have(granularity: str, tmp_path: Path) -> None:
    params = make_params()
    zero = make(params, granularity)
    for number in range(2):
        step(params, zero, number)
    zero.save(tmp_path / "folder")
    zero.save_full(tmp_path / "full.safetensors")
    kept = [param.detach().clone() for param in params]
    step(params, zero, 2)
    for source in ("folder", "full.safetensors", "sent"):
        for other in ("parameter", "element"):
            again = make_params()
            for param, value in zip(again, kept, strict=True):
                param.data.copy_(value)
            loaded = make(again, other)
            if source == "sent":
                path = tmp_path / "full.safetensors" if dist.get_rank() == 0 else "elsewhere"
                loaded.load_full(path)
            else:
                loaded.load(tmp_path / source)
            step(again, loaded, 2)
            assert values(again) == values(params)


@run_ranks(2, framework="tensorplay")
def test_other_state_is_refused(tmp_path: Path) -> None:
    params = make_params()
    zero = make(params, optimizer_class=tp.optim.SGD)
    step(params, zero, 0)
    zero.save(tmp_path / "folder")
    loaded = make(make_params())
    with pytest.raises((StateMismatchError, RuntimeError), match="state of another optimizer"):
        loaded.load(tmp_path / "folder")
    (tmp_path / f"odd{dist.get_rank()}.pt").write_bytes(b"PK\x03\x04")
    with pytest.raises((CheckpointError, RuntimeError), match="a pickled file, which may run"):
        loaded.load_full(tmp_path / f"odd{dist.get_rank()}.pt")
    with pytest.raises(RuntimeError, match="tensorplay has no distributed checkpoints"):
        loaded.sharded_state_dict()
