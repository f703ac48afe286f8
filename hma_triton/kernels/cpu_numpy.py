"""The copy of CPU pools without numba: numpy's own strided assignment over the same addresses."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array, merge_adjacent
from hma_triton.units import cdiv

# Neighbours are joined up to this length, and longer pages divided, so that threads end together.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class _Memory:
    """Strided bytes at an address, for numpy to view without a copy."""

    __array_interface__: dict[str, object]


def _view(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    return np.asarray(
        _Memory(
            {
                "data": (address, False),
                "shape": shape,
                "strides": strides,
                "typestr": "|u1",
                "version": 3,
            }
        )
    )


@dataclass(frozen=True, slots=True)
class _Queued:
    """Shares of one copy: every thread takes the next piece until none is left."""

    spec: CopySpec
    direction: Direction
    # joined neighbours: first ids [m], first addresses [m], lengths in blocks [m]
    block_ids: Int64Array
    object_addresses: Int64Array
    lengths: Int64Array
    pieces_per_page: int
    turns: Iterator[int]
    lock: threading.Lock

    def run(self) -> None:
        spec, count = self.spec, self.block_ids.shape[0]
        while True:
            with self.lock:
                turn = next(self.turns, None)
            if turn is None:
                return
            page, piece = divmod(turn, self.pieces_per_page)
            row, item = divmod(page, count)
            pool = spec.row_addresses[row] + int(self.block_ids[item]) * spec.block_stride_bytes
            place = int(self.object_addresses[item]) + row * spec.object_row_stride_bytes
            run_bytes = int(self.lengths[item]) * spec.run_bytes
            start = piece * PIECE_BYTES if self.pieces_per_page > 1 else 0
            end = start + PIECE_BYTES if self.pieces_per_page > 1 else run_bytes
            self._copy(pool + start, place + start, min(end, run_bytes) - start)

    def _copy(self, pool: int, place: int, run_bytes: int) -> None:
        spec = self.spec
        shape = (spec.n0, spec.n1, run_bytes)
        page = _view(pool, shape, (spec.pool_stride0_bytes, spec.pool_stride1_bytes, 1))
        held = _view(place, shape, (spec.object_stride0_bytes, spec.object_stride1_bytes, 1))
        if self.direction is Direction.STORE:
            held[...] = page
        else:
            page[...] = held


class NumpyCopy:
    """Copies page by page: short neighbours at once, long pages in pieces."""

    name = "numpy"

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Nothing to compile."""

    def way_of(self, spec: CopySpec, direction: Direction) -> str:
        """The name: there is one way."""
        return self.name

    def shares(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> _Queued:
        """The copy of at least one block."""
        limit = max(1, PIECE_BYTES // spec.run_bytes)
        joined = [
            merge_adjacent(spec, block_ids[i : i + limit], object_addresses[i : i + limit])
            for i in range(0, block_ids.shape[0], limit)
        ]
        ids, places, lengths = (np.concatenate(parts) for parts in zip(*joined, strict=True))
        pieces = cdiv(spec.run_bytes, PIECE_BYTES) if spec.is_single_run else 1
        turns = iter(range(spec.num_rows * ids.shape[0] * pieces))
        return _Queued(spec, direction, ids, places, lengths, pieces, turns, threading.Lock())
