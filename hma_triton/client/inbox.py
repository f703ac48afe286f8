"""Work that all threads hand to one: none is lost when that one ends, none is put after a fork."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from hma_triton.errors import ServerUnavailableError

Work = Callable[[], object]


class Inbox:
    """`fileno` is readable while there is work. `name` is for messages."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = os.getpid()
        # re-entrant: a signal handler or a finaliser may put while the same thread does
        self._lock = threading.RLock()
        self._work: deque[Work] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._closed = False

    @property
    def is_foreign(self) -> bool:
        """Whether this is the copy that a forked child has: nobody takes from it there."""
        return os.getpid() != self._process

    def fileno(self) -> int:
        """A descriptor for pollers."""
        return self._wake

    def put(self, work: Work) -> None:
        """Hand over work, from any thread.

        Raises:
            ServerUnavailableError: closed, or made before this process was forked.
        """
        if self.is_foreign:
            raise ServerUnavailableError(
                f"{self._name} belongs to process {self._process}, which forked this one; "
                "make one in each process"
            )
        with self._lock:
            if self._closed:
                raise ServerUnavailableError(f"{self._name} is closed")
            self._work.append(work)
            os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Do all that was put; on the thread that owns the inbox."""
        os.eventfd_read(self._wake)
        while self._work:
            self._work.popleft()()

    def close(self) -> None:
        """Take nothing more, and do what was put before; on the owner's thread."""
        with self._lock:
            self._closed = True
            os.close(self._wake)
        while self._work:
            self._work.popleft()()
