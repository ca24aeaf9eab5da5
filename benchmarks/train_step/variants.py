"""The variants: each trains the same model on the same data with AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.train_step.settings import Settings, Unavailable

LR = 3e-4
ADAMW: dict[str, Any] = {"lr": LR, "fused": True}
DEEPSPEED_BUCKET_NBYTES = 25 * 2**20
"""As in DDP; its default of 5e8 elements was slower here."""


def nothing() -> None:
    """Do nothing."""


@dataclass
class Trainer:
    """One variant, ready to train.

    Attributes:
        module: Computes the loss.
        step: Updates the parameters.
        zero_grad: Drops the gradients.
        backward: Computes gradients of the loss.
        finish: Waits until the parameters are what the last step made of them.
        optimizers: Those of torch that hold this rank's state.
        gradients: This rank's gradients after backward, where they are not ``param.grad``.
        hidden_nbytes: Bytes of buffers that Python cannot see.
        parameters: All parameters whole, by name. Collective.
    """

    module: Callable[[Tensor], Tensor]
    step: Callable[[], object]
    zero_grad: Callable[[], object]
    backward: Callable[[Tensor], object] = torch.Tensor.backward
    finish: Callable[[], object] = nothing
    optimizers: list[Any] = field(default_factory=list)
    gradients: Callable[[], Iterable[Any]] | None = None
    hidden_nbytes: int = 0
    parameters: Callable[[], Iterable[tuple[str, Tensor]]] | None = None

    def train(self, batch: Tensor) -> Tensor:
        """Take one step and return its loss."""
        loss = self.module(batch)
        self.backward(loss)
        self.step()
        self.zero_grad()
        return loss.detach()


Make = Callable[[nn.Module, Settings], Trainer]


@dataclass(frozen=True)
class Variant:
    """How a variant is made.

    Attributes:
        name: As it is asked for and reported.
        make: Makes it of a model. Collective.
        package: What it needs beyond torch.
        is_peer: Whether it trains, and is not ours.
        environment: Variables that its processes need.
    """

    name: str
    make: Make
    package: str | None = None
    is_peer: bool = False
    environment: dict[str, str] = field(default_factory=dict)


VARIANTS: dict[str, Variant] = {}


def variant(name: str, **facts: Any) -> Callable[[Make], Make]:
    """Register a function as the maker of a variant."""

    def register(make: Make) -> Make:
        VARIANTS[name] = Variant(name, make, **facts)
        return make

    return register


# --- torch ----------------------------------------------------------------------------------------------------------


@variant("compute")
def compute(model: nn.Module, settings: Settings) -> Trainer:
    """Forward and backward alone, on all ranks at once."""
    return Trainer(model, nothing, model.zero_grad)


def ddp_trainer(
    model: nn.Module, make: Callable[..., Any], *, grad_view: bool, **options: Any
) -> Trainer:
    """DDP and an optimizer, which is made of its parameters and ``options``."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=grad_view)
    optimizer = make(ddp.parameters(), **options)
    local = getattr(optimizer, "optim", optimizer)
    hidden = 0 if grad_view else sum(p.numel() * p.element_size() for p in model.parameters())
    return Trainer(
        ddp, optimizer.step, optimizer.zero_grad, optimizers=[local], hidden_nbytes=hidden
    )


@variant("ddp", is_peer=True)
def ddp(model: nn.Module, settings: Settings) -> Trainer:
    return ddp_trainer(model, torch.optim.AdamW, grad_view=False, **ADAMW)


@variant("ddp view", is_peer=True)
def ddp_view(model: nn.Module, settings: Settings) -> Trainer:
    return ddp_trainer(model, torch.optim.AdamW, grad_view=True, **ADAMW)


def torch_zero_trainer(model: nn.Module, *, param_view: bool) -> Trainer:
    """DDP and torch's own ZeroRedundancyOptimizer."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ddp_trainer(
        model,
        ZeroRedundancyOptimizer,
        grad_view=False,
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=param_view,
        **ADAMW,
    )


@variant("torch zero", is_peer=True)
def torch_zero(model: nn.Module, settings: Settings) -> Trainer:
    return torch_zero_trainer(model, param_view=False)


@variant("torch zero view", is_peer=True)
def torch_zero_view(model: nn.Module, settings: Settings) -> Trainer:
    return torch_zero_trainer(model, param_view=True)


@variant("fsdp2", is_peer=True)
def fsdp2(model: nn.Module, settings: Settings) -> Trainer:
    """``fully_shard`` of every block and of the rest; parameters are gathered once per step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

    def parameters() -> Iterable[tuple[str, Tensor]]:
        return ((name, p.full_tensor()) for name, p in model.named_parameters())

    return Trainer(
        model, optimizer.step, optimizer.zero_grad, optimizers=[optimizer], parameters=parameters
    )


# --- FairScale and DeepSpeed ----------------------------------------------------------------------------------------


@variant("fairscale", is_peer=True, package="fairscale")
def fairscale(model: nn.Module, settings: Settings) -> Trainer:
    """Optimizer state and gradients sharded by parameter."""
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(model.parameters(), optim=torch.optim.AdamW, **ADAMW)
    sharded = ShardedDataParallel(model, optimizer)
    return Trainer(
        sharded,
        optimizer.step,
        lambda: sharded.zero_grad(set_to_none=True),
        optimizers=[optimizer.optim],
    )


def deepspeed_trainer(model: nn.Module, settings: Settings, *, stage: int) -> Trainer:
    """DeepSpeed's engine around torch's AdamW."""
    import deepspeed

    # An operator for inference, which would be compiled here, and which training never calls.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    bucket_numel = DEEPSPEED_BUCKET_NBYTES // getattr(torch, settings.dtype).itemsize
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,  # streams, which CPUs have none of
            "reduce_bucket_size": bucket_numel,
            "allgather_bucket_size": bucket_numel,
        },
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    zero = engine.optimizer

    def gradients() -> Iterable[Any]:
        return [[p.grad for p in model.parameters()], dict(zero.averaged_gradients)]

    return Trainer(
        engine,
        engine.step,
        nothing,  # step() has dropped them
        backward=engine.backward,
        optimizers=[zero.optimizer],
        gradients=gradients,
        parameters=model.named_parameters,
    )


DEEPSPEED: dict[str, Any] = {
    "is_peer": True,
    "package": "deepspeed",
    "environment": {"DS_ACCELERATOR": "cpu"},
}


@variant("deepspeed 1", **DEEPSPEED)
def deepspeed_1(model: nn.Module, settings: Settings) -> Trainer:
    return deepspeed_trainer(model, settings, stage=1)


@variant("deepspeed 2", **DEEPSPEED)
def deepspeed_2(model: nn.Module, settings: Settings) -> Trainer:
    return deepspeed_trainer(model, settings, stage=2)


# --- shardopt -------------------------------------------------------------------------------------------------------


def make_shardopt(params: Iterable[Tensor], settings: Settings, **policy: Any) -> Any:
    """Our optimizer, with parameters as bucket views."""
    from shardopt import Sharding, ZeroRedundancyOptimizer

    if settings.dtype != "float32":
        policy["master_dtype"] = torch.float32
    try:
        sharding = Sharding(bucket_mb=settings.bucket_mb, **policy)
    except TypeError as error:
        raise Unavailable(f"this version of shardopt has no such option: {error}") from error
    return ZeroRedundancyOptimizer(
        params, torch.optim.AdamW, parameters_as_bucket_view=True, sharding=sharding, **ADAMW
    )


def shardopt_trainer(
    model: nn.Module, settings: Settings, *, attach: bool = False, **policy: Any
) -> Trainer:
    """Gradients and state sharded by element, without DDP."""
    optimizer = make_shardopt(
        model.parameters(), settings, granularity="element", gradients=True, **policy
    )
    if attach and not hasattr(type(optimizer), "attach"):
        raise Unavailable("this version of shardopt has no attach()")
    if attach:
        optimizer.attach(model)
    return Trainer(
        model,
        optimizer.step,
        optimizer.zero_grad,
        finish=getattr(optimizer, "wait", nothing),
        optimizers=[optimizer.optim],
        gradients=lambda: [bucket.shard for bucket in optimizer.shards.gradient_buckets],
    )


@variant("shardopt")
def shardopt(model: nn.Module, settings: Settings) -> Trainer:
    """Parameters arrive during the next forward."""
    return shardopt_trainer(model, settings, attach=True)


@variant("shardopt in step")
def shardopt_in_step(model: nn.Module, settings: Settings) -> Trainer:
    """Parameters arrive in ``step()``."""
    return shardopt_trainer(model, settings)


@variant("shardopt in backward")
def shardopt_in_backward(model: nn.Module, settings: Settings) -> Trainer:
    """Parameters are updated in backward."""
    return shardopt_trainer(model, settings, step_in_backward=True)


@variant("shardopt over loopback")
def shardopt_over_loopback(model: nn.Module, settings: Settings) -> Trainer:
    """As between hosts: nothing goes through shared memory."""
    return shardopt_trainer(model, settings, attach=True, shared_memory=False)


@variant("shardopt stage 1")
def shardopt_stage_1(model: nn.Module, settings: Settings) -> Trainer:
    """DDP, and whole parameters as in the default."""
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_shardopt(ddp.parameters(), settings)
    return Trainer(ddp, optimizer.step, optimizer.zero_grad, optimizers=[optimizer.optim])
