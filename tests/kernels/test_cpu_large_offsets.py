"""Offsets beyond 2 GiB and 4 GiB, over mappings that are backed only where they are touched."""

from __future__ import annotations

import numpy as np
import pytest
from support.guarded_memory import GuardedBuffer

from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.cpu import CpuCopier

GIB = 1 << 30
DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.name.lower())


def single_run(row: int, block_stride: int, num_blocks: int, run_bytes: int) -> CopySpec:
    return CopySpec(
        kernel_group_index=0,
        row_addresses=(row,),
        block_stride_bytes=block_stride,
        num_blocks=num_blocks,
        region_offset_bytes=0,
        object_row_stride_bytes=run_bytes,
        object_block_stride_bytes=run_bytes,
        blocks_per_object=1,
        n0=1,
        pool_stride0_bytes=run_bytes,
        object_stride0_bytes=run_bytes,
        n1=1,
        pool_stride1_bytes=run_bytes,
        object_stride1_bytes=run_bytes,
        run_bytes=run_bytes,
    )


@DIRECTIONS
@pytest.mark.parametrize("start", [2 * GIB - 100, 4 * GIB - 100])
def test_an_object_across_the_limit(copier: CpuCopier, direction: Direction, start: int) -> None:
    """Case 98: 200 bytes from 2**31 - 100 on; and the same at 2**32."""
    arena = GuardedBuffer(4 * GIB + GIB // 2)
    pool = np.arange(200, dtype=np.uint8)
    spec = single_run(pool.ctypes.data, 200, 1, 200)
    place = np.array([arena.address + start], dtype=np.int64)
    ids = np.zeros(1, dtype=np.int64)
    held = arena.live[start : start + 200]
    if direction is Direction.STORE:
        copier.copy_blocks(spec, direction, ids, place)
        assert held.tolist() == list(range(200))
        assert not arena.live[start - 64 : start].any()
        assert not arena.live[start + 200 : start + 264].any()
    else:
        held[:] = np.arange(200)[::-1]
        copier.copy_blocks(spec, direction, ids, place)
        assert pool.tolist() == [*range(199, -1, -1)]
    del held
    arena.close()


@DIRECTIONS
def test_blocks_beyond_both_limits(copier: CpuCopier, direction: Direction) -> None:
    """Blocks of 1 MiB: ids 2047, 2048 and 4096 start before, at and after the limits."""
    step, ids = 1 << 20, np.array([2047, 2048, 4096, 0], dtype=np.int64)
    arena = GuardedBuffer(4097 * step)
    run = 300_000
    spec = single_run(arena.address, step, 4097, run)
    copier.prepare([spec])
    noise = np.random.default_rng(7).integers(0, 256, (4, run), dtype=np.uint8)
    held = np.zeros((4, run), dtype=np.uint8)
    places = held.ctypes.data + np.arange(4, dtype=np.int64) * run
    blocks = [arena.live[i * step : i * step + run] for i in ids.tolist()]
    if direction is Direction.STORE:
        for block, row in zip(blocks, noise, strict=True):
            block[:] = row
        copier.copy_blocks(spec, direction, ids, places)
        assert np.array_equal(held, noise)
    else:
        held[:] = noise
        copier.copy_blocks(spec, direction, ids, places)
        for block, row in zip(blocks, noise, strict=True):
            assert np.array_equal(block, row)
    del blocks
    arena.close()


def test_strides_inside_a_page_beyond_the_limit(copier: CpuCopier) -> None:
    """Runs 3 GiB apart in a page, as a plane axis outside the blocks would have them."""
    arena = GuardedBuffer(3 * GIB + 4096)
    arena.live[:128] = 1
    arena.live[3 * GIB : 3 * GIB + 128] = 2
    spec = CopySpec(
        kernel_group_index=0,
        row_addresses=(arena.address,),
        block_stride_bytes=256,
        num_blocks=1,
        region_offset_bytes=0,
        object_row_stride_bytes=256,
        object_block_stride_bytes=256,
        blocks_per_object=1,
        n0=2,
        pool_stride0_bytes=3 * GIB,
        object_stride0_bytes=128,
        n1=2,
        pool_stride1_bytes=64,
        object_stride1_bytes=64,
        run_bytes=64,
    )
    copier.prepare([spec])
    held = np.zeros(256 + 64, dtype=np.uint8)
    place = np.array([held.ctypes.data + -held.ctypes.data % 64], dtype=np.int64)
    copier.copy_blocks(spec, Direction.STORE, np.zeros(1, dtype=np.int64), place)
    start = int(place[0]) - held.ctypes.data
    assert held[start : start + 256].tolist() == [1] * 128 + [2] * 128
    arena.close()
