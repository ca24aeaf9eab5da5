"""A process that watches the memory of another, since the kernel keeps no peak of it without mapped files.

It is no thread of the process that it watches: that might hold the interpreter's lock just when it holds most memory.
"""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path

INTERVAL_S = 0.005
OWN = ("RssAnon:", "RssShmem:")


def own_bytes(pid: int | str = "self") -> int:
    """Resident bytes of a process that are no file's: anonymous ones, and those that it shares with others."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(OWN))


def main() -> None:
    """Take samples until the other process closes our input; then print them as (seconds, bytes)."""
    pid = int(sys.argv[1])
    print(flush=True)  # ready
    samples = []
    while not select.select([sys.stdin], [], [], INTERVAL_S)[0]:
        try:
            samples.append((time.monotonic(), own_bytes(pid)))
        except (FileNotFoundError, ProcessLookupError):
            return
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
