"""The command line, and what a run is made of."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpt.checkpoint import read_checkpoint
from gpt.launch import is_first_process, num_launched_ranks
from gpt.model import GPTShape
from gpt.optimizers import require_usable

DEFAULT_OUT = Path("runs/train_gpt.pt")

DESCRIPTION = """\
Train a small GPT on the source of Python's standard library, on several processes that
share the optimizer's state; show the memory that this saves, and let the model write.
"""

EXAMPLES = """\
examples:
  train_gpt.py --ranks 2                 a minute or two on two cores
  train_gpt.py --unsharded               the same without shardopt: the same loss, to the last bit
  train_gpt.py --stop-at 300             as if interrupted at step 300 ...
  train_gpt.py --resume --ranks 3        ... and on from there, here on more processes
  train_gpt.py --optimizer Adafactor --lr 0.02
  train_gpt.py --optimizer schedulefree.AdamWScheduleFree

on machines with GPUs, or on several machines, let torchrun start the processes:
  torchrun --nproc-per-node 8 train_gpt.py
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
      train_gpt.py                       the same line on both machines
"""


@dataclass(frozen=True)
class Recipe:
    """What decides the result of a run; kept in its checkpoint.

    Attributes:
        optimizer: A class of ``torch.optim``, or ``module.Class``.
        steps: Number of optimizer steps.
        batch_size: Sequences in a step, all ranks together.
        lr: Learning rate at the end of the warm-up.
        width: See ``GPTShape``, as the next three.
        layers: Number of blocks.
        heads: Number of attention heads.
        context: Bytes in a sequence.
        eval_every: Steps between evaluations, each with a checkpoint.
        seed: Of weights, training sequences and the sample.
    """

    optimizer: str = "AdamW"
    steps: int = 800
    batch_size: int = 16
    lr: float = 3e-3
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    eval_every: int = 100
    seed: int = 0

    @property
    def shape(self) -> GPTShape:
        """The part of it that the model needs."""
        return GPTShape(self.width, self.layers, self.heads, self.context)


@dataclass(frozen=True)
class Options:
    """Everything that a rank is told.

    Attributes:
        recipe: What to train, and how.
        ranks: Number of processes.
        is_unsharded: Use the plain optimizer.
        resume: Checkpoint to go on from.
        out: Checkpoint to write.
        stop_at: Step to end at, as if interrupted.
        prompt: What the sample starts with.
    """

    recipe: Recipe
    ranks: int
    is_unsharded: bool
    resume: Path | None
    out: Path
    stop_at: int | None
    prompt: str


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line, and refuse what cannot work before any process is started.

    Raises:
        SystemExit: After ``--help``, or with a message on what is wrong.
    """
    parser = _make_parser()
    given = parser.parse_args(arguments)
    try:
        return _make_options(given)
    except (ValueError, OSError) as error:
        if is_first_process():
            parser.error(str(error))
        sys.exit(2)


def _make_options(given: argparse.Namespace) -> Options:
    chosen = {
        field.name: getattr(given, field.name) for field in fields(Recipe) if field.name in given
    }
    resume = None if given.resume is None else Path(given.resume or given.out or DEFAULT_OUT)
    recipe = Recipe(**chosen) if resume is None else _resumed_recipe(resume, chosen)
    ranks = _count_ranks(given.ranks)
    if recipe.batch_size < ranks:
        raise ValueError(
            f"--batch-size {recipe.batch_size} leaves some of {ranks} ranks without a sequence"
        )
    if not given.prompt:
        raise ValueError(
            "--prompt '' gives the model nothing to go on from; use at least one letter"
        )
    recipe.shape  # noqa: B018 - checks itself
    require_usable(recipe.optimizer, lr=recipe.lr)
    out = Path(given.out or resume or DEFAULT_OUT)
    return Options(recipe, ranks, given.unsharded, resume, out, given.stop_at, given.prompt)


def _count_ranks(asked: int | None) -> int:
    launched = num_launched_ranks()
    if None not in (asked, launched) and asked != launched:
        raise ValueError(
            f"--ranks {asked}, but torchrun started {launched}; leave --ranks to torchrun"
        )
    return launched or asked or 2


def _resumed_recipe(path: Path, chosen: dict[str, Any]) -> Recipe:
    """Return the recipe of a checkpoint; of all that decides the result only the number of steps may be changed."""
    content = read_checkpoint(path)
    saved = Recipe(**content["recipe"])
    for name, value in chosen.items():
        if name != "steps" and value != getattr(saved, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} {value}: {path} was trained with {flag} {getattr(saved, name)}; leave the flag out"
            )
    steps = chosen.get("steps", saved.steps)
    if steps < content["step"]:
        raise ValueError(f"--steps {steps}: {path} is at step {content['step']} already")
    return replace(saved, steps=steps)


def _positive(kind: type[int] | type[float]) -> Any:
    def convert(text: str) -> int | float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse names it in its own message
    return convert


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_run_flags(parser.add_argument_group("this run"))
    _add_recipe_flags(
        parser.add_argument_group(
            "recipe",
            "kept in the checkpoint; --resume takes all of it from there, only --steps may differ",
        )
    )
    return parser


def _add_run_flags(group: Any) -> None:
    group.add_argument(
        "--ranks", type=_positive(int), metavar="N", help="processes to start here (default 2)"
    )
    group.add_argument(
        "--unsharded",
        action="store_true",
        help="the plain optimizer: each rank keeps the whole state",
    )
    group.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="go on from a checkpoint, by default that of --out; any number of ranks may have written it, sharded or "
        "not; on several machines, all must find it there",
    )
    group.add_argument(
        "--out",
        metavar="PATH",
        help=f"checkpoint to write (default: the one resumed, else {DEFAULT_OUT})",
    )
    group.add_argument(
        "--stop-at",
        type=_positive(int),
        metavar="STEP",
        help="save and end at this step, as if interrupted",
    )
    group.add_argument(
        "--prompt",
        default="def ",
        metavar="TEXT",
        help="what the sample starts with (default %(default)r)",
    )


def _add_recipe_flags(group: Any) -> None:
    def add(flag: str, kind: Any, metavar: str, text: str) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        default = getattr(Recipe, name)
        # SUPPRESS: a flag that was not given is not in the namespace, so --resume can tell.
        group.add_argument(
            flag,
            type=kind,
            metavar=metavar,
            default=argparse.SUPPRESS,
            help=f"{text} (default {default})",
        )

    number = _positive(int)
    add("--optimizer", str, "NAME", "a class of torch.optim, or module.Class")
    add("--steps", number, "N", "optimizer steps")
    add("--batch-size", number, "N", "sequences in a step, all ranks together")
    add("--lr", _positive(float), "X", "peak learning rate; SGD needs about 0.5")
    add("--width", number, "N", "features of a byte")
    add("--layers", number, "N", "blocks of attention and MLP")
    add("--heads", number, "N", "attention heads in a block")
    add("--context", number, "N", "bytes in a sequence")
    add("--eval-every", number, "N", "steps between evaluations, each with a checkpoint")
    add("--seed", int, "N", "of weights, training sequences and the sample")
