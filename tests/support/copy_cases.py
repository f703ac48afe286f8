"""Copy specs by hand and at random, and the one check that every executor must pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from hypothesis import strategies as st
from support.guarded_memory import Bytes, DeviceBuffer, GuardedBuffer, Memory

from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.reference import ReferenceCopier

POISON = 0xEE


class Executor(Protocol):
    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None: ...


@dataclass(frozen=True)
class CopyCase:
    """A copy whose addresses are still offsets: rows into a pool, places into one host buffer."""

    spec: CopySpec
    pool_bytes: int
    block_ids: tuple[int, ...]
    places: tuple[int, ...]
    object_bytes: int
    pool_misalign: int = 0
    object_misalign: int = 0
    at_end: bool = False


def single_run_case(
    run_bytes: int,
    block_ids: Sequence[int],
    *,
    rows: int = 2,
    num_blocks: int = 70,
    padding: int = 0,
    place_step: int = 0,
    **placement: int | bool,
) -> CopyCase:
    """Pages of one run; `padding` bytes between pool pages, places `place_step` apart."""
    stride = run_bytes + padding
    row_step = num_blocks * stride
    place_step = place_step or rows * run_bytes
    spec = CopySpec(
        kernel_group_index=0,
        row_addresses=tuple(row * row_step for row in range(rows)),
        block_stride_bytes=stride,
        num_blocks=num_blocks,
        region_offset_bytes=0,
        object_row_stride_bytes=run_bytes,
        object_block_stride_bytes=place_step,
        blocks_per_object=max(1, len(block_ids)),
        n0=1,
        pool_stride0_bytes=run_bytes,
        object_stride0_bytes=run_bytes,
        n1=1,
        pool_stride1_bytes=run_bytes,
        object_stride1_bytes=run_bytes,
        run_bytes=run_bytes,
    )
    return CopyCase(
        spec=spec,
        pool_bytes=rows * row_step - padding,
        block_ids=tuple(block_ids),
        places=tuple(i * place_step for i in range(len(block_ids))),
        object_bytes=max(1, (len(block_ids) - 1) * place_step + rows * run_bytes),
        **placement,  # type: ignore[arg-type]
    )


def _random_bytes(count: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def check_copy(executor: Executor, case: CopyCase, direction: Direction, memory: Memory) -> None:
    """Copy once, and compare every byte of both sides with what the reference leaves.

    The side that is written starts as poison, the other as noise; memory outside both is guarded.
    """
    pool = memory.buffer(case.pool_bytes, case.pool_misalign, at_end=case.at_end)
    host = memory.buffer(case.object_bytes, case.object_misalign, at_end=case.at_end, host=True)
    source, target = (pool, host) if direction is Direction.STORE else (host, pool)
    source.fill(_random_bytes(source.extent, seed=len(case.block_ids)))
    target.fill(np.full(target.extent, POISON, dtype=np.uint8))
    expected = {side: side.snapshot() for side in (pool, host)}
    _run(
        ReferenceCopier(), case, direction, *(_twin(side, expected[side]) for side in (pool, host))
    )
    _run(executor, case, direction, pool.address, host.address)
    for name, side in (("pool", pool), ("object", host)):
        found = side.snapshot()
        wrong = np.flatnonzero(found != expected[side])
        assert not wrong.size, (
            f"{direction.name}: {wrong.size} bytes of the {name} differ, first at "
            f"{wrong[0] - side.start} of {side.nbytes}: {found[wrong[0]]:#x} for "
            f"{expected[side][wrong[0]]:#x}"
        )


def _twin(side: GuardedBuffer | DeviceBuffer, copy: Bytes) -> int:
    return int(copy.ctypes.data) + side.start


def _run(executor: Executor, case: CopyCase, direction: Direction, pool: int, host: int) -> None:
    rows = tuple(pool + offset for offset in case.spec.row_addresses)
    executor.copy_blocks(
        replace(case.spec, row_addresses=rows),
        direction,
        np.asarray(case.block_ids, dtype=np.int64),
        np.asarray(case.places, dtype=np.int64) + host,
    )


@dataclass(frozen=True)
class _Axes:
    """Steps of the axes (outer, row, n0, n1) that nest in some order without overlap."""

    steps: tuple[int, int, int, int]
    extent: int


@st.composite
def _nested_axes(
    draw: st.DrawFn, sizes: tuple[int, int, int, int], run_bytes: int, grain: int
) -> _Axes:
    """Axes in any order, innermost first, with gaps; every step is a multiple of `grain`."""
    order = draw(st.permutations(range(4)))
    steps = [0] * 4
    extent = run_bytes
    for axis in order:
        step = extent + draw(st.sampled_from((0, 0, 1, 4, 48)))
        steps[axis] = -(-step // grain) * grain
        extent = (sizes[axis] - 1) * steps[axis] + extent
    return _Axes((steps[0], steps[1], steps[2], steps[3]), extent)


@st.composite
def copy_cases(draw: st.DrawFn, *, unique_ids: bool = False) -> CopyCase:
    """Any layout of pool and object that does not overlap itself."""
    run_bytes = draw(
        st.one_of(
            st.sampled_from((1, 2, 3, 4, 8, 12, 16, 24, 96, 131, 132, 576, 656)),
            st.integers(1, 200),
        )
    )
    rows, n0, n1 = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    num_blocks = draw(st.integers(1, 6))
    ids = draw(st.lists(st.integers(0, num_blocks - 1), min_size=1, max_size=6, unique=unique_ids))
    # what everything is aligned to: decides the width of the accesses
    grain = draw(st.sampled_from((1, 2, 4, 8, 16, 16, 64)))
    pool = draw(_nested_axes((num_blocks, rows, n0, n1), run_bytes, grain))
    host = draw(_nested_axes((len(ids), rows, n0, n1), run_bytes, grain))
    row_order = draw(st.permutations(range(rows)))
    place_order = draw(st.permutations(range(len(ids))))
    misaligns = st.sampled_from((0, 0, 0, 0, 0, 16, 8640, grain, 132, 1))
    spec = CopySpec(
        kernel_group_index=0,
        row_addresses=tuple(row * pool.steps[1] for row in row_order),
        block_stride_bytes=pool.steps[0],
        num_blocks=num_blocks,
        region_offset_bytes=0,
        object_row_stride_bytes=host.steps[1],
        object_block_stride_bytes=host.steps[0],
        blocks_per_object=len(ids),
        n0=n0,
        pool_stride0_bytes=pool.steps[2],
        object_stride0_bytes=host.steps[2],
        n1=n1,
        pool_stride1_bytes=pool.steps[3],
        object_stride1_bytes=host.steps[3],
        run_bytes=run_bytes,
    )
    return CopyCase(
        spec=spec,
        pool_bytes=pool.extent,
        block_ids=tuple(ids),
        places=tuple(place * host.steps[0] for place in place_order),
        object_bytes=host.extent,
        pool_misalign=draw(misaligns),
        object_misalign=draw(misaligns),
        at_end=draw(st.booleans()),
    )
