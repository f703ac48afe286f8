"""`hma-triton lmcache-server` with a handle for tests: SIGUSR1 takes our operations away or puts
them back, SIGUSR2 only reports. Both write one JSON line to the file named in HMA_SWAP_REPORT.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from hma_triton.cli.lmcache_server import app
from hma_triton.integration.lmcache import current_installation, install, uninstall


def report() -> None:
    installation = current_installation()
    moved = installation.executors.blocks_moved if installation else (0, 0)
    counts = installation.fallthrough.counts if installation else {}
    line = {
        "installed": installation is not None,
        "stored": moved[0],
        "retrieved": moved[1],
        "fallthrough": [list(key) for key in counts],
    }
    with Path(os.environ["HMA_SWAP_REPORT"]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def swap(*_: object) -> None:
    if current_installation() is None:
        install()
    else:
        uninstall()
    report()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, swap)
    signal.signal(signal.SIGUSR2, lambda *_: report())
    app(args=sys.argv[1:], prog_name="hma-triton lmcache-server")
