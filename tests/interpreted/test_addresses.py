"""Addresses that must not go wrong: beyond 2 GiB, past the end of an id list, outside a page."""

from __future__ import annotations

import faulthandler
import multiprocessing
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.copy_cases import single_run_case
from support.guarded_memory import PAGE_BYTES, GuardedBuffer, Memory

from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.block_copy import launch_block_copy
from hma_triton.kernels.specialize import specialize
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.tuning import KernelConfig

GIB = 1 << 30
RUN = 64


def far_spec(
    *,
    pool_step0: int = RUN,
    object_step0: int = RUN,
    rows: tuple[int, ...] = (0,),
    row_step: int = 2 * RUN,
    block_step: int = 2 * RUN,
    num_blocks: int = 1,
) -> CopySpec:
    """Two runs of 64 bytes a page, every step as asked."""
    spec = single_run_case(RUN, (0,)).spec
    return replace(
        spec,
        row_addresses=rows,
        num_blocks=num_blocks,
        block_stride_bytes=block_step,
        object_row_stride_bytes=row_step,
        n0=2,
        pool_stride0_bytes=pool_step0,
        object_stride0_bytes=object_step0,
    )


@pytest.mark.parametrize("step", [2 * GIB - 64, 2 * GIB + 64, 3 * GIB, 4 * GIB + 128])
@pytest.mark.parametrize("axis", ["block", "run_in_pool", "run_in_object", "row_in_object"])
def test_no_offset_wraps(copier: TritonCopier, memory: Memory, axis: str, step: int) -> None:
    """Case 98: each step alone below, at and above what 31 and 32 bits hold."""
    specs = {
        "block": far_spec(block_step=step, num_blocks=2),
        "run_in_pool": far_spec(pool_step0=step),
        "run_in_object": far_spec(object_step0=step),
        "row_in_object": far_spec(rows=(0, 2 * RUN), row_step=step),
    }
    spec = specs[axis]
    block = spec.num_blocks - 1
    pool = memory.buffer(block * spec.block_stride_bytes + spec.pool_extent_bytes + 2 * RUN)
    host = memory.buffer(spec.object_extent_bytes, host=True)
    runs = [
        (
            row_offset + block * spec.block_stride_bytes + a * spec.pool_stride0_bytes,
            index * spec.object_row_stride_bytes + a * spec.object_stride0_bytes,
        )
        for index, row_offset in enumerate(spec.row_addresses)
        for a in range(2)
    ]
    noise = np.random.default_rng(step).integers(1, 256, (len(runs), RUN), dtype=np.uint8)
    for (at, _), content in zip(runs, noise, strict=True):
        pool.write(at, content)
    spec = replace(spec, row_addresses=tuple(pool.address + row for row in spec.row_addresses))
    ids, places = np.array([block]), np.array([host.address])
    copier.copy_blocks(spec, Direction.STORE, ids, places)
    for (_, place), content in zip(runs, noise, strict=True):
        assert (host.window(place, RUN) == content).all()
    for at, _ in runs:
        pool.write(at, np.zeros(RUN, dtype=np.uint8))
    copier.copy_blocks(spec, Direction.RETRIEVE, ids, places)
    for (at, _), content in zip(runs, noise, strict=True):
        assert (pool.window(at, RUN) == content).all()


@pytest.mark.parametrize("count", [1, 17, 31])
def test_ids_and_addresses_end_at_a_guard(device: torch.device, memory: Memory, count: int) -> None:
    """Case 113: a tile reaches beyond the lists, whose next byte is not accessible."""
    case = single_run_case(16, tuple(range(count)), rows=1)
    pool, host = memory.buffer(case.pool_bytes), memory.buffer(case.object_bytes, host=True)
    pool.fill(np.random.default_rng(count).integers(0, 256, pool.extent, dtype=np.uint8))
    tables = []
    for values in (
        [pool.address],
        list(case.block_ids),
        [host.address + place for place in case.places],
    ):
        nbytes = 8 * len(values)
        guarded = memory.buffer(nbytes, nbytes % 16, at_end=True)
        guarded.write(0, np.array(values, dtype=np.int64).view(np.uint8))
        assert device.type != "cpu" or (guarded.address + nbytes) % PAGE_BYTES == 0
        tables.append(guarded.tensor(torch.int64))
    special, steps = specialize(
        replace(case.spec, row_addresses=(pool.address,)),
        Direction.STORE,
        16,
        KernelConfig(tile_words=32, warps=1, stages=1, program_cap=2),
    )
    launch_block_copy(special, steps, *tables, program_cap=2)
    assert (host.window(0, 16 * count) == pool.window(0, 16 * count)).all()


def _copy_beside_guards(pool_shift: int, host_shift: int) -> None:
    # the crash is meant: no report of it
    faulthandler.disable()
    pool, host = (GuardedBuffer(48, at_end=True) for _ in range(2))
    spec = single_run_case(48, (0,), rows=1).spec
    spec = replace(spec, row_addresses=(pool.address + pool_shift,))
    place = np.array([host.address + host_shift])
    TritonCopier().copy_blocks(spec, Direction.STORE, np.array([0]), place)


@pytest.mark.parametrize(
    ("pool_shift", "host_shift", "ends_with"),
    [(0, 0, 0), (1, 0, -signal.SIGSEGV), (0, 1, -signal.SIGSEGV)],
    ids=["inside", "reads_beyond", "writes_beyond"],
)
def test_the_guards_notice(
    device: torch.device, pool_shift: int, host_shift: int, ends_with: int
) -> None:
    """One byte beyond a buffer ends the process: so no other test passes by luck."""
    if device.type != "cpu":
        # there the margins are compared instead, see support.guarded_memory
        return
    child = multiprocessing.get_context("fork").Process(
        target=_copy_beside_guards, args=(pool_shift, host_shift)
    )
    child.start()
    child.join(timeout=60)
    assert child.exitcode == ends_with
