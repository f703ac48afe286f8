"""Buffers between no-access pages: one byte beyond either end is a crash, not a wrong answer.

On a CUDA device the same names give a pool in device memory and objects in pinned host memory,
between margins whose bytes are compared instead.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

PAGE_BYTES = mmap.PAGESIZE
MARGIN_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0

Bytes = npt.NDArray[np.uint8]


class GuardedBuffer:
    """`nbytes` of memory with a no-access page on both sides.

    Args:
        misalign: offset of the first byte from a page's start; with `at_end` only modulo 16.
        at_end: the last byte adjoins the upper guard as closely as `misalign` allows; else the
            first byte is `misalign` bytes above the lower guard.
    """

    def __init__(self, nbytes: int, misalign: int = 0, *, at_end: bool = False) -> None:
        inner = -(-(nbytes + misalign + 16) // PAGE_BYTES) * PAGE_BYTES
        self._length = inner + 2 * PAGE_BYTES
        self._base = _map(self._length)
        for guard in (self._base, self._base + PAGE_BYTES + inner):
            if _libc.mprotect(guard, PAGE_BYTES, _PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect of a guard page")
        first = self._base + PAGE_BYTES
        self.start = misalign
        if at_end:
            self.start = inner - nbytes
            self.start -= (self.start - misalign) % 16
        self.address = first + self.start
        self.nbytes = nbytes
        self._inner = _view(first, inner)

    @property
    def extent(self) -> int:
        """Bytes between the guards; the buffer is `start : start + nbytes` of them."""
        return self._inner.shape[0]

    @property
    def live(self) -> Bytes:
        """The buffer itself, as memory."""
        return self._inner[self.start : self.start + self.nbytes]

    def window(self, offset: int, nbytes: int) -> Bytes:
        """A copy of `nbytes` bytes from `offset` on."""
        return self.live[offset : offset + nbytes].copy()

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The buffer as a tensor that shares its memory."""
        return torch.from_numpy(self.live).view(dtype)

    def write(self, offset: int, content: Bytes) -> None:
        """Write `content` at `offset`."""
        self.live[offset : offset + content.shape[0]] = content

    def fill(self, everything: Bytes) -> None:
        """Write all bytes between the guards."""
        self._inner[:] = everything

    def snapshot(self) -> Bytes:
        """A copy of all bytes between the guards."""
        return self._inner.copy()

    def close(self) -> None:
        """Unmap everything; views into it must not be used again."""
        if self._base:
            _libc.munmap(self._base, self._length)
            self._base = 0


def _map(nbytes: int) -> int:
    """Private zero pages, none of them backed before it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if base is None or base == _MAP_FAILED:
        raise MemoryError(f"mmap of {nbytes} bytes: errno {ctypes.get_errno()}")
    return int(base)


def _view(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class DeviceBuffer:
    """The same surface on CUDA: a tensor on the device or pinned, between compared margins."""

    def __init__(self, nbytes: int, misalign: int, device: torch.device, *, pinned: bool) -> None:
        self.extent = 2 * MARGIN_BYTES + nbytes + misalign
        self._tensor = (
            torch.empty(self.extent, dtype=torch.uint8, pin_memory=True)
            if pinned
            else torch.empty(self.extent, dtype=torch.uint8, device=device)
        )
        self.start = MARGIN_BYTES + misalign
        self.address = self._tensor.data_ptr() + self.start
        self.nbytes = nbytes

    def window(self, offset: int, nbytes: int) -> Bytes:
        """A copy of `nbytes` bytes from `offset` on."""
        first = self.start + offset
        return self._tensor[first : first + nbytes].cpu().numpy().copy()

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """The buffer as a tensor that shares its memory."""
        return self._tensor[self.start : self.start + self.nbytes].view(dtype)

    def write(self, offset: int, content: Bytes) -> None:
        """Write `content` at `offset`."""
        first = self.start + offset
        self._tensor[first : first + content.shape[0]].copy_(torch.from_numpy(content))

    def fill(self, everything: Bytes) -> None:
        """Write the buffer and its margins."""
        self._tensor.copy_(torch.from_numpy(everything))

    def snapshot(self) -> Bytes:
        """A copy of the buffer and its margins."""
        return self._tensor.cpu().numpy().copy()

    def close(self) -> None:
        """Free the tensor."""
        del self._tensor


@dataclass
class Memory:
    """Makes buffers for one test and frees them after it."""

    device: torch.device
    _open: list[GuardedBuffer | DeviceBuffer] = field(default_factory=list)

    def buffer(
        self, nbytes: int, misalign: int = 0, *, at_end: bool = False, host: bool = False
    ) -> GuardedBuffer | DeviceBuffer:
        """A pool (`host=False`) or an object that the copy can reach."""
        made: GuardedBuffer | DeviceBuffer
        if self.device.type == "cpu":
            made = GuardedBuffer(nbytes, misalign, at_end=at_end)
        else:
            made = DeviceBuffer(nbytes, misalign, self.device, pinned=host)
        self._open.append(made)
        return made

    def close(self) -> None:
        """Free every buffer."""
        for buffer in self._open:
            buffer.close()
        self._open.clear()
