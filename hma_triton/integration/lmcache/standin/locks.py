"""A counted lock that opens by itself when nobody has taken it for a while."""

from __future__ import annotations

import threading
import time


class TTLLock:
    """Held while its count is above 0 and the last `lock()` is no older than `ttl_second`."""

    def __init__(self, ttl_second: int = 300) -> None:
        self._mutex = threading.Lock()
        self._ttl_seconds = ttl_second
        self._count = 0
        self._expires = 0.0

    def lock(self) -> None:
        """Count up and renew the time; after it ran out, start again at 1."""
        now = time.monotonic()
        with self._mutex:
            self._count = self._count + 1 if now < self._expires else 1
            self._expires = now + self._ttl_seconds

    def unlock(self) -> None:
        """Count down, not below 0."""
        with self._mutex:
            self._count = max(0, self._count - 1)

    def is_locked(self) -> bool:
        """Whether it is held."""
        with self._mutex:
            return self._count > 0 and time.monotonic() < self._expires

    def reset(self) -> None:
        """Back to the state of a new lock."""
        with self._mutex:
            self._count, self._expires = 0, 0.0
