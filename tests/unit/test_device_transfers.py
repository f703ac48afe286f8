"""Transfers of the device executor over the fake driver: order, events, lifetimes, reach."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.copy_cases import single_run_case
from support.fake_cuda import FakeCudaDriver, FakeGpu, FakeKernel

from hma_triton.errors import TransferError
from hma_triton.host_memory import Piece, PinnedHost
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.runs import NO_PIECES, join_items

CPU = torch.device("cpu")


class _Setup:
    """A copier over fake memory of 8 blocks, one row of 64-byte pages."""

    def __init__(
        self, gpu: FakeGpu | None = None, path: Path | None = None, staging_bytes: int = 256
    ) -> None:
        self.gpu = gpu or FakeGpu()
        self.driver = FakeCudaDriver(self.gpu)
        self.pool = np.arange(8 * 64, dtype=np.int64).astype(np.uint8)
        self.host = np.full(8 * 64, 0xEE, dtype=np.uint8)
        self.gpu.allocations[int(self.pool.ctypes.data)] = self.pool.nbytes
        self.pinned = PinnedHost(
            self.driver, int(self.host.ctypes.data), (Piece(0, self.host.nbytes),)
        )
        case = single_run_case(64, range(8), rows=1, num_blocks=8)
        self.spec = replace(case.spec, row_addresses=(int(self.pool.ctypes.data),))
        self.kernel = FakeKernel(self.gpu)
        self.copier = DeviceCopier(
            CPU,
            self.pinned,
            kernel=self.kernel,
            driver=self.driver,
            settings=DeviceSettings(path, staging_bytes),
        )
        self.copier.prepare((self.spec,))
        self.ids = np.arange(8)
        self.places = int(self.host.ctypes.data) + 64 * np.arange(8)

    def job(self) -> CopyJob:
        return CopyJob(self.spec, self.ids, self.places)

    def close(self) -> None:
        self.gpu.drain()
        self.copier.close()
        self.pinned.close()


class _Imported:
    """What `tensor_ipc_cuda.ImportedEvent` offers, over an event of the fake."""

    def __init__(self, driver: FakeCudaDriver, event: int) -> None:
        self.driver, self.event = driver, event

    def wait_on(self, stream: int) -> None:
        self.driver.wait_event(stream, self.event)

    def synchronize(self) -> None:
        raise AssertionError("a stream can wait for this event; the host need not")


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("path", Path)
def test_case_91_no_byte_moves_before_the_producer_s_event(
    direction: Direction, path: Path
) -> None:
    setup = _Setup(path=path)
    event = setup.gpu.pending_event()
    pool, host = setup.pool.copy(), setup.host.copy()
    pending = setup.copier.start(direction, (setup.job(),), _Imported(setup.driver, event))
    for _ in range(50):
        assert not pending.query()
        setup.gpu.drain()
    assert (setup.pool == pool).all() and (setup.host == host).all()
    with pytest.raises(TransferError, match="before the deadline"):
        pending.synchronize(deadline_ns=time.monotonic_ns())
    setup.gpu.fire(event)
    pending.synchronize()
    assert (setup.pool == setup.host).all()
    assert pending.reports[0].path is path
    setup.close()


def test_an_event_that_only_the_host_can_wait_for_is_waited_for_first() -> None:
    setup = _Setup()
    seen: list[int] = []

    class HostOnly:
        def synchronize(self) -> None:
            seen.append(len(setup.gpu.calls))

    before = len(setup.gpu.calls)
    setup.copier.start(Direction.STORE, (setup.job(),), HostOnly()).synchronize()
    assert seen == [before]
    setup.close()


def test_a_reader_s_stream_can_wait_for_a_retrieve_without_the_host() -> None:
    """The engine's next read, on its own stream, sees the bytes; nobody waits on the host."""
    setup = _Setup(path=Path.STAGED)
    setup.host[:] = 7
    engine = setup.driver.create_stream()
    read: list[np.ndarray] = []
    pending = setup.copier.start(Direction.RETRIEVE, (setup.job(),))
    pending.wait_on(engine)
    setup.gpu.enqueue(engine, lambda: read.append(setup.pool.copy()))
    setup.gpu.drain()
    assert (read[0] == 7).all()
    assert pending.query()
    setup.driver.destroy_stream(engine)
    setup.close()


@pytest.mark.parametrize("path", Path)
def test_no_default_stream_and_both_directions_have_streams_of_their_own(path: Path) -> None:
    setup = _Setup(path=path)
    stored = setup.copier.start(Direction.STORE, (setup.job(),))
    retrieved = setup.copier.start(Direction.RETRIEVE, (setup.job(),))
    used: dict[str, set[object]] = {"STORE": set(), "RETRIEVE": set()}
    for call in setup.gpu.calls:
        if call[0] == "launch":
            used[str(call[1])].add(call[3])
        if call[0] in ("copy_async", "copy_batch_async"):
            assert call[4] != 0
        if call[0] == "record_event":
            assert call[2] != 0
    assert not used["STORE"] & used["RETRIEVE"]
    stored.synchronize()
    retrieved.synchronize()
    setup.close()


def test_staging_is_as_large_as_its_limit_and_reused_across_transfers() -> None:
    setup = _Setup(path=Path.STAGED, staging_bytes=256)
    for round_index in range(20):
        setup.pool[:] = round_index
        setup.copier.start(Direction.STORE, (setup.job(),)).synchronize()
        assert (setup.host == round_index).all()
    # 8 blocks of 64 bytes through halves of 128 bytes: four launches a transfer
    assert setup.kernel.launches == 4 * 20
    setup.close()


@pytest.mark.parametrize("direction", Direction)
def test_case_95_two_transfers_in_flight_share_the_staging_buffer_in_order(
    direction: Direction,
) -> None:
    for seed in range(30):
        setup = _Setup(FakeGpu(seed=seed), path=Path.STAGED, staging_bytes=128)
        setup.host[:] = np.arange(8 * 64) % 251
        half = slice(0, 4), slice(4, 8)
        pending = [
            setup.copier.start(
                direction, (CopyJob(setup.spec, setup.ids[part], setup.places[part]),)
            )
            for part in half
        ]
        pending[1].synchronize()
        pending[0].synchronize()
        assert (setup.host == setup.pool).all()
        setup.close()


def test_a_failed_enqueue_is_raised_only_when_nothing_moves_any_more() -> None:
    setup = _Setup(path=Path.ZERO_COPY)

    class Broken(FakeKernel):
        def enqueue(self, *args: object) -> None:
            if self.launches:
                raise TransferError("second launch fails")
            super().enqueue(*args)  # type: ignore[arg-type]

    broken = Broken(setup.gpu)
    copier = DeviceCopier(
        CPU,
        setup.pinned,
        kernel=broken,
        driver=setup.driver,
        settings=DeviceSettings(Path.ZERO_COPY),
    )
    copier.prepare((setup.spec,))
    with pytest.raises(TransferError, match="second launch"):
        copier.start(Direction.STORE, (setup.job(), setup.job()))
    assert not any(setup.gpu.streams.values())
    copier.close()
    setup.close()


def test_case_109_a_transfer_is_one_launch_for_each_spec() -> None:
    setup = _Setup(path=Path.ZERO_COPY)
    pending = setup.copier.start(Direction.STORE, (setup.job(), setup.job()))
    pending.synchronize()
    assert setup.kernel.launches == 2
    assert [report.entries for report in pending.reports] == [1, 1]
    setup.close()


@pytest.mark.parametrize("wanted", Path)
def test_pageable_objects_are_never_given_to_a_kernel(wanted: Path) -> None:
    setup = _Setup(path=wanted)
    pageable = np.full(8 * 64, 0xEE, dtype=np.uint8)
    places = int(pageable.ctypes.data) + 64 * np.arange(8)
    pending = setup.copier.start(Direction.STORE, (CopyJob(setup.spec, setup.ids, places),))
    pending.synchronize()
    assert pending.reports[0].path is not Path.ZERO_COPY
    assert (pageable == setup.pool).all()
    # nor to the batch call, which promises nothing for such memory
    assert "copy_batch_async" not in setup.gpu.names()
    setup.close()


def test_a_block_over_two_mapped_pieces_is_not_given_to_a_kernel() -> None:
    """On ROCm the pieces' device addresses do not follow each other: the copy is split there."""
    setup = _Setup(FakeGpu(host_pointers=False), path=Path.ZERO_COPY)
    host = np.full(8 * 64, 0xEE, dtype=np.uint8)
    cut = 64 * 3 + 20
    pinned = PinnedHost(
        setup.driver, int(host.ctypes.data), (Piece(0, cut), Piece(cut, host.nbytes - cut))
    )
    copier = DeviceCopier(
        CPU,
        pinned,
        kernel=setup.kernel,
        driver=setup.driver,
        settings=DeviceSettings(Path.ZERO_COPY),
    )
    copier.prepare((setup.spec,))
    places = int(host.ctypes.data) + 64 * np.arange(8)
    for chosen, path in ((slice(0, 3), Path.ZERO_COPY), (slice(0, 8), Path.DMA)):
        job = CopyJob(setup.spec, setup.ids[chosen], places[chosen])
        pending = copier.start(Direction.STORE, (job,))
        pending.synchronize()
        assert pending.reports[0].path is path
    assert (host == setup.pool).all()
    copier.close()
    pinned.close()
    setup.close()


def test_joined_neighbours_become_one_copy() -> None:
    setup = _Setup(path=Path.DMA)
    pending = setup.copier.start(Direction.STORE, (setup.job(),))
    pending.synchronize()
    assert [call for call in setup.gpu.calls if call[0] == "copy_async"] == [
        ("copy_async", int(setup.places[0]), int(setup.pool.ctypes.data), 512, _lane(setup.gpu))
    ]
    assert pending.reports[0].entries == 1
    setup.close()


def _lane(gpu: FakeGpu) -> object:
    return next(call[4] for call in gpu.calls if call[0] == "copy_async")


def test_neighbours_outside_the_arena_stay_apart() -> None:
    """Two objects may adjoin by chance in two registrations; one copy must not span them."""
    setup = _Setup()
    items = join_items(setup.spec, setup.ids, setup.places, NO_PIECES)
    assert items.lengths.tolist() == [1] * 8
    setup.close()


def test_many_threads_share_one_copier() -> None:
    setup = _Setup(path=Path.STAGED, staging_bytes=128)
    gate = threading.Lock()
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            host = np.zeros(8 * 64, dtype=np.uint8)
            order = np.random.default_rng(seed).permutation(8)
            job = CopyJob(setup.spec, order, int(host.ctypes.data) + 64 * np.arange(8))
            pending = setup.copier.start(Direction.STORE, (job,))
            while True:
                with gate:
                    if pending.query():
                        break
            assert (host.reshape(8, 64) == setup.pool.reshape(8, 64)[order]).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
        thread.join()
    assert not errors
    setup.close()


def test_without_room_for_the_staging_buffer_another_path_is_taken() -> None:
    """The engine has taken the device's memory: asked once, said once, and the bytes move."""
    setup = _Setup(FakeGpu(refuse_allocate=True), path=Path.STAGED)
    for _ in range(2):
        pending = setup.copier.start(Direction.STORE, (setup.job(),))
        pending.synchronize()
        assert pending.reports[0].path is not Path.STAGED
    assert (setup.host == setup.pool).all()
    assert setup.gpu.names().count("allocate") == 1
    setup.close()
    assert not setup.gpu.leaks()


def test_the_staging_buffer_is_given_back() -> None:
    setup = _Setup(path=Path.STAGED)
    setup.copier.start(Direction.STORE, (setup.job(),)).synchronize()
    assert setup.gpu.own
    setup.close()
    assert not setup.gpu.leaks()


def test_a_pending_copy_that_nobody_waits_for_lets_go_of_its_event() -> None:
    setup = _Setup(path=Path.ZERO_COPY)
    pending = setup.copier.start(Direction.STORE, (setup.job(),))
    reader = setup.driver.create_stream()
    pending.wait_on(reader)
    pending.close()
    pending.close()
    assert pending.query(), "closed: there is nothing to ask any more"
    setup.gpu.drain()
    assert (setup.host == setup.pool).all()
    setup.driver.destroy_stream(reader)
    setup.close()
    assert not setup.gpu.leaks()


@pytest.mark.parametrize("forced", [None, *Path])
def test_objects_on_the_device_are_moved_by_the_kernel(forced: Path | None) -> None:
    """Nothing crosses the link, so no buffer and no table of the link; a wish for dma is done."""
    setup = _Setup(path=forced)
    slot = np.full(8 * 64, 0xEE, dtype=np.uint8)
    setup.gpu.allocations[int(slot.ctypes.data)] = slot.nbytes
    places = int(slot.ctypes.data) + 64 * np.arange(8)
    pending = setup.copier.start(Direction.STORE, (CopyJob(setup.spec, setup.ids, places),))
    pending.synchronize()
    assert pending.reports[0].path is (Path.DMA if forced is Path.DMA else Path.ZERO_COPY)
    assert (slot == setup.pool).all()
    assert "allocate" not in setup.gpu.names()
    setup.close()


def test_a_view_of_somebody_else_s_pins_splits_copies_at_their_edges() -> None:
    setup = _Setup(path=Path.DMA)
    host = np.full(8 * 64, 0xEE, dtype=np.uint8)
    base = int(host.ctypes.data)
    for start, nbytes in ((0, 100), (100, 412)):
        setup.driver.register_host(base + start, nbytes)
    view = setup.copier.registrations(
        np.array([base, base + 100]), np.array([base + 100, base + 512])
    )
    assert view is not None
    job = CopyJob(setup.spec, setup.ids, base + 64 * np.arange(8))
    setup.copier.start(Direction.STORE, (job,), view=view).synchronize()
    assert (host == setup.pool).all()
    posted = [call for call in setup.gpu.calls if call[0] == "copy_batch_async"]
    assert [sorted(sizes) for _, _, _, sizes, _ in posted] == [[100, 412]]  # type: ignore[misc]
    unpinned = np.zeros(64, dtype=np.uint8)
    edge = np.array([int(unpinned.ctypes.data)])
    assert setup.copier.registrations(edge, edge + 64) is None
    for start in (0, 100):
        setup.driver.unregister_host(base + start)
    setup.close()
