"""What goes to LMCache's own operation instead of ours: said once per format and reason."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("hma_triton.integration.lmcache")


class FallthroughLog:
    """Logs each (format, reason) once, and counts every call that fell through."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}

    def note(self, format_name: str, reason: str) -> None:
        """One call of `format_name` goes to LMCache's own operation because of `reason`."""
        with self._lock:
            key = (format_name, reason)
            count = self._counts.get(key, 0)
            self._counts[key] = count + 1
        if count == 0:
            logger.warning("%s: LMCache's own operation serves it, because %s", format_name, reason)

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Calls that fell through, by (format, reason)."""
        with self._lock:
            return dict(self._counts)
