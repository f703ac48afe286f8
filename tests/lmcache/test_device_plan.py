"""LMCache's plans on the device executor, over the fake driver: straight to pinned objects, in
stream order, no copy over two of LMCache's registrations; unpinned objects go as LMCache plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lmcache.v1.memory_allocators.lazy_memory_allocator import LazyMemoryAllocator
from support.copy_cases import single_run_case
from support.fake_cuda import FakeCudaDriver, FakeGpu, FakeKernel
from support.lmcache_context import RETRIEVE, STORE, Layers, Registered, registered

from hma_triton.integration.lmcache import install, uninstall
from hma_triton.integration.lmcache.executors import Executors
from hma_triton.integration.lmcache.host_pieces import object_pieces
from hma_triton.integration.lmcache.plan_types import StagingCopy
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.device import DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path

CPU = torch.device("cpu")
PIECE_BYTES = 4096
LAYERS = [Layers(3, (40, 2, 8, 24)), Layers(2, (40, 16, 40), torch.float16)]
MOVES = [(RETRIEVE, {"skip_tokens": 0}), (STORE, {"batch": 2}), (RETRIEVE, {"skip_tokens": 64})]


def _copier(gpu: FakeGpu, path: Path | None) -> DeviceCopier:
    driver: Any = FakeCudaDriver(gpu)
    settings = DeviceSettings(path, staging_bytes=1 << 20)
    return DeviceCopier(CPU, kernel=FakeKernel(gpu), driver=driver, settings=settings)


def _pin(gpu: FakeGpu, cache: Registered) -> None:
    """Register the objects' memory as LMCache does, in pieces from its start."""
    base, nbytes = cache._memory.data_ptr(), cache._memory.numel()
    driver = FakeCudaDriver(gpu)
    for start in range(0, nbytes, PIECE_BYTES):
        driver.register_host(base + start, min(PIECE_BYTES, nbytes - start))


def _moved(gpu: FakeGpu | None, path: Path | None) -> tuple[Any, Any]:
    """Bytes of pools and objects after all moves, by ours over the fake or by LMCache's own."""
    copier = None if gpu is None else _copier(gpu, path)
    installation = install(copier) if copier else None
    try:
        with registered(LAYERS, 64, 4, True) as cache:
            if gpu is not None:
                _pin(gpu, cache)
            for direction, options in MOVES:
                for group in cache.groups:
                    cache.move(direction, group, **options)
                    if gpu is not None:
                        gpu.drain()
            found = cache.pool_bytes(), [cache.object_bytes(group) for group in cache.groups]
    finally:
        if installation is not None:
            assert installation.fallthrough.counts == {}
            uninstall()
    if copier is not None:
        copier.close()
    return found


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)  # type: ignore[arg-type]
    return all(_same(mine, other) for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("path", [*Path, None], ids=lambda path: path.value if path else "auto")
def test_plans_go_straight_between_pages_and_pinned_objects(
    monkeypatch: pytest.MonkeyPatch, path: Path | None
) -> None:
    monkeypatch.setattr(LazyMemoryAllocator, "PIN_CHUNK_SIZE", PIECE_BYTES)
    gpu = FakeGpu(supports_batch=path is not Path.DMA)
    assert _same(_moved(gpu, path), _moved(None, None))
    names = set(gpu.names())
    assert ("launch" in names) == (path in (Path.ZERO_COPY, Path.STAGED, None))
    assert bool(names & {"copy_async", "copy_batch_async"}) == (path in (Path.STAGED, Path.DMA))
    events = [name for name, event in gpu.events.items() if not event.destroyed]
    assert not events, "every transfer lets go of its events"


def test_objects_that_are_not_pinned_are_not_reached_straight() -> None:
    gpu = FakeGpu()
    copier = _copier(gpu, None)
    executors = Executors(copier)
    host = np.zeros(PIECE_BYTES, dtype=np.uint8)
    copies = [StagingCopy(int(host.ctypes.data), 64, 1024, 0)]
    assert executors.host_view(CPU, copies, Direction.STORE, PIECE_BYTES) is None
    FakeCudaDriver(gpu).register_host(int(host.ctypes.data), PIECE_BYTES)
    view = executors.host_view(CPU, copies, Direction.STORE, PIECE_BYTES)
    assert view is not None
    assert (view.starts.tolist(), view.ends.tolist()) == (
        [int(host.ctypes.data)],
        [int(host.ctypes.data) + 1024],
    )
    copier.close()


def test_pieces_are_those_of_the_buffer_and_hold_whole_objects() -> None:
    """Two objects over one edge, one of them over two, in a buffer that starts at 10000."""
    copies = [StagingCopy(10_060, 1, 30, 60), StagingCopy(10_090, 2, 140, 90)]
    starts, ends = object_pieces(copies, Direction.STORE, 64)
    assert starts.tolist() == [10_060, 10_064, 10_128, 10_192]
    assert ends.tolist() == [10_064, 10_128, 10_192, 10_230]
    turned = [StagingCopy(c.src, c.dest, c.nbytes, c.host_offset) for c in copies]
    assert object_pieces(turned, Direction.RETRIEVE, 64)[0].tolist() == starts.tolist()


def test_a_device_s_objects_are_moved_by_a_kernel_and_never_staged() -> None:
    """LMCache's own staging slots are device memory: no second buffer, no way over the host."""
    gpu = FakeGpu()
    copier = _copier(gpu, Path.STAGED)
    slot = np.zeros(8 * 4096, dtype=np.uint8)
    pool = np.arange(8 * 4096, dtype=np.int64).astype(np.uint8)
    gpu.allocations[int(slot.ctypes.data)] = slot.nbytes
    case = single_run_case(4096, range(8), rows=1, num_blocks=8)
    spec = replace(case.spec, row_addresses=(int(pool.ctypes.data),))
    copier.prepare((spec,))
    places = int(slot.ctypes.data) + 4096 * np.arange(8)
    copier.enqueue(spec, Direction.STORE, np.arange(8), places)
    gpu.drain()
    assert (slot == pool).all()
    assert "allocate" not in gpu.names() and "copy_async" not in gpu.names()
    assert gpu.names().count("pointer") == 1, "one look-up for one allocation"
    copier.close()
    assert not gpu.leaks()
