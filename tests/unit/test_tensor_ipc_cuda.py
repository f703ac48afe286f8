"""CUDA pools and events by handle, over the fake driver: encoding, matching, refusal, release."""

from __future__ import annotations

import threading
import time

import msgspec
import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCudaDriver, FakeGpu

from hma_triton.cuda_driver import IPC_HANDLE_BYTES, CudaCallError, shared_driver
from hma_triton.errors import ConfigError, ProtocolError, TransferError, UnsupportedLayoutError
from hma_triton.handles import CudaEventHandle, CudaIpcHandle, EventHandle, StorageHandle
from hma_triton.process_identity import this_process
from hma_triton.tensor_ipc_cuda import (
    CudaStorages,
    ImportedEvent,
    device_bytes,
    export_event,
    export_storage,
)

ENGINE = this_process()
SERVER = msgspec.structs.replace(ENGINE, pid=ENGINE.pid + 1)
UUIDS = tuple(f"GPU-00000000-0000-0000-0000-00000000000{i}" for i in range(3))


class _Wrapped:
    """A server's side: every mapping opened is CPU memory that torch looks at."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.storages = CudaStorages(
            SERVER,
            lambda index: FakeCudaDriver(gpu, index),
            self.wrap,  # type: ignore[arg-type]
        )
        self.devices: list[int] = []

    def wrap(self, address: int, nbytes: int, device_index: int) -> torch.Tensor:
        self.devices.append(device_index)
        memory = _At(address, nbytes)
        return torch.from_numpy(np.asarray(memory))


class _At:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


@pytest.fixture
def gpu() -> FakeGpu:
    return FakeGpu(uuids=UUIDS)


def _segment(gpu: FakeGpu, nbytes: int = 4096) -> torch.Tensor:
    """An allocation of the engine's allocator, with two storages in it."""
    segment = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    gpu.allocations[segment.data_ptr()] = nbytes
    return segment


def _storage_at(segment: torch.Tensor, offset: int, nbytes: int) -> torch.UntypedStorage:
    memory = _At(segment.data_ptr() + offset, nbytes)
    return torch.from_numpy(np.asarray(memory)).untyped_storage()


def _export(gpu: FakeGpu, storage: torch.UntypedStorage, device: int = 0) -> CudaIpcHandle:
    return export_storage(storage, ENGINE, FakeCudaDriver(gpu, device))  # type: ignore[arg-type]


def test_a_handle_survives_the_wire_and_names_device_allocation_and_offset(gpu: FakeGpu) -> None:
    segment = _segment(gpu)
    handle = _export(gpu, _storage_at(segment, 512, 1000), device=2)
    assert handle.device_uuid == UUIDS[2]
    assert (handle.offset_bytes, handle.nbytes) == (512, 1000)
    assert len(handle.handle) == IPC_HANDLE_BYTES
    wire = msgspec.msgpack.encode(handle)
    assert msgspec.msgpack.decode(wire, type=StorageHandle) == handle
    event = CudaEventHandle(owner=ENGINE, device_uuid=UUIDS[1], handle=bytes(64))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=EventHandle)
    assert decoded == event


def test_case_94_writes_through_a_wrapper_are_seen_by_the_owner(gpu: FakeGpu) -> None:
    segment = _segment(gpu)
    server = _Wrapped(gpu)
    view = server.storages.open(_export(gpu, _storage_at(segment, 512, 1000)))
    view[:3] = torch.tensor([7, 8, 9], dtype=torch.uint8)
    assert segment[512:515].tolist() == [7, 8, 9]
    assert int(view[999]) == int(segment[1511])
    server.storages.close()


def test_case_94_a_copy_instead_of_a_view_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch, "as_tensor", lambda *args, **kwargs: copy)
    with pytest.raises(TransferError, match="copied the 16 bytes"):
        device_bytes(copy.data_ptr() + 1, 16, 0)
    assert device_bytes(copy.data_ptr(), 16, 0) is copy


def test_devices_are_matched_by_uuid_not_by_index() -> None:
    engine = FakeGpu(uuids=UUIDS)
    segment = _segment(engine)
    handle = _export(engine, _storage_at(segment, 0, 64), device=2)
    # the server sees the same devices in another order
    server = _Wrapped(FakeGpu(uuids=(UUIDS[2], UUIDS[0]), allocations=engine.allocations))
    server.storages.open(handle)
    assert server.devices == [0]
    server.storages.close()
    blind = _Wrapped(FakeGpu(uuids=(UUIDS[0],), allocations=engine.allocations))
    with pytest.raises(ConfigError, match=UUIDS[2]):
        blind.storages.open(handle)
    assert not blind.gpu.mapped


def test_storages_of_one_allocation_share_its_mapping(gpu: FakeGpu) -> None:
    segment = _segment(gpu)
    server = _Wrapped(gpu)
    first = server.storages.open(_export(gpu, _storage_at(segment, 0, 100)))
    second = server.storages.open(_export(gpu, _storage_at(segment, 2048, 100)))
    assert second.data_ptr() - first.data_ptr() == 2048
    assert server.storages.num_mappings == gpu.names().count("open_ipc_memory") == 1
    server.storages.close()
    server.storages.close()
    assert gpu.names().count("close_ipc_memory") == 1
    assert not gpu.mapped


def test_case_101_memory_that_ipc_cannot_name_is_refused_by_name(gpu: FakeGpu) -> None:
    segment = _segment(gpu)
    gpu.vmm.add(segment.data_ptr())
    with pytest.raises(UnsupportedLayoutError) as refused:
        _export(gpu, _storage_at(segment, 0, 64))
    text = str(refused.value)
    assert "expandable_segments" in text and "cuMemCreate" in text
    assert "engine's own process" in text
    assert "ipc_memory_handle" not in gpu.names()


def test_case_101_a_storage_over_two_segments_is_refused(gpu: FakeGpu) -> None:
    segment = _segment(gpu, 4096)
    storage = _storage_at(segment, 0, 4096)
    gpu.allocations[segment.data_ptr()] = 2048
    with pytest.raises(UnsupportedLayoutError, match="not inside one CUDA allocation"):
        _export(gpu, storage)


def test_case_101_a_refused_mapping_leaves_no_half_registered_state(gpu: FakeGpu) -> None:
    segment = _segment(gpu)
    handle = _export(gpu, _storage_at(segment, 0, 64))
    gpu.refuse_open = "cudaErrorMapBufferObjectFailed"
    server = _Wrapped(gpu)
    with pytest.raises(TransferError, match=r"cudaErrorMapBufferObjectFailed.*--ipc=host"):
        server.storages.open(handle)
    assert server.storages.num_mappings == 0 and not gpu.mapped


@pytest.mark.parametrize(("offset", "nbytes"), [(4000, 97), (0, 4097), (8192, 1), (16, 0)])
def test_a_storage_outside_its_allocation_is_refused_and_unmapped(
    gpu: FakeGpu, offset: int, nbytes: int
) -> None:
    segment = _segment(gpu)
    honest = _export(gpu, _storage_at(segment, 0, 64))
    forged = msgspec.structs.replace(honest, offset_bytes=offset, nbytes=nbytes)
    server = _Wrapped(gpu)
    with pytest.raises(ProtocolError, match="of an allocation of 4096 bytes"):
        server.storages.open(forged)
    assert not gpu.mapped
    # an honest storage of the same allocation stays mapped
    server.storages.open(honest)
    with pytest.raises(ProtocolError):
        server.storages.open(forged)
    assert list(gpu.mapped) == [segment.data_ptr()]
    server.storages.close()


def test_handles_of_another_length_and_one_s_own_are_refused(gpu: FakeGpu) -> None:
    segment = _segment(gpu)
    handle = _export(gpu, _storage_at(segment, 0, 64))
    server = _Wrapped(gpu)
    with pytest.raises(ProtocolError, match="64 bytes, 63 came"):
        server.storages.open(msgspec.structs.replace(handle, handle=bytes(63)))
    own = CudaStorages(ENGINE, lambda index: FakeCudaDriver(gpu, index))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the process that made it"):
        own.open(handle)


def test_case_79_twenty_registrations_leave_nothing_mapped(gpu: FakeGpu) -> None:
    segment = _segment(gpu)
    for _ in range(20):
        server = _Wrapped(gpu)
        server.storages.open(_export(gpu, _storage_at(segment, 0, 64)))
        server.storages.close()
    assert not gpu.mapped and not gpu.leaks()


def test_one_refusal_to_unmap_does_not_keep_the_rest_mapped(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = [_segment(gpu) for _ in range(3)]
    server = _Wrapped(gpu)
    for segment in segments:
        server.storages.open(_export(gpu, _storage_at(segment, 0, 64)))
    refused = segments[1].data_ptr()
    real = FakeCudaDriver.close_ipc_memory

    def refuse(driver: FakeCudaDriver, address: int) -> None:
        if address == refused:
            raise CudaCallError("cudaIpcCloseMemHandle", "cudaErrorInvalidValue")
        real(driver, address)

    monkeypatch.setattr(FakeCudaDriver, "close_ipc_memory", refuse)
    with pytest.raises(TransferError, match="cudaErrorInvalidValue"):
        server.storages.close()
    assert list(gpu.mapped) == [refused]
    assert server.storages.num_mappings == 0


def _imported(gpu: FakeGpu, event: int) -> ImportedEvent:
    handle = export_event(event, ENGINE, FakeCudaDriver(gpu))  # type: ignore[arg-type]
    return ImportedEvent(
        handle,
        SERVER,
        lambda index: FakeCudaDriver(gpu, index),  # type: ignore[arg-type]
    )


def test_case_92_an_imported_event_is_the_producer_s_pending_work(gpu: FakeGpu) -> None:
    event = gpu.pending_event()
    imported = _imported(gpu, event)
    assert not imported.query()
    with pytest.raises(TransferError, match="before the deadline"):
        imported.synchronize(time.monotonic_ns() + 1_000_000)
    gpu.fire(event)
    assert imported.query()
    imported.synchronize()
    imported.close()
    imported.close()
    with pytest.raises(TransferError, match="closed"):
        imported.query()


def test_case_74_waiting_for_an_event_that_never_fires_holds_nobody_up(gpu: FakeGpu) -> None:
    """The wait asks again and again, so other threads run; only the test lets it end."""
    event = gpu.pending_event()
    imported = _imported(gpu, event)
    ended = threading.Event()

    def wait() -> None:
        imported.synchronize()
        ended.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    server = _Wrapped(gpu)
    server.storages.open(_export(gpu, _storage_at(_segment(gpu), 0, 64)))
    server.storages.close()
    assert not ended.is_set()
    gpu.fire(event)
    waiter.join(timeout=60)
    assert ended.is_set()
    assert not {"synchronize_event", "stream_synchronize"} & set(gpu.names())
    imported.close()


def test_an_empty_storage_is_refused(gpu: FakeGpu) -> None:
    with pytest.raises(UnsupportedLayoutError, match="empty"):
        _export(gpu, torch.empty(0, dtype=torch.uint8).untyped_storage())


def test_the_default_driver_is_the_real_one() -> None:
    assert CudaStorages(SERVER)._driver_of is shared_driver
