"""One thread per process that wakes registered file descriptors at an interval."""

from __future__ import annotations

import contextlib
import os
import threading


class PeriodicEventNotifier:
    """Made with `create`, one per process; sleeps while no descriptor is registered."""

    _create_lock = threading.Lock()
    _instance: PeriodicEventNotifier | None = None

    def __init__(self, interval_ms: int, use_eventfd: bool) -> None:
        self._word = (1).to_bytes(8 if use_eventfd else 1, "little")
        self._interval_ms = max(1, interval_ms)
        self._descriptors: set[int] = set()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="lmcache-notifier", daemon=True)
        self._thread.start()

    @classmethod
    def create(cls, interval_ms: int, use_eventfd: bool) -> None:
        """Make the process's notifier; does nothing where there is one.

        Args:
            use_eventfd: write 8 bytes as an eventfd wants, instead of 1 as a pipe does.
        """
        with cls._create_lock:
            if cls._instance is None:
                cls._instance = cls(interval_ms, use_eventfd)

    @classmethod
    def get(cls) -> PeriodicEventNotifier | None:
        """The process's notifier, None where there is none."""
        return cls._instance

    @classmethod
    def shutdown(cls) -> None:
        """End its thread; does nothing where there is none."""
        with cls._create_lock:
            notifier, cls._instance = cls._instance, None
        if notifier is not None:
            notifier._stop()

    def register_fd(self, fd: int) -> None:
        """Wake `fd` from now on: an eventfd, or the writing end of a pipe."""
        with self._changed:
            self._descriptors.add(fd)
            self._changed.notify_all()

    def unregister_fd(self, fd: int) -> None:
        """Leave `fd` alone from now on."""
        with self._changed:
            self._descriptors.discard(fd)

    def set_interval_ms(self, interval_ms: int) -> None:
        """Change the interval, at least 1 ms."""
        with self._changed:
            self._interval_ms = max(1, interval_ms)

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._descriptors)
                if self._stopped:
                    return
                descriptors = list(self._descriptors)
            for descriptor in descriptors:
                # full, or closed by its owner: nothing to wake
                with contextlib.suppress(OSError):
                    os.write(descriptor, self._word)
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, self._interval_ms / 1000)
