"""Train, be killed, and go on to the same bits: what a complete checkpoint holds, and in which order it is written.

    python -m torch.distributed.run --nproc-per-node 2 examples/exact_resume.py --folder runs/resume --kill-at 50
    python -m torch.distributed.run --nproc-per-node 2 examples/exact_resume.py --folder runs/resume

The second line goes on from the last checkpoint, and ends with the loss of a run that nobody killed, to the last bit. On
another number of ranks it goes on, too, but not to the same bits: gradients are added in another order, and each rank
draws other masks for dropout.

    runs/resume/latest                  the name of the current checkpoint, replaced in one move
    runs/resume/step-000040/optimizer/  the optimizer's state, a file per rank, by optimizer.save()
    runs/resume/step-000040/rest.pt     everything else

``latest`` is replaced once all of a checkpoint is on the disk, and before older ones are removed. So whenever the
processes are killed, it names a checkpoint that is whole, and all of it is of one step.
"""

import argparse
import gc
import io
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shardopt import Sharding, ZeroRedundancyOptimizer  # before init_process_group()

NUM_SAMPLES = 480
BATCH_SIZE = 24  # of all ranks together


@dataclass
class Training:
    model: nn.Module
    optimizer: ZeroRedundancyOptimizer
    scheduler: LambdaLR
    scaler: torch.amp.GradScaler
    step: int = 0  # also the position in the data, whose order depends on nothing else


def start() -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=True,
        sharding=Sharding(granularity="element", gradients=True),
        lr=0.01,
    )
    scheduler = LambdaLR(optimizer, lambda step: 0.99**step)
    scaler = torch.amp.GradScaler("cpu", growth_interval=4)  # so short that its state matters here
    torch.manual_seed(1 + dist.get_rank())  # each rank draws masks of its own
    return Training(model, optimizer, scheduler, scaler)


def save(training: Training, folder: Path) -> None:
    """Write a checkpoint beside the current one, then make it the current one. Collective."""
    checkpoint = folder / f"step-{training.step:06}"
    training.optimizer.save(checkpoint / "optimizer")  # done once the files of all ranks are
    random_states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, torch.get_rng_state())
    if dist.get_rank() == 0:
        rest = {
            "step": training.step,
            "model": training.model.state_dict(),
            "scheduler": training.scheduler.state_dict(),
            "scaler": training.scaler.state_dict(),
            "random_states": random_states,  # add those of CUDA, numpy and random if you use them
        }
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        replace(checkpoint / "rest.pt", buffer.getbuffer())
        replace(folder / "latest", checkpoint.name.encode())
        for other in set(folder.glob("step-*")) - {checkpoint}:
            shutil.rmtree(other)


def replace(path: Path, content: bytes | memoryview) -> None:
    """Replace a file in one move, once its content is on the disk."""
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    names = os.open(path.parent, os.O_RDONLY)
    os.fsync(names)
    os.close(names)


def load(training: Training, folder: Path) -> str:
    """Go on from the current checkpoint if there is one; return what was done. Collective."""
    latest = folder / "latest"
    box = [latest.read_text() if latest.exists() else None]
    dist.broadcast_object_list(box)  # what the first rank sees
    if box[0] is None:
        return f"start anew, no checkpoint in {folder}"
    checkpoint = folder / box[0]
    training.optimizer.load(checkpoint / "optimizer")
    rest = torch.load(checkpoint / "rest.pt")
    training.step = rest["step"]
    training.model.load_state_dict(rest["model"])
    training.scheduler.load_state_dict(rest["scheduler"])
    training.scaler.load_state_dict(rest["scaler"])
    random_states = rest["random_states"]
    if len(random_states) == dist.get_world_size():
        torch.set_rng_state(random_states[dist.get_rank()])
    else:
        torch.manual_seed(1000 * training.step + dist.get_rank())
    return f"go on from {checkpoint}, saved by {len(random_states)}"


def train_step(training: Training, inputs: Tensor, targets: Tensor) -> None:
    """Make a step on this rank's part of a batch, which is the same on any number of ranks. Collective."""
    epoch, batch = divmod(training.step, NUM_SAMPLES // BATCH_SIZE)
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch))
    mine = order.split(BATCH_SIZE)[batch][dist.get_rank() :: dist.get_world_size()]
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = training.model(inputs[mine])
    loss = (outputs.float() - targets[mine]).square().sum() / BATCH_SIZE
    training.optimizer.zero_grad()
    training.scaler.scale(loss * dist.get_world_size()).backward()  # gradients are averaged
    training.scaler.unscale_(training.optimizer)
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.scaler.step(training.optimizer)
    training.scaler.update()
    training.scheduler.step()
    training.step += 1


@torch.no_grad()
def evaluate(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    loss = (model.eval()(inputs) - targets).square().mean().item()
    model.train()
    return loss


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(options: argparse.Namespace) -> None:
    inputs = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, :4] * inputs[:, 4:]).sum(1, keepdim=True).sin()
    training = start()
    say(f"ranks: {dist.get_world_size()}, {load(training, options.folder)}")
    while training.step < options.steps:
        train_step(training, inputs, targets)
        if training.step % options.save_every == 0:
            save(training, options.folder)
            loss, scale = evaluate(training.model, inputs, targets), training.scaler.get_scale()
            say(f"step {training.step:4}   loss {loss:.4f}   scale {scale:6.0f}   saved")
        if training.step == options.kill_at and dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {training.step:4}   rank {dist.get_rank()} kills itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    say(f"final loss to the last bit: {evaluate(training.model, inputs, targets).hex()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="one that all ranks share")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="let the last rank die there")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores
    dist.init_process_group("gloo")
    run(options)
    gc.collect()  # optimizer and scheduler refer to each other, and to the process group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
