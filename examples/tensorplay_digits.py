"""Train a classifier of handwritten digits with TensorPlay on several processes, with sharded optimizer state.

    python examples/tensorplay_digits.py --ranks 2

TensorPlay's CPU build has no DistributedDataParallel, so the optimizer averages the gradients too: each process works on
its own part of every batch, and ``ZeroRedundancyOptimizer`` with ``Sharding(gradients=True)`` does the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import tensorplay as tp
import tensorplay.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorplay import nn

from shardopt import Sharding
from shardopt.tensorplay import ZeroRedundancyOptimizer

LAUNCHER = "tensorplay.distributed.run"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes to start (default: 2)")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of all ranks together")
    parser.add_argument("--lr", type=float, default=2e-3)
    return parser.parse_args()


def launch(ranks: int) -> int:
    """Start this script again on ``ranks`` processes and return their exit status."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, "-m", LAUNCHER, f"--nproc-per-node={ranks}", "--", *sys.argv]
    return subprocess.run(command, env=environment, check=False).returncode


def load_data() -> list[tp.Tensor]:
    """Training and test pictures, (n, 64) in [0, 1], and their labels, (n,) int64."""
    pictures, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        pictures / 16.0, labels, test_size=0.2, random_state=0, stratify=labels
    )
    x_train, x_test, y_train, y_test = (part.tolist() for part in parts)
    return [
        tp.tensor(x_train),
        tp.tensor(x_test),
        tp.tensor(y_train, dtype=tp.int64),
        tp.tensor(y_test, dtype=tp.int64),
    ]


def accuracy(model: nn.Module, pictures: tp.Tensor, labels: tp.Tensor) -> float:
    """Share of pictures that the model names rightly."""
    with tp.no_grad():
        guesses = model(pictures).argmax(dim=1).tolist()
    return sum(g == label for g, label in zip(guesses, labels.tolist(), strict=True)) / len(guesses)


def state_nbytes(state: dict) -> int:
    """Bytes of the tensors in an optimizer's state."""
    tensors = [value for entry in state.values() for value in entry.values() if tp.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def train(options: argparse.Namespace, console: Console) -> float:
    """Train on this rank's part of every batch; returns the accuracy on the test set."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x_train, x_test, y_train, y_test = load_data()
    tp.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    loss_function = nn.CrossEntropyLoss()
    # tp.optim.AdamW(model.parameters(), lr=options.lr) would keep all state on every rank, and average nothing
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        tp.optim.AdamW,
        parameters_as_bucket_view=True,
        sharding=Sharding(gradients=True, granularity="element"),
        lr=options.lr,
    )
    num_batches = len(y_train.tolist()) // options.batch_size
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=options.epochs * num_batches)
        for epoch in range(options.epochs):
            tp.manual_seed(epoch)  # the same order on every rank
            order = tp.randperm(num_batches * options.batch_size)
            for batch in range(num_batches):
                mine = order[batch * options.batch_size : (batch + 1) * options.batch_size][
                    rank::world_size
                ]
                loss = loss_function(model(x_train[mine]), y_train[mine])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                progress.update(
                    task, advance=1, description=f"epoch {epoch + 1}, loss {loss.item():.3f}"
                )
    show_memory(optimizer, console)
    return accuracy(model, x_test, y_test)


def show_memory(optimizer: ZeroRedundancyOptimizer, console: Console) -> None:
    """Print how many bytes of state each rank keeps, beside what all keep together. Collective."""
    nbytes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(nbytes, state_nbytes(optimizer.state))
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        unsharded = state_nbytes(optimizer.state_dict()["state"])
        table = Table(title="optimizer state, measured from its tensors")
        table.add_column("rank")
        table.add_column("sharded", justify="right")
        table.add_column("unsharded", justify="right")
        for rank, mine in enumerate(nbytes):
            table.add_row(str(rank), f"{mine / 1024:.0f} KiB", f"{unsharded / 1024:.0f} KiB")
        console.print(table)


def main() -> int:
    """Start the ranks, or be one."""
    options = parse_arguments()
    if "RANK" not in os.environ:
        return launch(options.ranks)
    tp.set_num_threads(1)
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0)
    console.print(f"digits on {dist.get_world_size()} ranks, AdamW, {options.epochs} epochs")
    result = train(options, console)
    console.print(f"test accuracy: {100 * result:.1f} %")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
