"""CUDA pools and events between processes: typed handles, one for each storage.

An IPC handle names a whole allocation; the storage is a part of it. Devices are matched by UUID:
the same GPU has another index in a process with another `CUDA_VISIBLE_DEVICES`. Use in one process
needs none of this.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import torch

from hma_triton.cuda_driver import IPC_HANDLE_BYTES, CudaCallError, CudaDriver, shared_driver
from hma_triton.errors import ConfigError, ProtocolError, TransferError, UnsupportedLayoutError
from hma_triton.handles import CudaEventHandle, CudaIpcHandle, ProcessRef
from hma_triton.process_identity import this_process

DriverOf = Callable[[int], CudaDriver]
Wrap = Callable[[int, int, int], torch.Tensor]

_POLL_SECONDS = 0.0002


class _DeviceBytes:
    """Device memory at an address, for torch to look at."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "strides": None,
            "version": 2,
        }


def device_bytes(address: int, nbytes: int, device_index: int) -> torch.Tensor:
    """A uint8 tensor `[nbytes]` over device memory; the caller keeps that memory alive.

    Raises:
        TransferError: torch made a copy instead of a view.
    """
    device = torch.device("cuda", device_index)
    tensor = torch.as_tensor(_DeviceBytes(address, nbytes), device=device)
    if tensor.data_ptr() != address:
        raise TransferError(
            f"torch copied the {nbytes} bytes at {address:#x} of {device} instead of viewing them"
        )
    return tensor


def export_storage(
    storage: torch.UntypedStorage, owner: ProcessRef, driver: CudaDriver
) -> CudaIpcHandle:
    """Name a CUDA storage to another process. Nothing is kept, so nothing is left when it fails.

    Raises:
        UnsupportedLayoutError: an empty storage, or memory that an IPC handle cannot name.
    """
    address, nbytes = storage.data_ptr(), storage.nbytes()
    if nbytes == 0:
        raise UnsupportedLayoutError("an empty storage cannot be shared")
    if not driver.is_ipc_capable(address):
        raise UnsupportedLayoutError(
            f"the storage of {nbytes} bytes on {storage.device} comes from virtual memory "
            "management (cuMemCreate: PYTORCH_CUDA_ALLOC_CONF=expandable_segments, vLLM's sleep "
            "mode) or from a stream-ordered pool (cudaMallocAsync), which CUDA IPC handles cannot "
            "name; switch that off, or move the KV in the engine's own process"
        )
    base, extent = driver.allocation_of(address)
    if not base <= address <= address + nbytes <= base + extent:
        raise UnsupportedLayoutError(
            f"the storage of {nbytes} bytes at {address:#x} is not inside one CUDA allocation "
            f"({extent} bytes at {base:#x}); switch expandable segments off"
        )
    return CudaIpcHandle(
        owner=owner,
        device_uuid=driver.uuid_of(driver.device_index),
        handle=driver.ipc_memory_handle(address),
        offset_bytes=address - base,
        nbytes=nbytes,
    )


def export_event(event: int, owner: ProcessRef, driver: CudaDriver) -> CudaEventHandle:
    """Name a recorded interprocess event (`torch.cuda.Event(interprocess=True).cuda_event`)."""
    return CudaEventHandle(
        owner=owner,
        device_uuid=driver.uuid_of(driver.device_index),
        handle=driver.ipc_event_handle(event),
    )


def _check_handle(handle: CudaIpcHandle | CudaEventHandle, me: ProcessRef) -> None:
    if len(handle.handle) != IPC_HANDLE_BYTES:
        raise ProtocolError(
            f"a CUDA IPC handle has {IPC_HANDLE_BYTES} bytes, {len(handle.handle)} came"
        )
    if handle.owner == me:
        raise ConfigError(
            "a CUDA IPC handle cannot be opened in the process that made it; register the caches "
            "with TransferEngine directly"
        )


class CudaStorages:
    """The CUDA storages of one registration, mapped here; `close` when no copy uses them any more.

    Args:
        me: this process.
        driver_of: the driver of a device index; called with 0 to find devices.
        wrap: makes a tensor of (address, nbytes, device index).
    """

    def __init__(
        self, me: ProcessRef, driver_of: DriverOf = shared_driver, wrap: Wrap = device_bytes
    ) -> None:
        self._me = me
        self._driver_of = driver_of
        self._wrap = wrap
        self._open: dict[tuple[str, bytes], tuple[CudaDriver, int]] = {}

    def open(self, handle: CudaIpcHandle) -> torch.Tensor:
        """The storage's bytes, uint8 `[nbytes]`; storages of one allocation share its mapping.

        Raises:
            ProtocolError: a handle of another size, or a storage that leaves its allocation.
            ConfigError: the device is not visible here, or the handle is this process's own.
            TransferError: the driver refuses; nothing stays mapped by this call.
        """
        _check_handle(handle, self._me)
        key = (handle.device_uuid, handle.handle)
        fresh = key not in self._open
        if fresh:
            driver = self._driver_of(self._driver_of(0).index_of(handle.device_uuid))
            try:
                self._open[key] = (driver, driver.open_ipc_memory(handle.handle))
            except CudaCallError as error:
                raise TransferError(
                    f"the pool on {handle.device_uuid} cannot be mapped: {error.name}; engine and "
                    "server need one IPC namespace (docker run --ipc=host) and see the same devices"
                ) from error
        driver, base = self._open[key]
        try:
            _, extent = driver.allocation_of(base)
            if handle.offset_bytes + handle.nbytes > extent or handle.nbytes == 0:
                raise ProtocolError(
                    f"a storage of {handle.nbytes} bytes at {handle.offset_bytes} of an allocation "
                    f"of {extent} bytes"
                )
            return self._wrap(base + handle.offset_bytes, handle.nbytes, driver.device_index)
        except (ProtocolError, TransferError):
            if fresh:
                driver.close_ipc_memory(self._open.pop(key)[1])
            raise

    @property
    def num_mappings(self) -> int:
        """Allocations mapped now."""
        return len(self._open)

    def close(self) -> None:
        """Unmap everything. Idempotent; a driver's refusal does not keep the rest mapped.

        Raises:
            TransferError: the first refusal.
        """
        first: CudaCallError | None = None
        while self._open:
            driver, address = self._open.popitem()[1]
            try:
                driver.close_ipc_memory(address)
            except CudaCallError as error:
                first = first or error
        if first is not None:
            raise first


class ImportedEvent:
    """Another process's event; satisfies `engine.WaitEvent`, on the host or on a stream.

    Raises:
        ProtocolError, ConfigError: as `CudaStorages.open`.
    """

    def __init__(
        self, handle: CudaEventHandle, me: ProcessRef, driver_of: DriverOf = shared_driver
    ) -> None:
        _check_handle(handle, me)
        self._driver = driver_of(driver_of(0).index_of(handle.device_uuid))
        self._event: int | None = self._driver.open_ipc_event(handle.handle)
        self._release = weakref.finalize(self, self._driver.destroy_event, self._event)
        # at the end of the process the driver goes first
        self._release.atexit = False

    def _live(self) -> int:
        if self._event is None:
            raise TransferError("the imported event was closed")
        return self._event

    def query(self) -> bool:
        """Whether the producer's work has ended."""
        return self._driver.query_event(self._live())

    def wait_on(self, stream: int) -> None:
        """Later work on `stream` waits for the producer; the host does not."""
        self._driver.wait_event(stream, self._live())

    def synchronize(self, deadline_ns: int | None = None) -> None:
        """Wait on the host, by asking, so that no thread is ever stuck inside the driver.

        Raises:
            TransferError: `deadline_ns` (CLOCK_MONOTONIC) came first.
        """
        while not self.query():
            if deadline_ns is not None and time.monotonic_ns() > deadline_ns:
                raise TransferError("the producer's work did not end before the deadline")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Release the event; so does dropping this object. Idempotent."""
        self._event = None
        self._release()


class StepEvents:
    """The engine's side: events that mark the end of a step's work, used again in turn.

    An event that is recorded again means the later work, so a reader of an old handle waits too
    long at worst. Not for ROCm, whose pools are not shared.

    Args:
        count: events; more than there are steps with copies in flight.
    """

    def __init__(self, device: torch.device, driver: CudaDriver, count: int = 64) -> None:
        self._device = device
        self._driver = driver
        self._owner = this_process()
        self._events = [driver.create_event(interprocess=True) for _ in range(count)]
        self._handles = [export_event(event, self._owner, driver) for event in self._events]
        self._turn = 0

    def mark(self) -> CudaEventHandle:
        """A handle for the work now on the current stream."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._events)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._driver.record_event(self._events[turn], stream)
        return self._handles[turn]

    def close(self) -> None:
        """Release the events. Idempotent."""
        while self._events:
            self._driver.destroy_event(self._events.pop())
