"""CUDA pools on their way to the server, over the fake driver: from a cache to a copy."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCudaDriver, FakeGpu, FakeKernel

from hma_triton import engine as engine_module
from hma_triton import tensor_ipc, tensor_ipc_cuda
from hma_triton.config import ServerConfig
from hma_triton.cuda_driver import CudaCallError
from hma_triton.engine import TransferEngine
from hma_triton.errors import ConfigError, UnsupportedLayoutError
from hma_triton.handles import CudaEventHandle
from hma_triton.kernels.device import DeviceCopier
from hma_triton.metrics import Metrics
from hma_triton.objects.arena import Arena
from hma_triton.process_identity import this_process
from hma_triton.server import pinned_arena
from hma_triton.server.copy_desk import CopyDesk
from hma_triton.server.handlers import Handlers
from hma_triton.server.jobs import StoreJob
from hma_triton.server.pinned_arena import PinnedArena
from hma_triton.tensor_ipc import CudaStorages, device_of, export_kv_caches, import_kv_caches
from hma_triton.tensor_ipc_cuda import ImportedEvent, StepEvents

PEER = msgspec.structs.replace(this_process(), pid=this_process().pid + 1)
CUDA = torch.device("cuda", 0)


class _At:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """CPU storages stand for CUDA ones: exported by handle, opened as what lies at the address."""
    made = FakeGpu()

    def driver(index: int = 0) -> FakeCudaDriver:
        return FakeCudaDriver(made, index)

    def name(storage: torch.UntypedStorage) -> Any:
        made.allocations[storage.data_ptr()] = storage.nbytes()
        return tensor_ipc_cuda.export_storage(storage, PEER, driver())  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_ipc, "_name_storage", name)
    monkeypatch.setattr(
        tensor_ipc,
        "CudaStorages",
        lambda me: CudaStorages(
            me,
            driver,  # type: ignore[arg-type]
            lambda address, nbytes, index: torch.from_numpy(np.asarray(_At(address, nbytes))),
        ),
    )
    monkeypatch.setattr(pinned_arena, "CudaDriver", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tensor_ipc_cuda, "this_process", lambda: PEER)
    yield made


def _caches() -> dict[str, torch.Tensor]:
    """Two layers over one storage, at offsets, as an engine registers them."""
    storage = torch.arange(2 * 8 * 16 * 4 * 32, dtype=torch.int64).to(torch.uint8)
    layers = storage.view(2, 8, 16, 4, 32).permute(0, 1, 3, 2, 4)
    return {"layers.0": layers[0], "layers.1": layers[1]}


def test_caches_come_back_as_views_of_the_engine_s_memory(gpu: FakeGpu) -> None:
    caches = _caches()
    storages, layers = export_kv_caches(caches)
    assert len(storages) == 1, "one handle for each storage"
    imported = import_kv_caches(storages, layers)
    for name, tensor in caches.items():
        view = imported.kv_caches[name]
        assert view.data_ptr() == tensor.data_ptr()
        assert (view.shape, view.stride()) == (tensor.shape, tensor.stride())
    imported.kv_caches["layers.1"][3, 0, 0, 0] = 77
    assert int(caches["layers.1"][3, 0, 0, 0]) == 77
    assert imported.nbytes == storages[0].nbytes
    assert list(gpu.mapped) == [caches["layers.0"].data_ptr()]
    imported.close()
    assert not gpu.mapped


def test_a_bad_view_leaves_nothing_mapped(gpu: FakeGpu) -> None:
    storages, layers = export_kv_caches(_caches())
    first = layers[0]
    forged = msgspec.structs.replace(
        first, tensors=(msgspec.structs.replace(first.tensors[0], offset=1 << 30),)
    )
    with pytest.raises(Exception, match="outside its segment"):
        import_kv_caches(storages, (forged,))
    assert not gpu.mapped


def test_case_101_a_layer_that_cannot_be_shared_is_named(gpu: FakeGpu) -> None:
    caches = _caches()
    gpu.vmm.add(caches["layers.0"].data_ptr())
    with pytest.raises(UnsupportedLayoutError, match=r"layer 'layers.0': .*expandable_segments"):
        export_kv_caches(caches)


def test_the_device_of_caches() -> None:
    assert device_of({"a": torch.empty(1)}).type == "cpu"
    assert device_of({"a": [torch.empty(1, device="meta")]}).type == "meta"
    assert device_of({}).type == "cpu"


def test_a_store_and_a_retrieve_of_a_mapped_pool_through_the_pinned_arena(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a server does with a registration, over simulated streams."""
    arena = Arena(1 << 20)
    started = PinnedArena(arena, "on")
    started.start()
    pinned = started.for_device(CUDA)
    driver = FakeCudaDriver(gpu)
    monkeypatch.setattr(
        engine_module,
        "make_copier",
        lambda *_: DeviceCopier(
            torch.device("cpu"),
            pinned,
            kernel=FakeKernel(gpu),
            driver=driver,  # type: ignore[arg-type]
        ),
    )
    caches = _caches()
    imported = import_kv_caches(*export_kv_caches(caches))
    engine = TransferEngine(imported.kv_caches, layout_hints={"kv_layout": "NHD"}, chunk_tokens=32)
    before = [tensor.clone() for tensor in caches.values()]
    ids, places = [np.array([5, 2])], [np.array([arena.address + 4096])]
    stored = engine.store_addresses(ids, places)
    assert stored.backend == "device:dma"
    assert stored.nbytes == 2 * 2 * 16 * 4 * 32
    assert {report.path.value for report in stored.paths} == {"dma"}
    for tensor in caches.values():
        tensor.fill_(0)
    late = engine.retrieve_addresses([np.array([2, 5])], places, wait=False)
    assert late.done is not None
    late.done.synchronize()
    for tensor, old in zip(caches.values(), before, strict=True):
        assert torch.equal(tensor[[2, 5]], old[[5, 2]])
        assert not tensor[[0, 1, 3, 4, 6, 7]].any()
    engine.close()
    imported.close()


def test_steps_are_marked_by_events_that_are_used_in_turn(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeCudaDriver(gpu)
    stream = driver.create_stream()
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream)
    )
    events = StepEvents(CUDA, driver, count=2)  # type: ignore[arg-type]
    handles = [events.mark() for _ in range(3)]
    assert handles[0] == handles[2] != handles[1]
    assert all(handle.owner == PEER for handle in handles)
    assert all(call[2] is True for call in gpu.calls if call[0] == "create_event")
    imported = ImportedEvent(
        handles[1],
        this_process(),
        lambda index: FakeCudaDriver(gpu, index),  # type: ignore[arg-type]
    )
    assert not imported.query() or not gpu.streams[stream]
    gpu.drain()
    assert imported.query()
    live = [name for name, event in gpu.events.items() if not event.destroyed]
    assert len(live) == 3
    del imported
    gc.collect()
    # an event that nobody holds is released with its holder, as jobs drop theirs
    assert len([name for name, event in gpu.events.items() if not event.destroyed]) == 2
    events.close()
    events.close()
    driver.destroy_stream(stream)
    assert not [leak for leak in gpu.leaks() if leak.startswith(("event", "stream"))]


def test_a_request_s_event_must_be_its_sender_s_own(gpu: FakeGpu) -> None:
    peer: Any = SimpleNamespace(process=PEER)
    handlers: Any = object.__new__(Handlers)
    stranger = msgspec.structs.replace(PEER, pid=PEER.pid + 7)
    handle = CudaEventHandle(owner=stranger, device_uuid=gpu.uuids[0], handle=bytes(64))
    with pytest.raises(ConfigError, match=f"of process {stranger.pid} named by process {PEER.pid}"):
        Handlers._event(handlers, peer, handle)
    assert Handlers._event(handlers, peer, None) is None


def test_settings_of_the_arena_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(url="ipc:///tmp/x", hugepages="thp", numa_node=1, touch="start")
    assert (config.hugepages, config.numa_node, config.touch) == ("thp", 1, "start")
    with pytest.raises(ConfigError, match="off, thp, hugetlb"):
        Arena(1 << 20, hugepages="large")
    touched = Arena(1 << 20, touch="start")
    assert touched.memory.nbytes >= touched.nbytes


class _Refusing:
    """An event that the driver answers for once, and then no more."""

    def __init__(self, answers: int) -> None:
        self.answers = answers

    def query(self) -> bool:
        self.answers -= 1
        if self.answers < 0:
            raise CudaCallError("cudaEventQuery", "cudaErrorInvalidResourceHandle")
        return False


@pytest.mark.parametrize("answers", [0, 1])
def test_an_event_that_cannot_be_asked_fails_its_job_alone(answers: int) -> None:
    """At once or while it waits: its request is answered, the loop and a neighbour go on."""
    replies: list[Any] = []
    store: Any = SimpleNamespace(abort=lambda reservation: None)
    desk = CopyDesk(
        ServerConfig(url="ipc:///tmp/x"),
        store,
        SimpleNamespace(),  # type: ignore[arg-type]
        Metrics(dict),
        lambda identity, reply: replies.append(reply),
        lambda work: work(),
    )
    registration: Any = SimpleNamespace(
        running=0, closing=False, lane="a", shape=SimpleNamespace(num_groups=1)
    )
    for seq, event in enumerate((_Refusing(answers), _Refusing(9))):
        reservation: Any = SimpleNamespace(places=[(0, 0)], addresses=[np.ones(1)], there=0)
        desk.submit(
            StoreJob(
                owner=b"o", seq=seq, registration=registration, block_ids=[], deadline_ns=1 << 62,
                event=event, arena=None, submitted_ns=0,  # type: ignore[arg-type]
                reservation=reservation, wants_checksums=False,
            )
        )  # fmt: skip
    desk.poll_waiting(0)
    assert [(reply.seq, reply.code) for reply in replies] == [(0, "transfer")]
    assert "cudaErrorInvalidResourceHandle" in replies[0].message
    assert registration.running == 1 and desk.has_waiting
    desk.shut_down(1)
