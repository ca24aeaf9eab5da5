"""Files of torch's class and of FairScale's, as they are, load and train on as those would."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardopt.testing import run_ranks
from tests.ranks.checkpointing import Way, make, make_model, train
from tests.ranks.training import assert_same_params

needs_fairscale = pytest.mark.skipif(
    importlib.util.find_spec("fairscale") is None, reason="fairscale is not installed"
)
WAYS = [Way("parameter", False), Way("element", True)]


def make_peer(kind: str, params: Any) -> Any:
    if kind == "torch":
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeroRedundancyOptimizer

        return TorchZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)
    from fairscale.optim.oss import OSS

    return OSS(params, torch.optim.AdamW, lr=0.01)


def consolidate(kind: str, peer: Any) -> None:
    if kind == "torch":
        peer.consolidate_state_dict(to=0)
    else:
        peer.consolidate_state_dict(recipient_rank=0)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("kind", ["torch", pytest.param("fairscale", marks=needs_fairscale)])
@run_ranks(2, 3)
def test_consolidated_files_load_as_they_are(kind: str, way: Way, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make_model()
        model[4].bias.requires_grad_(True)
        peer = make_peer(kind, list(model.parameters()))
        train(model, peer, range(3))
        consolidate(kind, peer)
        if dist.get_rank() == 0:
            torch.save(peer.state_dict(), tmp_path / "peer.pt")
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, peer, range(3, 5))
    for load in ("load_full", "load_state_dict"):
        again = make_model()
        again[4].bias.requires_grad_(True)
        again.load_state_dict(weights)
        zero = make(again, way)
        if load == "load_full":
            zero.load_full(tmp_path / "peer.pt")
        else:
            dist.barrier()
            zero.load_state_dict(torch.load(tmp_path / "peer.pt", weights_only=True))
        train(again, zero, range(3, 5))
        if dist.get_world_size() == 2 or not way.gradients:
            assert_same_params(again, model)  # averages of three equal gradients round
