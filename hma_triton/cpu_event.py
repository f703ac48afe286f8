"""An event between processes for CPU pools: a word of shared memory that only grows.

The producer takes a handle when it submits work and fires when the work has ended; a consumer that
imports the handle early sees it pending. `fire` is ordered after the producer's earlier writes by
the interpreter lock of the producer and the strong order of the store on the machines we serve.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time

from hma_triton.errors import ProtocolError, TransferError
from hma_triton.handles import CpuEventHandle, ShmHandle
from hma_triton.process_identity import this_process
from hma_triton.tensor_ipc import map_segment

_POLL_SECONDS = 0.0002
_WORD_BYTES = 8


class CpuEvent:
    """The producer's side. One word, reused for any number of rounds."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("hma-event", os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._word = ctypes.c_uint64.from_buffer(mmap.mmap(self._fd, mmap.PAGESIZE))
        self._submitted = 0
        info = os.fstat(self._fd)
        self._segment = ShmHandle(
            owner=this_process(),
            fd=self._fd,
            nbytes=mmap.PAGESIZE,
            device=info.st_dev,
            inode=info.st_ino,
        )

    def record(self) -> CpuEventHandle:
        """A handle for work that has been submitted and not yet ended."""
        self._submitted += 1
        return CpuEventHandle(segment=self._segment, offset_bytes=0, value=self._submitted)

    def fire(self) -> None:
        """All work recorded so far has ended."""
        self._word.value = self._submitted

    def close(self) -> None:
        """Drop the segment; consumers that mapped it keep it. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ImportedCpuEvent:
    """The consumer's side."""

    def __init__(self, handle: CpuEventHandle) -> None:
        """Raises: ProtocolError for a word outside its segment, and as `map_segment` does."""
        if handle.offset_bytes % _WORD_BYTES or (
            handle.offset_bytes + _WORD_BYTES > handle.segment.nbytes
        ):
            raise ProtocolError(
                f"event word at byte {handle.offset_bytes} of a segment of "
                f"{handle.segment.nbytes} bytes"
            )
        self._word = ctypes.c_uint64.from_buffer(map_segment(handle.segment), handle.offset_bytes)
        self._value = handle.value

    def query(self) -> bool:
        """Whether the producer's work has ended."""
        return self._word.value >= self._value

    def synchronize(self, deadline_ns: int | None = None) -> None:
        """Wait for the producer's work.

        Raises:
            TransferError: `deadline_ns` (CLOCK_MONOTONIC) came first.
        """
        while not self.query():
            if deadline_ns is not None and time.monotonic_ns() > deadline_ns:
                raise TransferError("the producer's work did not end before the deadline")
            time.sleep(_POLL_SECONDS)
