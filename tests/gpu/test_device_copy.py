"""The device executor on a device: bytes by every path, order on streams, variants, launches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.copy_cases import CopyCase, check_copy, single_run_case
from support.guarded_memory import Memory

from hma_triton.cli.gpu_ipc import NUM_BLOCKS, PAGE_BYTES, page_spec
from hma_triton.cli.gpu_stage import noise
from hma_triton.cuda_driver import CudaDriver, PointerKind
from hma_triton.host_memory import HostMemory, PinnedHost, split_pieces
from hma_triton.kernels import block_copy
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.triton_copier import TritonCopier

SLOW_CYCLES = 500_000_000


def _copier(device: torch.device, pinned: PinnedHost | None, path: Path | None = None,
            staging_bytes: int = 32 << 20) -> DeviceCopier:  # fmt: skip
    settings = DeviceSettings(path, staging_bytes)
    return DeviceCopier(device, pinned, kernel=TritonCopier(device), settings=settings)


class Rig:
    """A pool of 128 pages of 64 KiB, an arena in small pieces, a copier."""

    def __init__(self, device: torch.device, driver: CudaDriver, path: Path | None,
                 staging_bytes: int = 1 << 20) -> None:  # fmt: skip
        self.device, self.driver = device, driver
        self.pool = noise(NUM_BLOCKS * PAGE_BYTES, 1).to(device)
        self.memory = HostMemory(NUM_BLOCKS * PAGE_BYTES)
        # 20 pages and a half: runs and blocks meet edges
        pieces = split_pieces(self.memory.nbytes, 20 * PAGE_BYTES + PAGE_BYTES // 2)
        self.pinned = PinnedHost(driver, self.memory.address, pieces)
        self.copier = _copier(device, self.pinned, path, staging_bytes)
        self.spec = page_spec(self.pool.data_ptr())
        self.copier.prepare((self.spec,))
        self.ids = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int64)
        self.host = torch.frombuffer(self.memory.buffer, dtype=torch.uint8)

    def job(self, chosen: slice = slice(None)) -> CopyJob:
        ids = self.ids[chosen]
        return CopyJob(self.spec, ids, self.memory.address + PAGE_BYTES * ids)

    def close(self) -> None:
        del self.host
        self.copier.close()
        self.pinned.close()
        self.memory.close()


@pytest.fixture(params=[*Path, None], ids=lambda path: path.value if path else "auto")
def rig(request: pytest.FixtureRequest, device: torch.device, driver: CudaDriver) -> Iterator[Rig]:
    made = Rig(device, driver, request.param)
    yield made
    made.close()


def test_pages_come_back_over_pieces_that_cut_them(rig: Rig) -> None:
    before = rig.pool.clone()
    rig.copier.start(Direction.STORE, (rig.job(),)).synchronize()
    assert torch.equal(rig.host, before.cpu())
    rig.pool.fill_(0xEE)
    rig.copier.start(Direction.RETRIEVE, (rig.job(),)).synchronize()
    assert torch.equal(rig.pool, before)


def test_a_transfer_follows_the_caller_s_stream_without_an_event(rig: Rig) -> None:
    """In one process: the pages that the current stream is still writing are the ones stored."""
    new = noise(rig.memory.nbytes, 2).to(rig.device)
    torch.cuda._sleep(SLOW_CYCLES)
    rig.pool.copy_(new)
    rig.copier.start(Direction.STORE, (rig.job(),)).synchronize()
    assert torch.equal(rig.host, new.cpu())


def test_the_engine_s_next_read_waits_on_its_stream_alone(rig: Rig) -> None:
    rig.host.copy_(noise(rig.memory.nbytes, 3))
    engine = torch.cuda.Stream(rig.device)
    pending = rig.copier.start(Direction.RETRIEVE, (rig.job(),))
    pending.wait_on(engine.cuda_stream)
    with torch.cuda.stream(engine):
        seen = rig.pool.clone()
    engine.synchronize()
    assert torch.equal(seen.cpu(), noise(rig.memory.nbytes, 3))
    pending.synchronize()


def test_a_transfer_does_not_wait_for_other_streams(rig: Rig) -> None:
    """No device-wide synchronisation: it ends while another stream is busy."""
    other = torch.cuda.Stream(rig.device)
    busy = torch.cuda.Event()
    rig.copier.start(Direction.STORE, (rig.job(),)).synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(8 * SLOW_CYCLES)
        busy.record()
    rig.copier.start(Direction.STORE, (rig.job(),)).synchronize()
    assert not busy.query()
    other.synchronize()


@pytest.mark.parametrize("path", [Path.STAGED, Path.ZERO_COPY])
def test_case_95_staging_between_back_to_back_transfers_on_two_streams(
    device: torch.device, driver: CudaDriver, path: Path
) -> None:
    """1,000 rounds, both directions in flight, more staging than the buffer's halves hold."""
    rig = Rig(device, driver, path, staging_bytes=4 * PAGE_BYTES)
    before = rig.pool.clone()
    first, second = slice(0, 64), slice(64, 128)
    rig.copier.start(Direction.STORE, (rig.job(),)).synchronize()
    for _ in range(1000):
        pending = [
            rig.copier.start(Direction.STORE, (rig.job(first),)),
            rig.copier.start(Direction.RETRIEVE, (rig.job(second),)),
            rig.copier.start(Direction.STORE, (rig.job(first),)),
        ]
        for copy in pending:
            copy.synchronize()
    assert torch.equal(rig.pool, before)
    assert torch.equal(rig.host, before.cpu())
    rig.close()


@pytest.mark.parametrize("offset", [0, 4, 8, 16, 132, 8640])
@pytest.mark.parametrize("direction", Direction)
def test_case_106_offset_views_are_right_and_compile_nothing_new(
    device: torch.device, offset: int, direction: Direction
) -> None:
    kernel = TritonCopier(device)
    copier = DeviceCopier(device, kernel=kernel, settings=DeviceSettings(Path.ZERO_COPY))
    case = replace(single_run_case(4096, range(20)), pool_misalign=offset, object_misalign=offset)
    memory = Memory(device)
    check_copy(copier, case, direction, memory)
    compiled = _compiled()
    check_copy(copier, case, direction, memory)
    assert _compiled() == compiled
    memory.close()
    copier.close()


def _compiled() -> int:
    caches = block_copy._block_copy_kernel.device_caches.values()
    return sum(len(cache[0]) for cache in caches)


def test_case_110_counts_and_far_steps_compile_nothing_new(device: torch.device) -> None:
    copier = _copier(device, None, Path.ZERO_COPY)
    compiled = None
    for count in (1, 3, 16, 17, 32):
        memory = Memory(device)
        check_copy(copier, single_run_case(4096, range(count), rows=1), Direction.STORE, memory)
        memory.close()
        if compiled is None:
            compiled = _compiled()
        assert _compiled() == compiled
    copier.close()


def test_steps_beyond_two_and_four_gibibytes(device: torch.device, driver: CudaDriver) -> None:
    """K10: pages 3 GiB apart, by every path."""
    step, page = 3 << 30, 4096
    pool = torch.zeros(2 * step + page, dtype=torch.uint8, device=device)
    for block in range(3):
        pool[block * step : block * step + page] = 10 + block
    spec = replace(
        page_spec(pool.data_ptr()), block_stride_bytes=step, num_blocks=3, run_bytes=page,
        object_block_stride_bytes=page, blocks_per_object=3,
    )  # fmt: skip
    memory = HostMemory(3 * page)
    pinned = PinnedHost(driver, memory.address, memory.pieces)
    host = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    for path in Path:
        host.fill_(0xEE)
        copier = _copier(device, pinned, path)
        copier.prepare((spec,))
        ids = np.array([2, 0, 1])
        copier.copy_blocks(spec, Direction.STORE, ids, memory.address + page * np.arange(3))
        assert host[: 3 * page].view(3, page)[:, 0].tolist() == [12, 10, 11]
        copier.close()
    del host
    pinned.close()
    memory.close()


def test_case_77_a_thread_without_a_context_can_do_everything(
    device: torch.device, driver: CudaDriver
) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            rig = Rig(device, CudaDriver(device.index or 0), None)
            rig.copier.start(Direction.STORE, (rig.job(),)).synchronize()
            assert torch.equal(rig.host, rig.pool.cpu())
            rig.close()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_case_109_one_launch_for_a_transfer_of_many_layers(
    device: torch.device, driver: CudaDriver
) -> None:
    kernel = TritonCopier(device)
    memory = HostMemory(60 * 16 * 4096)
    pinned = PinnedHost(driver, memory.address, memory.pieces)
    copier = DeviceCopier(device, pinned, kernel=kernel, settings=DeviceSettings(Path.ZERO_COPY))
    pool = torch.zeros(60, 16, 4096, dtype=torch.uint8, device=device)
    spec = replace(
        single_run_case(4096, range(16), rows=60, num_blocks=16).spec,
        row_addresses=tuple(pool[layer].data_ptr() for layer in range(60)),
    )
    copier.prepare((spec,))
    places = memory.address + 60 * 4096 * np.arange(16)
    for direction in Direction:
        before = kernel.launch_count
        copier.copy_blocks(spec, direction, np.arange(16), places)
        assert kernel.launch_count == before + 1
    copier.close()
    pinned.close()
    memory.close()


def test_pageable_pinned_and_device_memory_are_told_apart(
    device: torch.device, driver: CudaDriver
) -> None:
    pageable = torch.zeros(4096, dtype=torch.uint8)
    pinned = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
    own = torch.zeros(4096, dtype=torch.uint8, device=device)
    assert driver.pointer(pageable.data_ptr())[0] is PointerKind.PAGEABLE
    assert driver.pointer(pinned.data_ptr() + 100)[0] is PointerKind.PINNED
    assert driver.pointer(own.data_ptr() + 100) == (PointerKind.DEVICE, own.data_ptr() + 100)


@pytest.mark.parametrize("direction", Direction)
def test_pageable_objects_are_served(device: torch.device, direction: Direction) -> None:
    copier = _copier(device, None)
    pool = noise(8 * 4096, 1).to(device)
    host = noise(8 * 4096, 2)
    expected = pool.cpu() if direction is Direction.STORE else host.clone()
    spec = replace(single_run_case(4096, range(8), rows=1).spec, row_addresses=(pool.data_ptr(),))
    copier.prepare((spec,))
    copier.copy_blocks(spec, direction, np.arange(8), host.data_ptr() + 4096 * np.arange(8))
    assert torch.equal(host, expected)
    assert torch.equal(pool.cpu(), expected)
    copier.close()


@pytest.mark.parametrize("path", Path)
def test_a_case_of_every_odd_size(device: torch.device, path: Path) -> None:
    """Runs that are no multiple of a word keep their tail."""
    for run_bytes in (1, 7, 132, 656, 4100):
        case: CopyCase = single_run_case(run_bytes, [3, 1, 2, 60], padding=12)
        for direction in Direction:
            memory = Memory(device)
            copier = _copier(device, None, path)
            check_copy(copier, case, direction, memory)
            copier.close()
            memory.close()
