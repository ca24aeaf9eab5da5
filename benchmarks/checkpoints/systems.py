"""The optimizers whose state is saved and loaded, and that state: Adam's, after one step with known gradients.

From zero moments every element of the new ones is a product of constants and its gradient, so all systems hold the same
bits, however they are sharded, and anyone can tell what a tensor has to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Adam

from benchmarks.checkpoints.job import SHAPES, Job
from benchmarks.train_step.memory import tensors_in
from benchmarks.train_step.models import GPT
from benchmarks.train_step.worker import gather
from shardopt import Sharding, ZeroRedundancyOptimizer

ADAM: dict[str, Any] = {"lr": 1e-3, "fused": True}

Entry = dict[str, Any]
"""The state of one parameter."""


@dataclass(frozen=True)
class Subject:
    """One system, ready.

    Attributes:
        model: The model.
        optimizer: Its optimizer.
        local: The optimizer of torch that holds this rank's state.
        whole: The state of whole parameters, by number; of all of them on the first rank or, in part, on each. Collective.
        place: Makes the gradient of a parameter of a whole one.
    """

    model: nn.Module
    optimizer: Any
    local: Any
    whole: Callable[[], Iterator[tuple[int, Entry]]]
    place: Callable[[Tensor, Tensor], Tensor] = lambda gradient, _: gradient

    def step(self) -> None:
        """Take one step with known gradients, which are dropped."""
        for number, param in enumerate(self.model.parameters()):
            param.grad = self.place(gradient_of(number, param.shape), param)
        self.optimizer.step()
        for param in self.model.parameters():
            param.grad = None

    def tensors(self) -> list[Tensor]:
        """All tensors of this rank's state."""
        found = tensors_in(list(self.local.state.values()))
        return [getattr(tensor, "_local_tensor", tensor) for tensor in found]


def build(job: Job) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return GPT(SHAPES[job.model])


def shardopt(job: Job) -> Subject:
    """Ours."""
    model = build(job)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        Adam,
        parameters_as_bucket_view=True,
        sharding=Sharding(granularity=job.granularity),
        **ADAM,
    )

    def whole() -> Iterator[tuple[int, Entry]]:
        optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            yield from optimizer.state_dict()["state"].items()

    return Subject(model, optimizer, optimizer.optim, whole)


def torch_zero(job: Job) -> Subject:
    """The class of torch that ours stands in for."""
    model = build(job)
    optimizer = TorchZero(model.parameters(), Adam, **ADAM)

    def whole() -> Iterator[tuple[int, Entry]]:
        for number, param in enumerate(model.parameters()):
            if param in optimizer.optim.state:
                yield number, optimizer.optim.state[param]

    return Subject(model, optimizer, optimizer.optim, whole)


def fsdp2(job: Job) -> Subject:
    """``fully_shard`` of every block and of the rest, and torch's own optimizer."""
    model = build(job)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Adam(model.parameters(), **ADAM)

    def whole() -> Iterator[tuple[int, Entry]]:
        for number, param in enumerate(model.parameters()):
            state = optimizer.state[param].items()
            entry = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state}
            if dist.get_rank() == 0:
                yield number, entry

    return Subject(model, optimizer, optimizer, whole, place_like)


def place_like(gradient: Tensor, param: Any) -> Tensor:
    """This rank's part of a gradient that every rank has."""
    return distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)


SYSTEMS: dict[str, Callable[[Job], Subject]] = {
    "shardopt": shardopt,
    "torch zero": torch_zero,
    "fsdp2": fsdp2,
}


def gradient_of(number: int, shape: torch.Size) -> Tensor:
    """The gradient of a parameter."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def expected(number: int, shape: torch.Size) -> Entry:
    """The state of a parameter after the step, by an optimizer that has no other."""
    param = nn.Parameter(torch.zeros(shape))
    param.grad = gradient_of(number, shape)
    optimizer = Adam([param], **ADAM)
    optimizer.step()
    entry: Entry = optimizer.state[param]
    return entry


def check(subject: Subject) -> dict[str, Any]:
    """Compare the state of every parameter, bit for bit, with what it has to be. Collective."""
    params = list(subject.model.named_parameters())
    right, wrong = [], []
    for number, entry in subject.whole():
        name, param = params[number]
        wanted = expected(number, param.shape)
        is_right = entry.keys() == wanted.keys() and all(
            torch.equal(entry[key], wanted[key]) for key in wanted
        )
        (right if is_right else wrong).append(name)
    rights, wrongs = ([*chain(*gather(names))] for names in (right, wrong))
    missing = {name for name, _ in params} - {*rights, *wrongs}
    return {"right": len(rights), "wrong": wrongs, "missing": sorted(missing)}
