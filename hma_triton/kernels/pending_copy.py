"""A transfer on a device that was enqueued, and how each of its jobs was done."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hma_triton.cuda_driver import CudaDriver
from hma_triton.errors import TransferError
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.paths import Path

_POLL_SECONDS = 0.00005
_EAGER_POLLS = 20


@dataclass(frozen=True, slots=True)
class PathReport:
    """What was done for one job. `entries`: launches (zero copy) or copies posted."""

    kernel_group_index: int
    direction: Direction
    path: Path
    reason: str
    nbytes: int
    entries: int


class PendingCopy:
    """A transfer that was enqueued. Its event is released when it was seen to have fired."""

    def __init__(self, driver: CudaDriver, event: int, reports: tuple[PathReport, ...]) -> None:
        self._driver = driver
        self._event: int | None = event
        self.reports = reports

    @property
    def backend(self) -> str:
        """The paths taken, as `device:dma+zero_copy`."""
        paths = sorted({report.path.value for report in self.reports})
        return f"device:{'+'.join(paths) or 'nothing'}"

    def query(self) -> bool:
        """Whether every byte has moved."""
        if self._event is not None and self._driver.query_event(self._event):
            self._driver.destroy_event(self._event)
            self._event = None
        return self._event is None

    def wait_on(self, stream: int) -> None:
        """Later work on `stream` waits for this transfer; the host does not."""
        if self._event is not None:
            self._driver.wait_event(stream, self._event)

    def synchronize(self, deadline_ns: int | None = None) -> None:
        """Wait on the host, by asking: no thread is ever stuck inside the driver.

        Raises:
            TransferError: `deadline_ns` (CLOCK_MONOTONIC) came first; the copy goes on.
        """
        polls = 0
        while not self.query():
            if deadline_ns is not None and time.monotonic_ns() > deadline_ns:
                raise TransferError("the copy did not end before the deadline")
            polls += 1
            time.sleep(0 if polls < _EAGER_POLLS else _POLL_SECONDS)

    def close(self) -> None:
        """Let go of the event; the copy goes on, and who waits for it already still does."""
        if self._event is not None:
            self._driver.destroy_event(self._event)
            self._event = None
