"""Keeps a server that is away or slow from slowing the engine: stores are skipped meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

SLOW_IN_A_ROW = 3
"""Stores that succeed but take too long, one after the other, before the breaker opens."""


class StoreBreaker:
    """Closed: stores go out. Open: they are skipped, until a probe from a thread succeeds.

    Args:
        probe: true when the server answers again; called outside the engine's steps.
        wait_s: the time between probes.
    """

    def __init__(self, probe: Callable[[], bool], wait_s: float) -> None:
        self._probe = probe
        self._wait_s = wait_s
        self._slow = 0
        self._lock = threading.Lock()
        self._is_open = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether stores are to be skipped."""
        return self._is_open

    def succeeded(self, *, slow: bool) -> bool:
        """A store was committed. True when that opened the breaker, because it was `slow` again."""
        self._slow = self._slow + 1 if slow else 0
        return self._slow >= SLOW_IN_A_ROW and self.failed()

    def failed(self) -> bool:
        """A store was not answered in time, or there is no server. True when that opened it."""
        with self._lock:
            self._slow = 0
            if self._is_open or self._ended.is_set():
                return False
            self._is_open = True
            self._thread = threading.Thread(target=self._watch, name="hma-breaker", daemon=True)
            self._thread.start()
            return True

    def close(self) -> None:
        """End the probing thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._wait_s)

    def _watch(self) -> None:
        while not self._ended.wait(self._wait_s):
            if self._probe():
                with self._lock:
                    self._is_open = False
                return
