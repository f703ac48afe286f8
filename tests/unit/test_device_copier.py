"""The device executor over the fake driver: bytes under every legal order, and lifetimes."""

from __future__ import annotations

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

from hma_triton.host_memory import Piece, PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.runs import NO_PIECES
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
