"""Notices that a peer fills the socket's memory with a message that never ends.

A message arrives in parts, each of bounded size, and reaches the server when its last part has. How
many parts there are, nothing in ZeroMQ bounds; the process's own memory grows with them.
"""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_EVERY_NS = 500_000_000
_SETTLING_NS = 10_000_000_000


def private_bytes() -> int:
    """Memory of this process that is nobody else's: not the arena, not the pools."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class SocketGuard:
    """Compares private memory with what it was; `limit_bytes` is how much it may grow."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._allowed_bytes = private_bytes() + limit_bytes
        self._next_ns = 0
        self._settling_until_ns = 0

    def exceeded(self, now_ns: int, bookkeeping_bytes: int) -> bool:
        """Whether the memory beyond the bookkeeping has grown past the limit; looks twice a second.

        True once; the limit then counts from what is held when the connections are gone.
        """
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + _EVERY_NS
        held = private_bytes() - bookkeeping_bytes
        if now_ns < self._settling_until_ns:
            # what is let go after an alarm must not be room for the next flood
            self._allowed_bytes = min(self._allowed_bytes, held + self._limit_bytes)
        if held <= self._allowed_bytes:
            return False
        self._allowed_bytes = held + self._limit_bytes
        self._settling_until_ns = now_ns + _SETTLING_NS
        return True
