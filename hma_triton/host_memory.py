"""The host arena's bytes: mapped and touched once at start, pinned once, never per request.

One shared mapping of one address range, in pieces of at most 64 GiB: a single registration of
512 GiB and more fails on drivers from R580 on (LMCache #5177). No single copy crosses a piece's
edge: executors split there. Without a GPU the same bytes are plain shared memory.
"""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hma_triton.cuda_driver import CudaCallError, CudaDriver
from hma_triton.errors import CapacityError, ConfigError
from hma_triton.units import align_up

Int64Array = npt.NDArray[np.int64]

PIECE_BYTES = 64 << 30
HUGEPAGES = ("off", "thp", "hugetlb")
_HUGE_BYTES = 2 << 20
_TOUCH_STEP_BYTES = 64 << 20
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_SHMEM_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGETLB_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the arena that is registered by itself."""

    offset_bytes: int
    nbytes: int


def split_pieces(nbytes: int, piece_bytes: int = PIECE_BYTES) -> tuple[Piece, ...]:
    """Pieces that cover `nbytes`; all but the last have `piece_bytes`.

    Raises:
        ConfigError: a size below one, or pieces that are no whole pages.
    """
    if nbytes < 1 or piece_bytes < mmap.PAGESIZE or piece_bytes % mmap.PAGESIZE:
        raise ConfigError(
            f"an arena of {nbytes} bytes in pieces of {piece_bytes} bytes: pieces are whole pages "
            f"of {mmap.PAGESIZE} bytes, and there is at least one byte"
        )
    return tuple(
        Piece(offset, min(piece_bytes, nbytes - offset)) for offset in range(0, nbytes, piece_bytes)
    )


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs of a kernel list such as `0-3,8`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_cpus(node: int) -> frozenset[int]:
    """CPUs of a NUMA node that this process may use; empty when the node is not known."""
    try:
        listed = parse_cpu_list((_NODES / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    return listed & frozenset(os.sched_getaffinity(0))


def device_numa_node(pci_bus_id: str) -> int | None:
    """NUMA node of a PCI device (`0000:17:00.0`), None when the kernel does not say."""
    try:
        node = int((_PCI / pci_bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def available_bytes() -> int:
    """Memory that can still be taken: what the kernel has, and what the control group leaves."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def _check_hugepages(hugepages: str, nbytes: int) -> None:
    if hugepages not in HUGEPAGES:
        raise ConfigError(f"hugepages {hugepages!r} is unknown; use one of {', '.join(HUGEPAGES)}")
    if hugepages == "thp":
        text = _SHMEM_THP.read_text() if _SHMEM_THP.exists() else "[never]"
        if "[never]" in text or "[deny]" in text:
            raise ConfigError(
                f"hugepages 'thp': {_SHMEM_THP} is {text.strip()!r}; set it to 'advise', "
                "or use 'hugetlb' or 'off'"
            )
    if hugepages == "hugetlb":
        free = int(_HUGETLB_FREE.read_text()) * _HUGE_BYTES if _HUGETLB_FREE.exists() else 0
        if free < nbytes:
            raise CapacityError(
                f"hugepages 'hugetlb': {nbytes} bytes wanted, {free} bytes of 2 MiB pages are "
                "free; raise vm.nr_hugepages, or use 'thp' or 'off'"
            )


class HostMemory:
    """One shared mapping, every page of it in memory. What lies in it is the object store's.

    Args:
        nbytes: rounded up to whole pages (2 MiB with hugepages).
        piece_bytes: longest piece that is registered at once.
        hugepages: `off`, `thp` (asked for, the kernel may refuse single pages) or `hugetlb`.
        numa_node: first touch comes from this node's CPUs, which places the pages there.
        touch_threads: threads that touch; None for one a CPU, 16 at most; 0 leaves it untouched.

    Raises:
        CapacityError: less memory than that is available; names both sizes.
        ConfigError: unknown hugepages or pieces, or hugepages that the kernel has switched off.
    """

    def __init__(
        self,
        nbytes: int,
        *,
        piece_bytes: int = PIECE_BYTES,
        hugepages: str = "off",
        numa_node: int | None = None,
        touch_threads: int | None = None,
    ) -> None:
        granule = mmap.PAGESIZE if hugepages == "off" else _HUGE_BYTES
        self.nbytes = align_up(max(nbytes, 1), granule)
        self.pieces = split_pieces(self.nbytes, piece_bytes)
        _check_hugepages(hugepages, self.nbytes)
        available = available_bytes()
        if hugepages != "hugetlb" and self.nbytes > available:
            raise CapacityError(
                f"an arena of {self.nbytes} bytes does not fit: {available} bytes of host memory "
                "are available; lower --host-gb"
            )
        self._map = _map_shared(self.nbytes, hugepages)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._closing = threading.Event()
        if touch_threads != 0:
            self.touch(numa_node, touch_threads)

    def touch(self, numa_node: int | None = None, threads: int | None = None) -> None:
        """Have every page in memory. Nothing is written, so objects that are there stay.

        A page that is there already also stays where it is, whatever node is asked for.
        """
        cpus = frozenset() if numa_node is None else node_cpus(numa_node)
        _touch(self._bytes, threads or min(16, os.cpu_count() or 1), cpus)

    def touch_in_background(self, numa_node: int | None = None) -> threading.Thread:
        """`touch` in one thread, piece by piece; `close` ends it early. Returns at once."""
        cpus = frozenset() if numa_node is None else node_cpus(numa_node)
        data = self._bytes

        def touch() -> None:
            for start in range(0, data.shape[0], _TOUCH_STEP_BYTES):
                if self._closing.is_set():
                    return
                _touch(data[start : start + _TOUCH_STEP_BYTES], 1, cpus)

        thread = threading.Thread(target=touch, name="hma-touch-arena", daemon=True)
        thread.start()
        return thread

    @property
    def buffer(self) -> memoryview:
        """All bytes, writable."""
        return memoryview(self._map)

    def close(self) -> None:
        """Let go of the mapping; it ends with the last view. Unpin first."""
        self._closing.set()
        del self._bytes
        self._map = mmap.mmap(-1, mmap.PAGESIZE)


def _map_shared(nbytes: int, hugepages: str) -> mmap.mmap:
    flags = os.MFD_CLOEXEC
    if hugepages == "hugetlb":
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        fd = os.memfd_create("hma-arena", flags)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, nbytes)
            mapping = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise CapacityError(f"an arena of {nbytes} bytes cannot be mapped: {error}") from error
    if hugepages == "thp":
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def _touch(data: npt.NDArray[np.uint8], threads: int, cpus: frozenset[int]) -> None:
    """Read one byte of every page, in `threads` threads bound to `cpus` (anywhere when empty).

    A page of shared memory is taken when it is first read, unlike one of private memory.
    """
    pages = -(-data.shape[0] // mmap.PAGESIZE)
    share = -(-pages // threads) * mmap.PAGESIZE

    def touch(start: int) -> None:
        if cpus:
            # pid 0 is the calling thread alone
            os.sched_setaffinity(0, cpus)
        data[start : start + share : mmap.PAGESIZE].max()

    workers = [
        threading.Thread(target=touch, args=(start,), name="hma-touch")
        for start in range(0, data.shape[0], share)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@dataclass(frozen=True, slots=True)
class DeviceView:
    """Where one device sees pinned host memory: three parallel arrays, ascending."""

    starts: Int64Array
    ends: Int64Array
    device_starts: Int64Array

    def piece_of(self, addresses: Int64Array) -> Int64Array:
        """Index of the piece of every host address `[n]`; -1 outside of all."""
        index = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = (index >= 0) & (addresses < self.ends[np.maximum(index, 0)])
        return np.where(inside, index, -1)

    def device_addresses(self, addresses: Int64Array, pieces: Int64Array) -> Int64Array:
        """Device addresses of host addresses `[n]` that lie in `pieces` `[n]` (none is -1)."""
        return addresses - self.starts[pieces] + self.device_starts[pieces]


class PinnedHost:
    """Registrations of a range's pieces, made once and undone by `close`.

    Args:
        address: where the range starts; `pieces` are relative to it.

    Raises:
        CapacityError: a piece that cannot be registered; the others are unregistered again.
    """

    def __init__(self, driver: CudaDriver, address: int, pieces: tuple[Piece, ...]) -> None:
        self._driver = driver
        self._address = address
        self.pieces = pieces
        self._registered: list[int] = []
        for index, piece in enumerate(pieces):
            start = address + piece.offset_bytes
            try:
                driver.register_host(start, piece.nbytes)
            except CudaCallError as error:
                self.close()
                raise CapacityError(
                    f"piece {index} of {len(pieces)} ({piece.nbytes} bytes of host memory) cannot "
                    f"be pinned: {error.name}; lower --host-gb, or raise the container's memory "
                    "and memlock limits"
                ) from error
            self._registered.append(start)

    def view(self, driver: CudaDriver) -> DeviceView:
        """The pieces as `driver`'s device sees them."""
        starts = np.array([self._address + p.offset_bytes for p in self.pieces], dtype=np.int64)
        sizes = np.array([p.nbytes for p in self.pieces], dtype=np.int64)
        if driver.device_info().host_pointers:
            return DeviceView(starts, starts + sizes, starts)
        mapped = np.array(
            [driver.host_device_address(start) for start in starts.tolist()], dtype=np.int64
        )
        return DeviceView(starts, starts + sizes, mapped)

    def close(self) -> None:
        """Unregister every piece. Idempotent."""
        while self._registered:
            self._driver.unregister_host(self._registered.pop())
