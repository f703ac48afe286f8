"""Which process is that, does it share our kernel, is it still alive.

A pid alone is recycled and means nothing in another namespace; a `ProcessRef` cannot be mistaken.
"""

from __future__ import annotations

import functools
import os
import select
from pathlib import Path

from hma_triton.errors import ConfigError, ServerUnavailableError
from hma_triton.handles import ProcessRef


@functools.lru_cache(maxsize=8)
def _reference(pid: int) -> ProcessRef:
    return ProcessRef(
        pid=pid,
        start_ticks=start_ticks(pid),
        pid_namespace=_namespace_inode("pid"),
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        time_namespace=_namespace_inode("time"),
    )


def this_process() -> ProcessRef:
    """The calling process; right after a fork too."""
    return _reference(os.getpid())


def start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot.

    Raises:
        ServerUnavailableError: there is no such process.
    """
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise ServerUnavailableError(f"process {pid} is gone") from error
    # the second field is the name in parentheses and may hold anything
    return int(line.rpartition(")")[2].split()[19])


def _namespace_inode(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except FileNotFoundError:
        return 0


def check_same_kernel(peer: ProcessRef) -> None:
    """Raise unless `peer` shares this process's host, pid namespace and clock.

    Raises:
        ConfigError: it does not; names which of the three and what to do.
    """
    own = this_process()
    if peer.boot_id != own.boot_id:
        raise ConfigError(
            f"process {peer.pid} runs on another host (boot id {peer.boot_id}, here "
            f"{own.boot_id}): there is no path for the data; run one cache server per host"
        )
    if peer.pid_namespace != own.pid_namespace:
        raise ConfigError(
            f"process {peer.pid} lives in another process namespace ({peer.pid_namespace}, here "
            f"{own.pid_namespace}): its memory cannot be opened; run both in one pod or container "
            "with a shared process namespace (docker --pid, shareProcessNamespace)"
        )
    if peer.time_namespace != own.time_namespace:
        raise ConfigError(
            f"process {peer.pid} lives in another time namespace ({peer.time_namespace}, here "
            f"{own.time_namespace}): deadlines would mean nothing"
        )


class ProcessWatch:
    """Notices the end of a process at once, whatever its pid is reused for.

    `fileno()` becomes readable when the process ends, so it fits any poller.
    """

    def __init__(self, process: ProcessRef) -> None:
        """Raises: ServerUnavailableError when the process is gone already."""
        self.process = process
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            raise ServerUnavailableError(f"process {process.pid} is gone: {error}") from error
        try:
            same = start_ticks(process.pid) == process.start_ticks
        except ServerUnavailableError:
            self.close()
            raise
        if not same:
            self.close()
            raise ServerUnavailableError(
                f"process {process.pid} is gone; its pid belongs to another process now"
            )

    def fileno(self) -> int:
        """The pidfd."""
        return self._pidfd

    @property
    def alive(self) -> bool:
        """Whether the process still runs; a stopped one does."""
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return not poller.poll(0)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
