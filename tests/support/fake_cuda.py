"""A stand-in for `cuda_driver.CudaDriver`: the same surface, used for order and lifetime only.

Streams are queues. Work runs only when somebody asks for an event, in a random order that respects
nothing but the order in a stream and the events that streams wait for: an order that the code under
test forgot to ask for shows as wrong bytes. Every call is recorded in `FakeGpu.calls`.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hma_triton.cuda_driver import CudaCallError, DeviceInfo, PointerKind
from hma_triton.errors import ConfigError
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.reference import ReferenceCopier

# Where device addresses of mapped host memory differ (ROCm): by this, times one more for each
# registration, so that neighbours on the host are no neighbours on the device.
MAPPED_OFFSET = 1 << 50


@dataclass
class _Event:
    recorded: int = 0
    fired: int = 0
    destroyed: bool = False


@dataclass
class FakeGpu:
    """The machine: devices, memory, streams and events, shared by all drivers of a test.

    Args:
        host_pointers: registered memory keeps its address on the device (CUDA; not ROCm).
        vmm: addresses of allocations that IPC cannot name.
        refuse_register_after: registrations that succeed before one fails.
    """

    uuids: tuple[str, ...] = ("GPU-00000000-0000-0000-0000-000000000001",)
    seed: int = 0
    host_pointers: bool = True
    supports_batch: bool = True
    architecture: str = "sm_90"
    vmm: set[int] = field(default_factory=set)
    refuse_register_after: int | None = None
    refuse_open: str | None = None
    refuse_allocate: bool = False
    own: dict[int, object] = field(default_factory=dict)
    calls: list[tuple[object, ...]] = field(default_factory=list)
    threads: list[tuple[int, int]] = field(default_factory=list)
    allocations: dict[int, int] = field(default_factory=dict)
    pinned: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, int] = field(default_factory=dict)
    streams: dict[int, deque[Callable[[], bool]]] = field(default_factory=dict)
    events: dict[int, _Event] = field(default_factory=dict)
    aliases: dict[int, int] = field(default_factory=dict)
    _next: int = 1000

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def new_id(self) -> int:
        self._next += 1
        return self._next

    def names(self) -> list[str]:
        return [str(call[0]) for call in self.calls]

    def enqueue(self, stream: int, action: Callable[[], None]) -> None:
        """Put work on a stream."""

        def run() -> bool:
            action()
            return True

        self.streams[stream].append(run)

    def enqueue_wait(self, stream: int, event: _Event) -> None:
        ticket = event.recorded
        self.streams[stream].append(lambda: event.fired >= ticket)

    def step(self) -> bool:
        """Run one piece of work of some stream that can go on; False when none can."""
        names = [name for name, queue in self.streams.items() if queue]
        self.random.shuffle(names)
        for name in names:
            if self.streams[name][0]():
                self.streams[name].popleft()
                return True
        return False

    def drain(self) -> None:
        while self.step():
            pass

    def pending_event(self) -> int:
        """An event of another process whose work has not ended."""
        event = self.new_id()
        self.events[event] = _Event(recorded=1)
        return event

    def fire(self, event: int) -> None:
        self.events[event].fired = self.events[event].recorded

    def live_event(self, event: int) -> _Event:
        found = self.events[event]
        assert not found.destroyed, f"event {event} is used after it was destroyed"
        return found

    def leaks(self) -> list[str]:
        """What a test that is over must not hold."""
        live = [f"event {name}" for name, event in self.events.items() if not event.destroyed]
        live += [f"stream {name}" for name in self.streams]
        live += [f"pinned {address:#x}" for address in self.pinned]
        live += [f"allocated {address:#x}" for address in self.own]
        return live + [f"mapped {address:#x}" for address in self.mapped]


class FakeCudaDriver:
    """`CudaDriver` over a `FakeGpu`."""

    def __init__(self, gpu: FakeGpu, device_index: int = 0) -> None:
        self.gpu = gpu
        self.device_index = device_index
        self.is_rocm = not gpu.host_pointers
        self.supports_batch = gpu.supports_batch

    def _call(self, name: str, *args: object) -> None:
        self.gpu.threads.append((threading.get_ident(), self.device_index))
        self.gpu.calls.append((name, *args))

    def device_count(self) -> int:
        return len(self.gpu.uuids)

    def driver_version(self) -> int:
        return 13000

    def uuid_of(self, index: int) -> str:
        return self.gpu.uuids[index]

    def index_of(self, device_uuid: str) -> int:
        if device_uuid not in self.gpu.uuids:
            raise ConfigError(f"device {device_uuid} is not among {self.gpu.uuids}")
        return self.gpu.uuids.index(device_uuid)

    def device_info(self) -> DeviceInfo:
        return DeviceInfo(
            index=self.device_index,
            name="fake",
            uuid=self.uuid_of(self.device_index),
            architecture=self.gpu.architecture,
            multiprocessors=1,
            pci_bus_id="0000:00:00.0",
            host_pointers=self.gpu.host_pointers,
            can_map_host=True,
            ipc_events=True,
        )

    def allocate(self, nbytes: int) -> int:
        self._call("allocate", nbytes)
        if self.gpu.refuse_allocate:
            raise CudaCallError("cudaMalloc", "cudaErrorMemoryAllocation")
        buffer = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(buffer)
        self.gpu.own[address] = buffer
        self.gpu.allocations[address] = nbytes
        return address

    def free(self, address: int) -> None:
        self._call("free", address)
        assert not any(self.gpu.streams.values()), "memory was freed under pending work"
        del self.gpu.own[address], self.gpu.allocations[address]

    def register_host(self, address: int, nbytes: int) -> None:
        self._call("register_host", address, nbytes)
        limit = self.gpu.refuse_register_after
        if limit is not None and len(self.gpu.pinned) >= limit:
            raise CudaCallError("cudaHostRegister", "cudaErrorMemoryAllocation")
        assert address not in self.gpu.pinned, "registered twice"
        self.gpu.pinned[address] = nbytes
        self.gpu.aliases[address] = len(self.gpu.aliases) + 1

    def unregister_host(self, address: int) -> None:
        self._call("unregister_host", address)
        del self.gpu.pinned[address]

    def host_device_address(self, address: int) -> int:
        assert address in self.gpu.pinned
        return address + (
            0 if self.gpu.host_pointers else MAPPED_OFFSET * self.gpu.aliases[address]
        )

    def pointer(self, address: int) -> tuple[PointerKind, int]:
        self._call("pointer", address)
        for start, nbytes in self.gpu.allocations.items():
            if start <= address < start + nbytes:
                return PointerKind.DEVICE, address
        for start, nbytes in self.gpu.pinned.items():
            if start <= address < start + nbytes:
                return PointerKind.PINNED, address - start + self.host_device_address(start)
        return PointerKind.PAGEABLE, 0

    def allocation_of(self, address: int) -> tuple[int, int]:
        for start, nbytes in (*self.gpu.allocations.items(), *self.gpu.mapped.items()):
            if start <= address < start + nbytes:
                return start, nbytes
        raise CudaCallError("cuMemGetAddressRange", "CUDA_ERROR_INVALID_VALUE")

    def is_ipc_capable(self, address: int) -> bool:
        return self.allocation_of(address)[0] not in self.gpu.vmm

    def ipc_memory_handle(self, address: int) -> bytes:
        self._call("ipc_memory_handle", address)
        return self.allocation_of(address)[0].to_bytes(64, "little")

    def open_ipc_memory(self, handle: bytes) -> int:
        self._call("open_ipc_memory", handle)
        if self.gpu.refuse_open is not None:
            raise CudaCallError("cudaIpcOpenMemHandle", self.gpu.refuse_open)
        base = int.from_bytes(handle, "little")
        self.gpu.mapped[base] = self.gpu.allocations[base]
        return base

    def close_ipc_memory(self, address: int) -> None:
        self._call("close_ipc_memory", address)
        del self.gpu.mapped[address]

    def create_stream(self) -> int:
        stream = self.gpu.new_id()
        self._call("create_stream", stream)
        self.gpu.streams[stream] = deque()
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._call("destroy_stream", stream)
        assert not self.gpu.streams.pop(stream), "a stream with pending work was destroyed"

    def create_event(self, interprocess: bool = False) -> int:
        event = self.gpu.new_id()
        self._call("create_event", event, interprocess)
        self.gpu.events[event] = _Event()
        return event

    def destroy_event(self, event: int) -> None:
        self._call("destroy_event", event)
        self.gpu.live_event(event).destroyed = True

    def record_event(self, event: int, stream: int) -> None:
        self._call("record_event", event, stream)
        found = self.gpu.live_event(event)
        found.recorded += 1
        ticket = found.recorded

        def fire() -> None:
            found.fired = max(found.fired, ticket)

        self.gpu.enqueue(stream, fire)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("wait_event", stream, event)
        self.gpu.enqueue_wait(stream, self.gpu.live_event(event))

    def query_event(self, event: int) -> bool:
        self._call("query_event", event)
        found = self.gpu.live_event(event)
        for _ in range(self.gpu.random.randrange(4)):
            self.gpu.step()
        return found.fired >= found.recorded

    def ipc_event_handle(self, event: int) -> bytes:
        self._call("ipc_event_handle", event)
        self.gpu.live_event(event)
        return event.to_bytes(64, "little")

    def open_ipc_event(self, handle: bytes) -> int:
        self._call("open_ipc_event", handle)
        opened = self.gpu.new_id()
        # two names of one event
        self.gpu.events[opened] = _Alias(self.gpu.events[int.from_bytes(handle, "little")])
        return opened

    def copy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("copy_async", target, source, nbytes, stream)
        self._one_registration(target, nbytes)
        self._one_registration(source, nbytes)
        self.gpu.enqueue(stream, lambda: _move(target, source, nbytes))

    def copy_batch_async(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        self._call("copy_batch_async", tuple(targets), tuple(sources), tuple(sizes), stream)
        copies = list(zip(targets, sources, sizes, strict=True))
        for target, source, nbytes in copies:
            self._one_registration(target, nbytes)
            self._one_registration(source, nbytes)

        def run() -> None:
            for copy in self.gpu.random.sample(copies, len(copies)):
                _move(*copy)

        self.gpu.enqueue(stream, run)

    def _one_registration(self, address: int, nbytes: int) -> None:
        """A copy that spans two registrations or allocations is refused by a real driver."""
        for start, length in (*self.gpu.pinned.items(), *self.gpu.allocations.items()):
            inside = start <= address < start + length
            assert not inside or address + nbytes <= start + length, "a copy spans registrations"


class _Alias(_Event):
    """The consumer's name of a producer's event: the same work, a lifetime of its own."""

    def __init__(self, source: _Event) -> None:
        self._source = source
        self.destroyed = False

    @property
    def recorded(self) -> int:  # type: ignore[override]
        return self._source.recorded

    @property
    def fired(self) -> int:  # type: ignore[override]
        return self._source.fired


def _move(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


class FakeKernel:
    """`DeviceKernel` that does with `ReferenceCopier`, in stream order, what a launch would do."""

    def __init__(self, gpu: FakeGpu, tuned: str | None = None) -> None:
        self.gpu = gpu
        self.tuned = tuned
        self.prepared: set[CopySpec] = set()
        self.launches = 0

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        self.prepared.update(specs)

    def enqueue(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
        stream: int,
    ) -> None:
        assert spec in self.prepared, "a launch of a spec that was not compiled at registration"
        self.launches += 1
        self.gpu.calls.append(("launch", direction.name, len(block_ids), stream))
        places = object_addresses.copy()
        if not self.gpu.host_pointers:
            for index, place in enumerate(places.tolist()):
                places[index] = self.host_address(place, spec.object_extent_bytes)
        ids = block_ids.copy()
        self.gpu.enqueue(
            stream, lambda: ReferenceCopier().copy_blocks(spec, direction, ids, places)
        )

    def host_address(self, place: int, extent_bytes: int) -> int:
        """What a device address of mapped memory is on the host; other addresses as they are."""
        alias, address = divmod(place, MAPPED_OFFSET)
        for start, nbytes in self.gpu.pinned.items():
            if alias == 0:
                inside = start <= address < start + nbytes
                assert not inside, "a kernel was given a host address"
            elif self.gpu.aliases[start] == alias:
                assert start <= address, "a kernel address before its registration"
                assert address + extent_bytes <= start + nbytes, "a block spans registrations"
        return address

    def tuned_path(self, spec: CopySpec, direction: Direction, num_blocks: int) -> str | None:
        return self.tuned

    def close(self) -> None:
        self.prepared.clear()
