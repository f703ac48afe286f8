"""The device executor over the fake driver: bytes under every legal order, and lifetimes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.copy_cases import CopyCase, check_copy, copy_cases, single_run_case
from support.fake_cuda import FakeCudaDriver, FakeGpu, FakeKernel
from support.guarded_memory import Memory

from hma_triton.errors import TransferError
from hma_triton.host_memory import Piece, PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.runs import NO_PIECES, join_items
from hma_triton.kernels.staged import row_slices, staged_batches

CPU = torch.device("cpu")


class Pinning:
    """Executor for `check_copy`: pins the object's memory in pieces before every copy."""

    def __init__(
        self,
        gpu: FakeGpu,
        path: Path | None,
        host_bytes: int,
        cuts: tuple[int, ...],
        staging_bytes: int,
        margin: int = 4096,
    ) -> None:
        self.gpu, self.path, self.cuts = gpu, path, cuts
        self.host_bytes, self.staging_bytes = host_bytes, staging_bytes
        self.reports: list[Path] = []

    def copy_blocks(
        self, spec: CopySpec, direction: Direction, block_ids: Int64Array, places: Int64Array
    ) -> None:
        driver = FakeCudaDriver(self.gpu)
        start = int(places.min())
        end = int(places.max()) + spec.object_extent_bytes
        edges = [0, *sorted(c for c in self.cuts if 0 < c < end - start), end - start]
        pieces = tuple(Piece(low, high - low) for low, high in pairwise(edges))
        pinned = PinnedHost(driver, start, pieces)
        copier = DeviceCopier(
            CPU,
            pinned,
            kernel=FakeKernel(self.gpu),
            driver=driver,
            settings=DeviceSettings(self.path, self.staging_bytes),
        )
        copier.prepare((spec,))
        pending = copier.start(direction, (CopyJob(spec, block_ids, places),))
        pending.synchronize()
        self.reports += [report.path for report in pending.reports]
        copier.close()
        pinned.close()


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(CPU)
    yield made
    made.close()


@given(
    case=copy_cases(unique_ids=True),
    direction=st.sampled_from(Direction),
    path=st.sampled_from((None, *Path)),
    host_pointers=st.booleans(),
    supports_batch=st.booleans(),
    cuts=st.lists(st.integers(1, 4000), max_size=4, unique=True).map(tuple),
    staging_bytes=st.integers(2, 4096),
    seed=st.integers(0, 5),
)
def test_every_path_leaves_the_reference_s_bytes_under_any_legal_order(
    case: CopyCase,
    direction: Direction,
    path: Path | None,
    host_pointers: bool,
    supports_batch: bool,
    cuts: tuple[int, ...],
    staging_bytes: int,
    seed: int,
) -> None:
    gpu = FakeGpu(host_pointers=host_pointers, supports_batch=supports_batch, seed=seed)
    memory = Memory(CPU)
    executor = Pinning(gpu, path, case.object_bytes, cuts, staging_bytes)
    try:
        check_copy(executor, case, direction, memory)
    finally:
        memory.close()
    assert not gpu.leaks()


def _whole_chunk(blocks: int = 4, rows: int = 3, page: int = 32) -> CopySpec:
    """Layers outermost: `[row][block][page]`."""
    case = single_run_case(page, range(blocks), rows=rows, num_blocks=16, place_step=page)
    return replace(
        case.spec,
        row_addresses=tuple(1_000_000 * (row + 1) for row in range(rows)),
        object_row_stride_bytes=blocks * page,
        object_block_stride_bytes=page,
        blocks_per_object=blocks,
    )


def test_a_whole_chunk_is_staged_as_one_copy() -> None:
    spec = _whole_chunk()
    ids = np.array([9, 3, 5, 1])
    batches = list(
        staged_batches(row_slices(spec, 4096), ids, 512 + 32 * np.arange(4), 4096, NO_PIECES)
    )
    assert len(batches) == 1
    (batch,) = batches
    assert batch.spec == spec
    assert batch.block_ids.tolist() == [9, 3, 5, 1]
    assert batch.offsets.tolist() == [0, 32, 64, 96]
    assert (batch.spans.pool.tolist(), batch.spans.objects.tolist()) == ([0], [512])
    assert batch.spans.nbytes.tolist() == [3 * 4 * 32]


def test_a_partial_chunk_is_staged_row_by_row_and_touches_nothing_else() -> None:
    spec = _whole_chunk()
    batches = list(
        staged_batches(
            row_slices(spec, 4096), np.array([7, 8]), np.array([544, 576]), 4096, NO_PIECES
        )
    )
    (batch,) = batches
    assert batch.spans.objects.tolist() == [544, 544 + 128, 544 + 256]
    assert batch.spans.nbytes.tolist() == [64, 64, 64]


@given(
    blocks=st.integers(1, 9),
    rows=st.integers(1, 7),
    page=st.sampled_from((1, 24, 32, 48)),
    half=st.integers(48, 4096),
    block_outermost=st.booleans(),
    chosen=st.data(),
)
def test_no_batch_is_larger_than_a_half_and_every_block_is_in_one_batch_a_slice(
    blocks: int, rows: int, page: int, half: int, block_outermost: bool, chosen: st.DataObject
) -> None:
    spec = _whole_chunk(blocks, rows, page)
    if block_outermost:
        spec = replace(spec, object_row_stride_bytes=page, object_block_stride_bytes=rows * page)
    kept = chosen.draw(st.lists(st.integers(0, blocks - 1), min_size=1, unique=True))
    places = np.array(kept) * spec.object_block_stride_bytes + 4096
    slices = row_slices(spec, half)
    assert slices[0][0] == 0
    assert sum(part.num_rows for _, part in slices) == rows
    assert len({part.num_rows for _, part in slices}) <= 2, "each row count is one compiled kernel"
    seen = 0
    for batch in staged_batches(slices, np.array(kept), places, half, NO_PIECES):
        assert int((batch.spans.pool + batch.spans.nbytes).max()) <= half
        assert int(batch.spans.nbytes.sum()) == batch.block_ids.shape[0] * batch.spec.block_bytes
        extent = batch.offsets + batch.spec.object_extent_bytes
        assert int(batch.offsets.min()) >= 0 and int(extent.max()) <= half + 4 * page * blocks
        seen += batch.block_ids.shape[0] * batch.spec.num_rows
    assert seen == len(kept) * rows


def test_pages_with_holes_in_the_object_are_not_staged() -> None:
    """The holes are another spec's bytes (latent and rope side by side): they stay untouched."""
    spec = replace(_whole_chunk(), n0=4, run_bytes=8, pool_stride0_bytes=8, object_stride0_bytes=8)
    assert row_slices(spec, 4096)
    assert row_slices(replace(spec, object_stride0_bytes=12), 4096) == ()


def test_blocks_that_are_neither_side_by_side_nor_whole_are_not_staged() -> None:
    assert row_slices(replace(_whole_chunk(), object_block_stride_bytes=40), 4096) == ()


def test_a_page_larger_than_a_half_is_not_staged() -> None:
    assert row_slices(_whole_chunk(page=64), 63) == ()


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
