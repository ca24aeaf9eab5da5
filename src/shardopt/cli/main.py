"""Arguments in, an exit code out."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shardopt.errors import ShardoptError

FAILED = 1
INTERRUPTED = 130
"""What a shell returns for a command that Ctrl-C has ended."""

CHECKPOINT = "a folder of optimizer.save(), a file of optimizer.save_full(), or a state dict that torch.save() has written"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` name; by default those of the process.

    Returns:
        The exit code: 0, 1 after an error, which is told in one line on stderr, 130 after Ctrl-C.

    Raises:
        SystemExit: Of ``argparse``: code 0 after ``--help``, 2 after arguments that do not fit.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read what we print, e.g. head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ShardoptError, OSError, TypeError, ValueError, ImportError) as error:
        _complain(_text_of(error))
        return FAILED
    return code


def _complain(text: str) -> None:
    lines = [line.strip() for line in text.splitlines()]
    sys.stderr.write(f"shardopt: error: {' '.join(filter(None, lines))}\n")


def _text_of(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "rich":
        return "this needs rich; install it with: pip install 'shardopt[cli]'"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardopt", description="Tools for what shardopt's optimizers leave behind."
    )
    rooms = parser.add_subparsers(title="what to work on", metavar="WHAT", required=True)
    checkpoint = rooms.add_parser(
        "checkpoint",
        help="look into checkpoints of optimizers, and turn one kind into another",
        description="Look into checkpoints of optimizers, and turn one kind into another.",
    )
    commands = checkpoint.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_convert(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds",
        description="Show what a checkpoint holds: options, the state of each parameter, and the file of each rank. Reads "
        "headers and step counts only, unless --verify is given. Nothing pickled is run.",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help=CHECKPOINT)
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read everything and compare checksums; exit with 1 if something is damaged",
    )
    parser.add_argument(
        "--params",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show the table of parameters (the default)",
    )
    parser.set_defaults(run=_run_inspect)


def _add_convert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "convert",
        help="turn a checkpoint of one kind into one of another",
        description="Turn a checkpoint of one kind into one of another, bit for bit. Memory holds 16 MiB of tensors at a "
        "time, or one tensor twice where a parameter's memory is not in row-major order. TARGET is written beside what is there, "
        "which it replaces in one move if that is a checkpoint of the same kind; anything else is left alone.",
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help=CHECKPOINT)
    parser.add_argument("target", metavar="TARGET", type=Path, help="what to write")
    parser.add_argument(
        "--to",
        choices=("full", "sharded", "torch"),
        help="full: one file, for load() and load_full(); the default where TARGET ends in .safetensors. torch: the state "
        "dict of the unsharded optimizer in a file of torch.save(), which takes memory for all of it; the default where "
        "TARGET ends in .pt. sharded: a folder of N files, for load(); the default otherwise",
    )
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="number of files of --to sharded; by default that of the ranks that have saved SOURCE",
    )
    parser.set_defaults(run=_run_convert)


def _run_inspect(options: argparse.Namespace) -> int:
    from shardopt.cli.inspect import inspect

    return inspect(
        options.path, as_json=options.json, verify=options.verify, with_params=options.params
    )


def _run_convert(options: argparse.Namespace) -> int:
    from shardopt.cli.convert import convert

    return convert(options.source, options.target, to=options.to, num_ranks=options.ranks)
