"""`python -m hma_triton.server.child SETTINGS`: the process of an embedded server.

SETTINGS is a `ServerConfig` as JSON. The process ends with its parent.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from pathlib import Path

import msgspec

from hma_triton.config import ServerConfig
from hma_triton.errors import HmaError
from hma_triton.server.launch import EXIT_COPIES_LEFT, serve

EXIT_BAD_INPUT = 2


def main() -> int:
    """Exit status: 0 clean, 2 settings that cannot be served, 5 copies left behind."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = msgspec.json.decode(sys.argv[1], type=ServerConfig)
    try:
        return serve(config)
    except HmaError as error:
        print(f"hma-triton: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    finally:
        if os.getppid() != config.parent_pid:
            # nobody is left to remove the folder that was made for this server
            shutil.rmtree(Path(config.url.removeprefix("ipc://")).parent, ignore_errors=True)


if __name__ == "__main__":
    status = main()
    if status == EXIT_COPIES_LEFT:
        # a copy thread that is still busy must not hold the process
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
