"""The two compiled loops that expand a copy spec, called by every thread of a copy.

The threads of one copy share a counter and take turns of pieces from it until none is left, so
both cores end together however busy they are. `move_runs` serves every spec; `move_pages` serves
pages of many short runs, where it is faster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba import types

from hma_triton.kernels.addressing import Int64Array
from hma_triton.kernels.cpu_fills import fill_pages
from hma_triton.kernels.cpu_runs import STREAMS, copy_four_runs, copy_run
from hma_triton.kernels.cpu_words import LINE_BYTES, fence, prefetch_line, take


class At(IntEnum):
    """Where each number of a copy stands in the array that a mover reads; bytes or counts."""

    TO_POOL = 0
    FILL = 1
    NUM_PIECES = 2
    PIECES_PER_TURN = 3
    PIECES_PER_PAGE = 4
    PIECES_PER_RUN = 5
    # `move_runs`: bytes of a piece. `move_pages`: its runs along axis 0.
    PIECE_LENGTH = 6
    RUN_BYTES = 7
    COUNT0 = 8
    COUNT1 = 9
    BLOCK_STRIDE = 10
    ROW_STRIDE = 11
    POOL_STRIDE0 = 12
    OBJECT_STRIDE0 = 13
    POOL_STRIDE1 = 14
    OBJECT_STRIDE1 = 15


_TO_POOL, _FILL, _NUM_PIECES, _PER_TURN, _PER_PAGE, _PER_RUN, _PIECE_LENGTH, _RUN_BYTES = range(8)
_COUNT0, _COUNT1, _BLOCK_STRIDE, _ROW_STRIDE, _POOL0, _OBJECT0, _POOL1, _OBJECT1 = range(8, 16)

# Pieces on hand in `move_runs`: the oldest move while the newest's first lines are on their way.
_WINDOW = 2 * STREAMS
_AHEAD_BYTES = 2 * LINE_BYTES


def _make_move_runs(digest: int) -> Callable[..., None]:
    def move_runs(rows: Any, block_ids: Any, objects: Any, at: Any, counter: Any) -> None:
        """Move runs of any length.

        Args:
            rows: int64 [R], address of block 0 of each row.
            block_ids, objects: int64 [n], ids and their object addresses.
            at: int64 [16], see `At`.
            counter: int64 [8], the first is the next piece; one fresh array per copy.
        """
        if not digest:
            return
        count = len(block_ids)
        into, out_of = np.empty(_WINDOW, np.int64), np.empty(_WINDOW, np.int64)
        lengths = np.empty(_WINDOW, np.int64)
        pending, oldest = 0, 0
        per_page, per_run, longest = at[_PER_PAGE], at[_PER_RUN], at[_PIECE_LENGTH]
        while True:
            piece = take(counter.ctypes.data, at[_PER_TURN])
            if piece >= at[_NUM_PIECES]:
                break
            end = min(piece + at[_PER_TURN], at[_NUM_PIECES])
            page, within = divmod(piece, per_page)
            row, item = divmod(page, count)
            while piece < end:
                run, part = divmod(within, per_run)
                run0, run1 = divmod(run, at[_COUNT1])
                pool = rows[row] + block_ids[item] * at[_BLOCK_STRIDE] + part * longest
                pool += run0 * at[_POOL0] + run1 * at[_POOL1]
                place = objects[item] + row * at[_ROW_STRIDE] + part * longest
                place += run0 * at[_OBJECT0] + run1 * at[_OBJECT1]
                newest = (oldest + pending) % _WINDOW
                if at[_TO_POOL]:
                    into[newest], out_of[newest] = pool, place
                else:
                    into[newest], out_of[newest] = place, pool
                    for line in range(0, _AHEAD_BYTES, LINE_BYTES):
                        prefetch_line(pool + line)
                lengths[newest] = min(longest, at[_RUN_BYTES] - part * longest)
                pending += 1
                if pending == _WINDOW:
                    copy_four_runs(into, out_of, lengths, oldest)
                    oldest = (oldest + STREAMS) % _WINDOW
                    pending -= STREAMS
                piece += 1
                within += 1
                if within == per_page:
                    within = 0
                    item += 1
                    if item == count:
                        item = 0
                        row += 1
        while pending >= STREAMS:
            copy_four_runs(into, out_of, lengths, oldest)
            oldest = (oldest + STREAMS) % _WINDOW
            pending -= STREAMS
        for stream in range(oldest, oldest + pending):
            copy_run(into[stream], out_of[stream], lengths[stream])
        fence()

    return move_runs


def _make_move_pages(digest: int) -> Callable[..., None]:
    def move_pages(rows: Any, block_ids: Any, objects: Any, at: Any, counter: Any) -> None:
        """Move pages of short runs, in pieces of some axis-0 runs; arguments as `move_runs`."""
        if not digest:
            return
        count = len(block_ids)
        into, out_of = np.empty(STREAMS, np.int64), np.empty(STREAMS, np.int64)
        steps = np.empty(4, np.int64)
        to_pool = at[_TO_POOL] != 0
        steps0 = (at[_POOL0], at[_OBJECT0]) if to_pool else (at[_OBJECT0], at[_POOL0])
        steps1 = (at[_POOL1], at[_OBJECT1]) if to_pool else (at[_OBJECT1], at[_POOL1])
        # the runs of the destination adjoin along its smaller step
        inner_is_0 = steps0[0] < steps1[0]
        if inner_is_0:
            steps[0], steps[1], steps[2], steps[3] = steps0[0], steps1[0], steps0[1], steps1[1]
        else:
            steps[0], steps[1], steps[2], steps[3] = steps1[0], steps0[0], steps1[1], steps0[1]
        pending, held, piece, end, page, within = 0, 0, 0, 0, 0, 0
        while True:
            if piece == end:
                piece = take(counter.ctypes.data, at[_PER_TURN])
                end = max(piece, min(piece + at[_PER_TURN], at[_NUM_PIECES]))
                page, within = divmod(piece, at[_PER_PAGE])
            start = within * at[_PIECE_LENGTH]
            length = min(at[_PIECE_LENGTH], at[_COUNT0] - start) if piece < end else 0
            if pending == STREAMS or length != held:
                inner, outer = (held, at[_COUNT1]) if inner_is_0 else (at[_COUNT1], held)
                fill_pages(at[_FILL], pending, into, out_of, inner, outer, steps, at[_RUN_BYTES])
                pending, held = 0, length
            if not length:
                break
            row, item = divmod(page, count)
            pool = rows[row] + block_ids[item] * at[_BLOCK_STRIDE] + start * at[_POOL0]
            place = objects[item] + row * at[_ROW_STRIDE] + start * at[_OBJECT0]
            into[pending], out_of[pending] = (pool, place) if to_pool else (place, pool)
            pending += 1
            piece += 1
            within += 1
            if within == at[_PER_PAGE]:
                within = 0
                page += 1
        fence()

    return move_pages


Mover = Callable[[Int64Array, Int64Array, Int64Array, Int64Array, Int64Array], None]

_INTS = types.Array(types.int64, 1, "C")
_SIGNATURE = types.void(_INTS, _INTS, _INTS, _INTS, _INTS)
_SOURCES = ("cpu_words.py", "cpu_runs.py", "cpu_fills.py", "cpu_movers.py")


def _source_digest() -> int:
    """One number for the text of all that is compiled into a mover."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")


def _compile(make_mover: Callable[[int], Callable[..., None]]) -> Mover:
    """The mover as machine code: from the cache on disk if there is a place for one, else fresh.

    numba looks for a writable folder beside the source, then in the user's home. Its cache knows
    a function by the time and size of its own file and by the values that it closes over: the
    digest is there to make the text of every file count.
    """
    mover = make_mover(_source_digest())
    compiled: Mover
    try:
        compiled = numba.njit(_SIGNATURE, nogil=True, cache=True)(mover)
    except (RuntimeError, OSError):
        compiled = numba.njit(_SIGNATURE, nogil=True)(mover)
    return compiled


@cache
def runs_mover() -> Mover:
    """`move_runs`, compiled at the first call."""
    return _compile(_make_move_runs)


@cache
def pages_mover() -> Mover:
    """`move_pages`, compiled at the first call."""
    return _compile(_make_move_pages)
