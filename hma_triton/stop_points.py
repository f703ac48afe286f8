"""Named places where a test can hold a process, to see what its peers make of that.

Nothing happens unless `HMA_TEST_STOP_AT` names the place. The first time it is reached, the process
writes a file of that name into `HMA_TEST_STOP_DIR` and stops itself with SIGSTOP; the test kills it
there, or lets it go on with SIGCONT.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

SERVER_POINTS = (
    "server.store.received",
    "server.store.reserved",
    "server.store.copying",
    "server.store.copied",
    "server.store.committed",
    "server.lookup.received",
    "server.lookup.pinned",
    "server.retrieve.received",
    "server.retrieve.held",
    "server.retrieve.copying",
    "server.retrieve.copied",
    "server.retrieve.ended",
)
CLIENT_POINTS = (
    "client.store.submitted",
    "client.store.sent",
    "client.store.answered",
    "client.lookup.submitted",
    "client.lookup.sent",
    "client.lookup.answered",
    "client.retrieve.submitted",
    "client.retrieve.sent",
    "client.retrieve.answered",
)
_armed: set[str] = set()


def arm() -> None:
    """Read the environment: at import, and again by a test's process that was forked."""
    _armed.clear()
    _armed.update(filter(None, os.environ.get("HMA_TEST_STOP_AT", "").split(",")))


def reach(name: str) -> None:
    """Stop here, once, if a test asked for it."""
    if name not in _armed:
        return
    _armed.discard(name)
    Path(os.environ["HMA_TEST_STOP_DIR"], name).touch()
    # to this thread, which then cannot take another step before the whole process stops
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


arm()
