"""The one module that calls CUDA: typed functions over `cuda-bindings` 12.9 to 13.

Nothing else in the package touches `cuda.bindings`, so that a fake of this surface can stand in
for a device, and so that everything a device must do can be read in one place. On ROCm the same
two modules come from `hip-python-interop`; batched copies and IPC are then off (its signatures
differ).

Addresses, streams and events are plain ints. Every call first makes its device current on the
calling thread, since a thread that never did so has no context (driver calls answer "invalid
context"); it stays current there.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import torch

from hma_triton.errors import ConfigError, TransferError

IPC_HANDLE_BYTES = 64
# cudaMemcpyBatchAsync came with 12.8 (CUDA runtime API, "Memory Management")
_BATCH_SINCE = 12080
# The copy engine starts when the call returns, so a long batch is posted in pieces.
BATCH_ENTRIES = 1024


class CudaCallError(TransferError):
    """A CUDA call that failed; `name` is the runtime's own name of the error."""

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call} failed: {name}")
        self.name = name


class PointerKind(Enum):
    """What the driver knows about an address."""

    DEVICE = "device"
    PINNED = "pinned"
    PAGEABLE = "pageable"


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a device is. `host_pointers`: registered host memory keeps its address on the device."""

    index: int
    name: str
    uuid: str
    architecture: str
    multiprocessors: int
    pci_bus_id: str
    host_pointers: bool
    can_map_host: bool
    ipc_events: bool


class _Bytes:
    """Memory at an address, for numpy to read."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, True),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def has_bindings() -> bool:
    """Whether `cuda-bindings` (on ROCm: its stand-in) can be imported."""
    try:
        _load("runtime")
    except ConfigError:
        return False
    return True


def _load(name: str) -> Any:
    try:
        return importlib.import_module(f"cuda.bindings.{name}")
    except ImportError as error:
        raise ConfigError(
            f"cuda.bindings.{name} cannot be imported ({error}): GPU pools need the package "
            "cuda-bindings (pip install 'hma-triton[cuda]'; on ROCm: hip-python-interop)"
        ) from error


def _text(data: bytes) -> str:
    """A C string; the bindings give whole buffers, padded with blanks behind the end."""
    return data.split(b"\0")[0].decode()


class CudaDriver:
    """CUDA calls for one device.

    Args:
        device_index: the device's index in this process.

    Raises:
        ConfigError: no bindings, or no such device in this process.
    """

    def __init__(self, device_index: int = 0) -> None:
        self._rt = _load("runtime")
        self._cu = _load("driver")
        self.device_index = device_index
        self._uuids: dict[int, str] = {}
        self.is_rocm = torch.version.hip is not None
        count = self.device_count()
        if not 0 <= device_index < count:
            raise ConfigError(f"CUDA device {device_index} of {count} devices is not there")
        self.supports_batch = not self.is_rocm and self.driver_version() >= _BATCH_SINCE

    def _check(self, call: str, answer: Sequence[Any]) -> Any:
        """The values of an answer `(status, value...)`.

        Raises:
            CudaCallError: a status other than success.
        """
        status, *values = answer
        if int(status) != 0:
            self._rt.cudaGetLastError()
            raise CudaCallError(call, getattr(status, "name", str(status)))
        return values[0] if len(values) == 1 else tuple(values)

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` with this device current on this thread."""
        self._check("cudaSetDevice", self._rt.cudaSetDevice(self.device_index))
        return self._check(getattr(function, "__name__", str(function)), function(*args))

    # devices

    def device_count(self) -> int:
        """Devices that this process sees; 0 without a driver."""
        status, count = self._rt.cudaGetDeviceCount()
        return int(count) if int(status) == 0 else 0

    def driver_version(self) -> int:
        """Highest CUDA version the driver serves, as 1000 * major + 10 * minor; 0 without one."""
        return int(self._check("cudaDriverGetVersion", self._rt.cudaDriverGetVersion()))

    def _properties(self, index: int) -> Any:
        answer = self._rt.cudaGetDeviceProperties(index)
        return self._check("cudaGetDeviceProperties", answer)

    def _attribute(self, name: str, index: int) -> int:
        attribute = getattr(self._rt.cudaDeviceAttr, name)
        answer = self._rt.cudaDeviceGetAttribute(attribute, index)
        return int(self._check(f"cudaDeviceGetAttribute({name})", answer))

    def uuid_of(self, index: int) -> str:
        """`GPU-` and the UUID of device `index`, as nvidia-smi prints it."""
        if index not in self._uuids:
            found = uuid.UUID(bytes=bytes(self._properties(index).uuid.bytes))
            self._uuids[index] = f"GPU-{found}"
        return self._uuids[index]

    def index_of(self, device_uuid: str) -> int:
        """Index in this process of the device with that UUID.

        Raises:
            ConfigError: this process does not see it; names those it sees.
        """
        seen = [self.uuid_of(index) for index in range(self.device_count())]
        if device_uuid not in seen:
            raise ConfigError(
                f"device {device_uuid} is not among this process's devices {seen}; "
                "start the server with the same CUDA_VISIBLE_DEVICES as the engine, or with none"
            )
        return seen.index(device_uuid)

    def device_info(self) -> DeviceInfo:
        """What this device is and can do."""
        index, facts = self.device_index, self._properties(self.device_index)
        bus = self._check("cudaDeviceGetPCIBusId", self._rt.cudaDeviceGetPCIBusId(32, index))
        architecture = (
            facts.gcnArchName.decode().split(":")[0]
            if self.is_rocm
            else f"sm_{facts.major}{facts.minor}"
        )
        return DeviceInfo(
            index=index,
            name=_text(facts.name),
            uuid=self.uuid_of(index),
            architecture=architecture,
            multiprocessors=int(facts.multiProcessorCount),
            pci_bus_id=_text(bus).lower(),
            host_pointers=not self.is_rocm
            and bool(self._attribute("cudaDevAttrCanUseHostPointerForRegisteredMem", index)),
            can_map_host=bool(self._attribute("cudaDevAttrCanMapHostMemory", index)),
            ipc_events=not self.is_rocm
            and bool(self._attribute("cudaDevAttrIpcEventSupport", index)),
        )

    # memory

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` of device memory of this process."""
        return int(self._call(self._rt.cudaMalloc, nbytes))

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; waits for work on the device, which must not use it."""
        self._call(self._rt.cudaFree, address)

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin host memory, mapped into the device and usable by every context."""
        flags = self._rt.cudaHostRegisterMapped | self._rt.cudaHostRegisterPortable
        self._call(self._rt.cudaHostRegister, address, nbytes, flags)

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`."""
        self._call(self._rt.cudaHostUnregister, address)

    def host_device_address(self, address: int) -> int:
        """Where the device sees the registered host memory at `address`."""
        return int(self._call(self._rt.cudaHostGetDevicePointer, address, 0))

    def pointer(self, address: int) -> tuple[PointerKind, int]:
        """What lies at `address`, and the address the device uses for it (0 when pageable)."""
        try:
            facts = self._call(self._rt.cudaPointerGetAttributes, address)
        except CudaCallError:
            # ROCm answers "invalid value" for memory it does not know
            if not self.is_rocm:
                raise
            return PointerKind.PAGEABLE, 0
        kinds = self._rt.cudaMemoryType
        if facts.type in (kinds.cudaMemoryTypeDevice, kinds.cudaMemoryTypeManaged):
            return PointerKind.DEVICE, int(facts.devicePointer)
        if facts.type == kinds.cudaMemoryTypeHost and facts.devicePointer:
            return PointerKind.PINNED, int(facts.devicePointer)
        return PointerKind.PAGEABLE, 0

    # memory of other processes

    def _needs_ipc(self) -> None:
        if self.is_rocm:
            raise ConfigError(
                "sharing a pool between processes is not served on ROCm; "
                "use the library in the engine's own process"
            )

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Start and bytes of the device allocation that holds `address`."""
        base, nbytes = self._call(self._cu.cuMemGetAddressRange, address)
        return int(base), int(nbytes)

    def is_ipc_capable(self, address: int) -> bool:
        """Whether an IPC handle can name the allocation: false for memory from cuMemCreate."""
        self._needs_ipc()
        attribute = self._cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        return bool(self._call(self._cu.cuPointerGetAttribute, attribute, address))

    def ipc_memory_handle(self, address: int) -> bytes:
        """The 64 bytes that name the allocation at `address` to another process."""
        self._needs_ipc()
        handle = self._call(self._rt.cudaIpcGetMemHandle, address)
        return np.asarray(_Bytes(handle.getPtr(), IPC_HANDLE_BYTES)).tobytes()

    def open_ipc_memory(self, handle: bytes) -> int:
        """Map another process's allocation; the address of its first byte here."""
        self._needs_ipc()
        data = np.frombuffer(handle, dtype=np.uint8).copy()
        opaque = self._rt.cudaIpcMemHandle_t(data.ctypes.data)
        flags = self._rt.cudaIpcMemLazyEnablePeerAccess
        return int(self._call(self._rt.cudaIpcOpenMemHandle, opaque, flags))

    def close_ipc_memory(self, address: int) -> None:
        """Unmap what `open_ipc_memory` mapped."""
        self._call(self._rt.cudaIpcCloseMemHandle, address)

    # streams and events

    def create_stream(self) -> int:
        """A stream of the lowest priority that never waits for the default stream."""
        lowest, _ = self._call(self._rt.cudaDeviceGetStreamPriorityRange)
        flags = self._rt.cudaStreamNonBlocking
        return int(self._call(self._rt.cudaStreamCreateWithPriority, flags, lowest))

    def destroy_stream(self, stream: int) -> None:
        """Release a stream; work on it is finished first, by the driver."""
        self._call(self._rt.cudaStreamDestroy, stream)

    def create_event(self, interprocess: bool = False) -> int:
        """An event without timing."""
        flags = self._rt.cudaEventDisableTiming
        if interprocess:
            self._needs_ipc()
            flags |= self._rt.cudaEventInterprocess
        return int(self._call(self._rt.cudaEventCreateWithFlags, flags))

    def destroy_event(self, event: int) -> None:
        """Release an event; a pending one is released when it has fired."""
        self._call(self._rt.cudaEventDestroy, event)

    def record_event(self, event: int, stream: int) -> None:
        """The event fires when the work now on `stream` is done."""
        self._call(self._rt.cudaEventRecord, event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """Later work on `stream` waits for `event`; the host does not."""
        self._call(self._rt.cudaStreamWaitEvent, stream, event, 0)

    def query_event(self, event: int) -> bool:
        """Whether the event has fired."""
        try:
            self._call(self._rt.cudaEventQuery, event)
        except CudaCallError as error:
            if error.name == "cudaErrorNotReady":
                return False
            raise
        return True

    def ipc_event_handle(self, event: int) -> bytes:
        """The 64 bytes that name an interprocess event to another process."""
        self._needs_ipc()
        handle = self._call(self._rt.cudaIpcGetEventHandle, event)
        return np.asarray(_Bytes(handle.getPtr(), IPC_HANDLE_BYTES)).tobytes()

    def open_ipc_event(self, handle: bytes) -> int:
        """Another process's event, as an event of this one."""
        self._needs_ipc()
        data = np.frombuffer(handle, dtype=np.uint8).copy()
        opaque = self._rt.cudaIpcEventHandle_t(data.ctypes.data)
        return int(self._call(self._rt.cudaIpcOpenEventHandle, opaque))

    # copies

    def copy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """One copy in stream order; host or device on either side."""
        kind = self._rt.cudaMemcpyKind.cudaMemcpyDefault
        self._call(self._rt.cudaMemcpyAsync, target, source, nbytes, kind, stream)

    def copy_batch_async(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Copies in no order among themselves, as a whole in stream order.

        One driver call per `BATCH_ENTRIES` copies where the driver has it, else one per copy.
        """
        if not self.supports_batch:
            for target, source, nbytes in zip(targets, sources, sizes, strict=True):
                self.copy_async(target, source, nbytes, stream)
            return
        attributes = self._rt.cudaMemcpyAttributes()
        attributes.srcAccessOrder = self._rt.cudaMemcpySrcAccessOrder.cudaMemcpySrcAccessOrderStream
        for start in range(0, len(sizes), BATCH_ENTRIES):
            piece = slice(start, start + BATCH_ENTRIES)
            self._call(
                self._rt.cudaMemcpyBatchAsync,
                list(targets[piece]),
                list(sources[piece]),
                list(sizes[piece]),
                len(sizes[piece]),
                [attributes],
                [0],
                1,
                stream,
            )


@cache
def shared_driver(device_index: int) -> CudaDriver:
    """The process's driver of a device; asking for a device's facts takes a while each time.

    Raises:
        ConfigError: as `CudaDriver`.
    """
    return CudaDriver(device_index)
