"""``python -m shardopt.cli``."""

from __future__ import annotations

import sys

from shardopt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
