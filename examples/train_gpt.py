"""Train a small GPT on several processes, each of which keeps only its part of the optimizer's state.

Run ``python examples/train_gpt.py --ranks 2``, or ``--help``. It needs ``pip install 'shardopt[torch,demo]'``.

Sharding is in two places: ``make_optimizer`` and, before saving, ``collect_optimizer_state``. All else is an ordinary
training script with ``DistributedDataParallel``; what has nothing to do with training lies in the folder ``gpt``.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from gpt.checkpoint import read_checkpoint, write_checkpoint
from gpt.launch import Rank, is_first_process, launch
from gpt.memory import measure
from gpt.model import GPT, generate, losses
from gpt.optimizers import find_optimizer, set_mode
from gpt.options import Options, Recipe, parse_options
from gpt.report import Report
from gpt.text import Batch, Sampler, Text, ValidationSet, read_text
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardopt import ZeroRedundancyOptimizer

MAX_GRADIENT_NORM = 1.0
WARM_UP_STEPS = 50
FINAL_LR_FACTOR = 0.05
SAMPLE_BYTES = 400
SAMPLE_TEMPERATURE = 0.6


def make_optimizer(model: DistributedDataParallel, options: Options) -> Optimizer:
    """Make the optimizer, sharded or plain."""
    optimizer_class = find_optimizer(options.recipe.optimizer)
    lr = options.recipe.lr
    optimizer: Optimizer
    if options.is_unsharded:
        optimizer = optimizer_class(model.parameters(), lr=lr)
    else:  # sharding is this one line:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class, lr=lr)
    return optimizer


def collect_optimizer_state(optimizer: Optimizer, rank: Rank) -> dict[str, Any] | None:
    """Return the whole state on rank 0, as the plain optimizer would save it; None elsewhere. Collective."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if rank.is_first else None


@dataclass
class Training:
    """All that changes while training, and what it is done with."""

    rank: Rank
    recipe: Recipe
    text: Text
    model: GPT
    ddp: DistributedDataParallel
    optimizer: Optimizer
    scheduler: LambdaLR
    sampler: Sampler
    validation: ValidationSet
    step: int = 0
    recent_losses: list[float] = field(default_factory=list)
    first_validation_loss: float = math.nan


def start_training(rank: Rank, options: Options) -> Training:
    """Make everything, as the checkpoint says if there is one. Collective."""
    recipe = options.recipe
    torch.manual_seed(recipe.seed)
    text = share_text(rank)
    model = GPT(recipe.shape).to(rank.device)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(ddp, options)
    scheduler = LambdaLR(optimizer, lambda step: lr_factor(step, recipe.steps))
    sizes = {"context": recipe.context, "batch_size": recipe.batch_size}
    training = Training(
        rank,
        recipe,
        text,
        model,
        ddp,
        optimizer,
        scheduler,
        sampler=Sampler(text, seed=recipe.seed, **sizes),
        validation=ValidationSet(text, **sizes),
    )
    if options.resume is not None:
        load(training, read_checkpoint(options.resume))
    settle_buckets(training)
    return training


def share_text(rank: Rank) -> Text:
    """Return rank 0's text on every rank, since machines may have different versions of Python. Collective."""
    box = [read_text() if rank.is_first else None]
    dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def lr_factor(step: int, steps: int) -> float:
    """Return what the learning rate is multiplied by: a linear warm-up, then a cosine down to ``FINAL_LR_FACTOR``."""
    warm_up = min(1.0, (step + 1) / min(WARM_UP_STEPS, steps))
    cosine = (1 + math.cos(math.pi * min(1.0, step / steps))) / 2
    return warm_up * (FINAL_LR_FACTOR + (1 - FINAL_LR_FACTOR) * cosine)


def settle_buckets(training: Training) -> None:
    """Let DDP see one backward before the first step. Collective.

    DDP orders its gradient buckets anew after the first backward it sees. With more than two ranks that changes the
    order in which gradients are summed, so a resumed run would differ in the last bit from one that went through.
    """
    nothing = torch.zeros(1, 1, dtype=torch.int64, device=training.rank.device)
    training.ddp(nothing).sum().backward()
    training.ddp.zero_grad()


# --- Training ------------------------------------------------------------------------------------------------------


def train_step(training: Training) -> float:
    """Make one step and return the training loss in nats per byte, averaged over ranks. Collective."""
    rank, recipe = training.rank, training.recipe
    batch = training.sampler.next_batch(rank.rank, rank.world_size, rank.device)
    training.optimizer.zero_grad()
    loss = losses(training.ddp(batch.inputs), batch.targets).sum()
    loss = loss / (recipe.batch_size * recipe.context)  # a part: summed over ranks, the mean
    (loss * rank.world_size).backward()  # DDP divides by the number of ranks
    clip_grad_norm_(training.ddp.parameters(), MAX_GRADIENT_NORM)
    training.optimizer.step()
    training.scheduler.step()
    training.step += 1
    return sum_over_ranks(loss.detach().double())


@torch.no_grad()
def evaluate(training: Training) -> float:
    """Return the validation loss in nats per byte, over the part of all ranks. Collective."""
    rank = training.rank
    total = torch.zeros((), dtype=torch.float64, device=rank.device)
    batch: Batch
    for batch in training.validation.batches(rank.rank, rank.world_size, rank.device):
        total += losses(training.model(batch.inputs), batch.targets).double().sum()
    return sum_over_ranks(total) / training.validation.num_bytes


def sum_over_ranks(value: torch.Tensor) -> float:
    """Return the sum of every rank's ``value``. Collective."""
    dist.all_reduce(value)
    return value.item()


# --- Checkpoints ---------------------------------------------------------------------------------------------------


def save(training: Training, options: Options) -> dict[str, Any] | None:
    """Write the checkpoint and return it on rank 0. Collective."""
    optimizer_state = collect_optimizer_state(training.optimizer, training.rank)
    if not training.rank.is_first:
        return None
    content = {
        "recipe": asdict(training.recipe),
        "step": training.step,
        "model": training.model.state_dict(),
        "optimizer": optimizer_state,
        "scheduler": training.scheduler.state_dict(),
        "sampler": training.sampler.generator.get_state(),
        "text": training.text.digest,
        "first_validation_loss": training.first_validation_loss,
    }
    write_checkpoint(options.out, content)
    return content


def load(training: Training, content: dict[str, Any]) -> None:
    """Continue from a checkpoint, whatever the number of ranks that wrote it. Collective.

    Raises:
        ValueError: It was trained on another text, so on another version of Python.
    """
    if content["text"] != training.text.digest:
        raise ValueError(
            f"--resume: the checkpoint was trained on another text than {training.text.source}; "
            "use the Python that wrote it"
        )
    training.step = content["step"]
    training.first_validation_loss = content["first_validation_loss"]
    training.model.load_state_dict(content["model"])
    training.optimizer.load_state_dict(content["optimizer"])
    training.scheduler.load_state_dict(content["scheduler"])
    training.sampler.generator.set_state(content["sampler"])


# --- The run -------------------------------------------------------------------------------------------------------


def run(rank: Rank, options: Options) -> None:
    """Train, and on rank 0 tell about it. Every rank calls this."""
    training = start_training(rank, options)
    steps = training.recipe.steps
    stop = max(training.step, min(steps, options.stop_at or steps))
    report = Report(is_shown=rank.is_first, step=training.step, steps=steps)
    report.say(describe(training, options, stop))
    started = time.monotonic()
    with report:
        train_until(stop, training, options, report)
        if stop == steps:
            final_loss = evaluate_and_show(training, report)
    checkpoint = save(training, options)
    if stop < steps:
        report.say(f"Stopped at step {training.step}, saved in {options.out}; --resume goes on.")
        return
    report.say(
        f"Validation loss went from {training.first_validation_loss:.3f} to {final_loss:.3f} nats per byte; "
        f"this run took {time.monotonic() - started:.0f} s.\n"
        f"Final validation loss to the last bit: {final_loss.hex()}\n"
    )
    show_memory(training, checkpoint, report)
    if checkpoint is not None:
        show_sample(training, options, report)


def train_until(stop: int, training: Training, options: Options, report: Report) -> None:
    """Make steps, with an evaluation and a checkpoint every now and then. Collective."""
    start = training.step
    while training.step < stop:
        if training.step % training.recipe.eval_every == 0:
            evaluate_and_show(training, report)
            if training.step > start:
                save(training, options)
        set_mode(training.model, training.optimizer, is_training=True)
        training.recent_losses.append(train_step(training))
        report.show_step(training.step, training.recent_losses)


def evaluate_and_show(training: Training, report: Report) -> float:
    """Evaluate in evaluation mode, and stay in it. Collective."""
    set_mode(training.model, training.optimizer, is_training=False)
    loss = evaluate(training)
    if training.step == 0:
        training.first_validation_loss = loss
    report.show_validation(training.step, loss, training.recent_losses)
    training.recent_losses.clear()
    return loss


def describe(training: Training, options: Options, stop: int) -> str:
    """Say what will be done."""
    rank, recipe, text = training.rank, training.recipe, training.text
    num_params = sum(param.numel() for param in training.model.parameters())
    ranks = "1 rank" if rank.world_size == 1 else f"{rank.world_size} ranks"
    how = "unsharded" if options.is_unsharded else "sharded by shardopt.ZeroRedundancyOptimizer"
    return (
        f"Model: a GPT of {num_params:,} parameters, on {ranks} ({rank.device.type})\n"
        f"Optimizer: {recipe.optimizer}, {how}\n"
        f"Text: {len(text.train) / 1e6:.1f} MB to learn, {len(text.validation) / 1e6:.1f} MB to validate, "
        f"from {text.source}\n"
        f"Work: steps {training.step} to {stop} of {recipe.steps}, "
        f"each on {recipe.batch_size} sequences of {recipe.context} bytes\n"
        f"Checkpoint: {options.out}, every {recipe.eval_every} steps\n"
    )


def show_memory(training: Training, checkpoint: dict[str, Any] | None, report: Report) -> None:
    """Show what each rank keeps, beside what the plain optimizer keeps once it has loaded the checkpoint. Collective."""
    by_rank = [measure(training.model, training.optimizer)] * training.rank.world_size
    dist.all_gather_object(by_rank, by_rank[0])
    if checkpoint is None:
        return
    if not isinstance(training.optimizer, ZeroRedundancyOptimizer):
        report.show_memory(by_rank)
        return
    plain = find_optimizer(training.recipe.optimizer)(
        training.model.parameters(), lr=training.recipe.lr
    )
    plain.load_state_dict(checkpoint["optimizer"])
    report.show_memory(by_rank, unsharded=measure(training.model, plain))


def show_sample(training: Training, options: Options, report: Report) -> None:
    """Let the model go on from the prompt. On rank 0."""
    written = generate(
        training.model,
        options.prompt.encode(),
        num_bytes=SAMPLE_BYTES,
        seed=training.recipe.seed,
        temperature=SAMPLE_TEMPERATURE,
    )
    whole_lines, _, _ = written.decode(errors="replace").rpartition("\n")
    report.show_sample(whole_lines or options.prompt)


def main() -> None:
    """Start the ranks."""
    options = parse_options()
    try:
        launch(run, options, num_ranks=options.ranks)
    except KeyboardInterrupt:
        told = f"Interrupted. --resume goes on from the checkpoint in {options.out}, if one was written."
        sys.exit(told if is_first_process() else 1)


if __name__ == "__main__":
    main()
