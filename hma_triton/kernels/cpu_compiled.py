"""Copies as numbers for the compiled movers: pieces, alignment, and the choice of the loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np

from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.cpu_fills import Fill, choose_fill
from hma_triton.kernels.cpu_movers import At, Mover, pages_mover, runs_mover
from hma_triton.kernels.cpu_words import LINE_BYTES
from hma_triton.units import cdiv

# A piece of a long run, and what a thread takes at a time.
PIECE_BYTES = 64 << 10
TURN_BYTES = 256 << 10
# Longer runs are pieces of their own; shorter ones move page by page.
LONGEST_SHORT_RUN_BYTES = 2048


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What one spec and direction always need."""

    mover: Mover
    rows: Int64Array
    numbers: Int64Array
    pieces_per_block: int
    # moves pages with lines written whole: what an object's address must be a multiple of
    object_align_bytes: int


@dataclass(frozen=True, slots=True)
class _Counted:
    """Shares of one copy: every thread takes turns from one counter."""

    prepared: _Prepared
    block_ids: Int64Array
    object_addresses: Int64Array
    numbers: Int64Array
    counter: Int64Array

    def run(self) -> None:
        self.prepared.mover(
            self.prepared.rows,
            self.block_ids,
            self.object_addresses,
            self.numbers,
            self.counter,
        )


class CompiledCopy:
    """Copies with the movers of `cpu_movers`."""

    name = "compiled"

    def __init__(self) -> None:
        self._prepared: dict[tuple[CopySpec, Direction], _Prepared] = {}
        # serves every spec, so that one which nobody prepared waits for no compiler
        runs_mover()

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Choose loops and pieces of every spec, and compile what they need."""
        for spec in specs:
            for direction in Direction:
                self._prepared[spec, direction] = _prepare(spec, direction, _is_pages(spec))

    def way_of(self, spec: CopySpec, direction: Direction) -> str:
        """`compiled, runs` or `compiled, pages by` the fill."""
        if (spec, direction) not in self._prepared or not _is_pages(spec):
            return "compiled, runs"
        return f"compiled, pages by {_fill(spec, direction).name.lower()}"

    def shares(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> _Counted:
        """The copy of at least one block."""
        prepared = self._prepared.get((spec, direction)) or _prepare(spec, direction, False)
        numbers = prepared.numbers.copy()
        numbers[At.NUM_PIECES] = block_ids.shape[0] * prepared.pieces_per_block
        align = prepared.object_align_bytes
        if align > 1 and int(np.bitwise_or.reduce(object_addresses)) % align:
            numbers[At.FILL] = Fill.ANY
        counter = np.zeros(LINE_BYTES // 8, dtype=np.int64)
        return _Counted(prepared, block_ids, object_addresses, numbers, counter)


def _is_pages(spec: CopySpec) -> bool:
    return not spec.is_single_run and spec.run_bytes <= LONGEST_SHORT_RUN_BYTES


def _prepare(spec: CopySpec, direction: Direction, by_pages: bool) -> _Prepared:
    if by_pages:
        # whole outer runs, about a piece's bytes of them
        outer_bytes = spec.n1 * spec.run_bytes
        length = min(spec.n0, max(1, PIECE_BYTES // outer_bytes))
        per_page, per_run = cdiv(spec.n0, length), 1
        piece_bytes = length * outer_bytes
        fill = _fill(spec, direction)
    else:
        length = min(spec.run_bytes, PIECE_BYTES)
        per_run = cdiv(spec.run_bytes, length)
        per_page = spec.n0 * spec.n1 * per_run
        piece_bytes = length
        fill = Fill.ANY
    numbers = np.zeros(len(At), dtype=np.int64)
    for at, value in (
        (At.TO_POOL, direction is Direction.RETRIEVE),
        (At.FILL, fill),
        (At.PIECES_PER_TURN, max(1, TURN_BYTES // piece_bytes)),
        (At.PIECES_PER_PAGE, per_page),
        (At.PIECES_PER_RUN, per_run),
        (At.PIECE_LENGTH, length),
        (At.RUN_BYTES, spec.run_bytes),
        (At.COUNT0, spec.n0),
        (At.COUNT1, spec.n1),
        (At.BLOCK_STRIDE, spec.block_stride_bytes),
        (At.ROW_STRIDE, spec.object_row_stride_bytes),
        (At.POOL_STRIDE0, spec.pool_stride0_bytes),
        (At.OBJECT_STRIDE0, spec.object_stride0_bytes),
        (At.POOL_STRIDE1, spec.pool_stride1_bytes),
        (At.OBJECT_STRIDE1, spec.object_stride1_bytes),
    ):
        numbers[at] = value
    checks_objects = fill is not Fill.ANY and direction is Direction.STORE
    return _Prepared(
        mover=pages_mover() if by_pages else runs_mover(),
        rows=np.array(spec.row_addresses, dtype=np.int64),
        numbers=numbers,
        pieces_per_block=spec.num_rows * per_page,
        object_align_bytes=LINE_BYTES if checks_objects else 1,
    )


def _fill(spec: CopySpec, direction: Direction) -> Fill:
    """The loop for a page of short runs, objects taken to lie on whole lines."""
    starts: list[int]
    if direction is Direction.STORE:
        axes = [(spec.object_stride0_bytes, spec.n0), (spec.object_stride1_bytes, spec.n1)]
        starts = [spec.object_row_stride_bytes] if spec.num_rows > 1 else []
    else:
        axes = [(spec.pool_stride0_bytes, spec.n0), (spec.pool_stride1_bytes, spec.n1)]
        starts = [*spec.row_addresses, spec.block_stride_bytes]
    # as in `move_pages`: destination runs adjoin along the smaller step, axis 1 on a tie
    inner_is_0 = axes[0][0] < axes[1][0]
    (inner_step, inner), (outer_step, outer) = axes if inner_is_0 else axes[::-1]
    if outer > 1:
        starts.append(outer_step)
    if inner > 1 and spec.run_bytes % LINE_BYTES == 0:
        starts.append(inner_step)
    lines_are_whole = reduce(or_, starts, 0) % LINE_BYTES == 0
    return choose_fill(
        spec.run_bytes, lines_are_whole, inner if inner_step == spec.run_bytes else 1
    )
