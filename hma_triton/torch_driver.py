"""`CudaDriver` by what torch itself offers, for machines without `cuda-bindings`.

One process only: no IPC, no batch call, and every copy costs two tensors. It exists so that what a
device does to bytes can be checked and measured with torch alone (`bench gpu`), and so that the
library works in the engine's own process there. A server needs the bindings.
"""

from __future__ import annotations

import ctypes
from itertools import count
from typing import Any

import torch

from hma_triton.cuda_driver import (
    CudaCallError,
    CudaDriver,
    DeviceInfo,
    PointerKind,
    has_bindings,
)
from hma_triton.errors import ConfigError
from hma_triton.tensor_ipc_cuda import device_bytes

# cudaHostRegisterPortable and cudaHostRegisterMapped
_REGISTER_FLAGS = 3


def open_driver(device_index: int = 0) -> CudaDriver:
    """CUDA calls for one device, through the bindings where they are, else through torch.

    Raises:
        ConfigError: no such device; ROCm without its bindings.
    """
    return CudaDriver(device_index) if has_bindings() else TorchDriver(device_index)


class TorchDriver(CudaDriver):
    """See `CudaDriver`, method by method; what torch cannot do raises `ConfigError`.

    Streams are handles from torch's pools, which live as long as the process. Events are numbers.
    """

    def __init__(self, device_index: int = 0) -> None:
        self.device_index = device_index
        self.is_rocm = False
        self.supports_batch = False
        self._uuids: dict[int, str] = {}
        devices = self.device_count()
        if torch.version.cuda is None or not 0 <= device_index < devices:
            raise ConfigError(
                f"CUDA device {device_index} of {devices} devices is not there (torch "
                f"{torch.__version__} without cuda-bindings; ROCm needs hip-python-interop)"
            )
        self._device = torch.device("cuda", device_index)
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._events: dict[int, torch.cuda.Event] = {}
        self._buffers: dict[int, torch.Tensor] = {}
        self._names = count(1)

    def _needs_ipc(self) -> None:
        raise ConfigError(
            "sharing a pool between processes needs the package cuda-bindings "
            "(pip install 'hma-triton[cuda]')"
        )

    def device_count(self) -> int:
        """Devices that torch sees."""
        return torch.cuda.device_count()

    def driver_version(self) -> int:
        """The version that torch was built for: the driver serves that one at least."""
        major, minor = str(torch.version.cuda).split(".")[:2]
        return 1000 * int(major) + 10 * int(minor)

    def uuid_of(self, index: int) -> str:
        """As `CudaDriver.uuid_of`."""
        return f"GPU-{torch.cuda.get_device_properties(index).uuid}"

    def device_info(self) -> DeviceInfo:
        """As far as torch says; the PCI address is empty where it does not."""
        facts: Any = torch.cuda.get_device_properties(self._device)
        bus = ""
        if hasattr(facts, "pci_bus_id"):
            bus = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        return DeviceInfo(
            index=self.device_index,
            name=facts.name,
            uuid=self.uuid_of(self.device_index),
            architecture=f"sm_{facts.major}{facts.minor}",
            multiprocessors=int(facts.multi_processor_count),
            pci_bus_id=bus,
            host_pointers=True,
            can_map_host=True,
            ipc_events=False,
        )

    def allocate(self, nbytes: int) -> int:
        """As `CudaDriver.allocate`, from torch's cache."""
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise CudaCallError("torch.empty", "cudaErrorMemoryAllocation") from error
        # work queued on this stream may still use what the cache gives
        torch.cuda.current_stream(self._device).synchronize()
        self._buffers[buffer.data_ptr()] = buffer
        return buffer.data_ptr()

    def free(self, address: int) -> None:
        """As `CudaDriver.free`, to torch's cache; nothing may be pending."""
        del self._buffers[address]

    def register_host(self, address: int, nbytes: int) -> None:
        """As `CudaDriver.register_host`."""
        with torch.cuda.device(self._device):
            status = self._runtime.cudaHostRegister(address, nbytes, _REGISTER_FLAGS)
        if int(status) != 0:
            raise CudaCallError("cudaHostRegister", str(status))

    def unregister_host(self, address: int) -> None:
        """As `CudaDriver.unregister_host`."""
        with torch.cuda.device(self._device):
            status = self._runtime.cudaHostUnregister(address)
        if int(status) != 0:
            raise CudaCallError("cudaHostUnregister", str(status))

    def host_device_address(self, address: int) -> int:
        """`address` itself, as on every CUDA machine that torch serves."""
        return address

    def pointer(self, address: int) -> tuple[PointerKind, int]:
        """As `CudaDriver.pointer`."""
        if _host_bytes(address, 1).is_pinned():
            return PointerKind.PINNED, address
        try:
            device_bytes(address, 1, self.device_index)
        except RuntimeError:
            # torch asked the driver, which does not know the address
            return PointerKind.PAGEABLE, 0
        return PointerKind.DEVICE, address

    def allocation_of(self, address: int) -> tuple[int, int]:
        """The one byte that was asked about: torch does not say more."""
        return address, 1

    def close_ipc_memory(self, address: int) -> None:
        """Not there, as opening is not."""
        self._needs_ipc()

    def create_stream(self) -> int:
        """As `CudaDriver.create_stream`; after 32 of them torch gives old ones again."""
        stream = torch.cuda.Stream(self._device, priority=0)  # type: ignore[no-untyped-call]
        return int(stream.cuda_stream)

    def destroy_stream(self, stream: int) -> None:
        """Nothing to do: the stream is torch's."""

    def create_event(self, interprocess: bool = False) -> int:
        """As `CudaDriver.create_event`; a number, not a handle."""
        if interprocess:
            self._needs_ipc()
        name = next(self._names)
        self._events[name] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return name

    def destroy_event(self, event: int) -> None:
        """As `CudaDriver.destroy_event`."""
        del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        """As `CudaDriver.record_event`."""
        self._events[event].record(self._stream(stream))

    def wait_event(self, stream: int, event: int) -> None:
        """As `CudaDriver.wait_event`."""
        self._stream(stream).wait_event(self._events[event])

    def query_event(self, event: int) -> bool:
        """As `CudaDriver.query_event`."""
        return bool(self._events[event].query())  # type: ignore[no-untyped-call]

    def copy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """As `CudaDriver.copy_async`."""
        with torch.cuda.stream(self._stream(stream)):
            self._bytes(target, nbytes).copy_(self._bytes(source, nbytes), non_blocking=True)

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        if self.pointer(address)[0] is PointerKind.DEVICE:
            return device_bytes(address, nbytes, self.device_index)
        return _host_bytes(address, nbytes)

    def _stream(self, handle: int) -> torch.cuda.Stream:
        if handle == 0:
            # torch reads 0 as a wish for a stream from its pool
            return torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]


def _host_bytes(address: int, nbytes: int) -> torch.Tensor:
    """Bytes at a host address; nothing is read until the tensor is."""
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
