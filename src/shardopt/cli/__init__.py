"""The command line: ``shardopt checkpoint inspect`` and ``shardopt checkpoint convert``.

``main`` parses arguments and turns what our code raises into one line and an exit code; ``inspect`` and ``convert`` are the
two commands. ``description`` says what a checkpoint holds as plain values, ``tables`` shows that, ``tensors`` knows where
memory comes from. This room shows and asks; what reads and writes checkpoints is in ``checkpoint``. It alone may import
``rich``, and loads it, as it does a framework, only where it is needed.
"""

from shardopt.cli.main import main

__all__ = ["main"]
