"""Moves of whole pages of short runs: transposes between head rows and token rows.

A fill moves the same rectangle of runs in up to four pages. Axis `inner` is the one along which
the destination's runs adjoin, so its lines are filled whole before the next begins, while axis
`outer` walks on. Each run length of the field has a fill of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numba

from hma_triton.kernels.cpu_runs import copy_cached
from hma_triton.kernels.cpu_words import LINE_BYTES, copy_bytes, join_line


class Fill(IntEnum):
    """Which loop moves a page's runs."""

    ANY = 0
    LINES = 1
    JOIN8 = 2
    JOIN16 = 3
    JOIN32 = 4
    LINE64 = 5
    LINE128 = 6
    LINE256 = 7


_JOINS = {8: Fill.JOIN8, 16: Fill.JOIN16, 32: Fill.JOIN32}
_CONSTANTS = {64: Fill.LINE64, 128: Fill.LINE128, 256: Fill.LINE256}


def choose_fill(run_bytes: int, lines_are_whole: bool, joined_count: int) -> Fill:
    """The fill for runs of `run_bytes`.

    Args:
        lines_are_whole: every destination line is written whole: its runs (or its joined runs)
            start and end on multiples of 64 bytes.
        joined_count: how many runs adjoin in the destination; 1 when they do not.
    """
    if not lines_are_whole:
        return Fill.ANY
    if run_bytes % LINE_BYTES == 0:
        return _CONSTANTS.get(run_bytes, Fill.LINES)
    if run_bytes in _JOINS and joined_count * run_bytes % LINE_BYTES == 0:
        return _JOINS[run_bytes]
    return Fill.ANY


def _make_join(run_bytes: int) -> Callable[..., None]:
    joined = LINE_BYTES // run_bytes

    def fill(
        pages: int, into: Any, out_of: Any, inner: int, outer: int, steps: Any, _run_bytes: int
    ) -> None:
        for first in range(0, inner, joined):
            for second in range(outer):
                d = first * steps[0] + second * steps[1]
                s = first * steps[2] + second * steps[3]
                for page in range(pages):
                    join_line(into[page] + d, out_of[page] + s, steps[2], run_bytes, True)

    return fill


def _make_constant(run_bytes: int) -> Callable[..., None]:
    def fill(
        pages: int, into: Any, out_of: Any, inner: int, outer: int, steps: Any, _run_bytes: int
    ) -> None:
        for first in range(inner):
            for second in range(outer):
                d = first * steps[0] + second * steps[1]
                s = first * steps[2] + second * steps[3]
                for page in range(pages):
                    copy_bytes(into[page] + d, out_of[page] + s, run_bytes, True)

    return fill


def _lines(
    pages: int, into: Any, out_of: Any, inner: int, outer: int, steps: Any, run_bytes: int
) -> None:
    for first in range(inner):
        for second in range(outer):
            d = first * steps[0] + second * steps[1]
            s = first * steps[2] + second * steps[3]
            for page in range(pages):
                for done in range(0, run_bytes, 64):
                    copy_bytes(into[page] + d + done, out_of[page] + s + done, 64, True)


def _any(
    pages: int, into: Any, out_of: Any, inner: int, outer: int, steps: Any, run_bytes: int
) -> None:
    for page in range(pages):
        for second in range(outer):
            for first in range(inner):
                d = first * steps[0] + second * steps[1]
                s = first * steps[2] + second * steps[3]
                copy_cached(into[page] + d, out_of[page] + s, run_bytes)


_compile = numba.njit(nogil=True)
_fill_any = _compile(_any)
_fill_lines = _compile(_lines)
_fill_join8 = _compile(_make_join(8))
_fill_join16 = _compile(_make_join(16))
_fill_join32 = _compile(_make_join(32))
_fill_line64 = _compile(_make_constant(64))
_fill_line128 = _compile(_make_constant(128))
_fill_line256 = _compile(_make_constant(256))
_ANY, _LINES, _JOIN8, _JOIN16, _JOIN32, _LINE64, _LINE128, _LINE256 = (int(fill) for fill in Fill)


def _fill_pages(
    fill: int,
    pages: int,
    into: Any,
    out_of: Any,
    inner: int,
    outer: int,
    steps: Any,
    run_bytes: int,
) -> None:
    """Move `inner` x `outer` runs in each of the first `pages` pages at `out_of` to `into`.

    `steps` [4]: bytes from run to run of the destination along inner, along outer, then of the
    source along inner, along outer.
    """
    if fill == _LINE256:
        _fill_line256(pages, into, out_of, inner, outer, steps, run_bytes)
    elif fill == _LINE128:
        _fill_line128(pages, into, out_of, inner, outer, steps, run_bytes)
    elif fill == _LINE64:
        _fill_line64(pages, into, out_of, inner, outer, steps, run_bytes)
    elif fill == _JOIN32:
        _fill_join32(pages, into, out_of, inner, outer, steps, run_bytes)
    elif fill == _JOIN16:
        _fill_join16(pages, into, out_of, inner, outer, steps, run_bytes)
    elif fill == _JOIN8:
        _fill_join8(pages, into, out_of, inner, outer, steps, run_bytes)
    elif fill == _LINES:
        _fill_lines(pages, into, out_of, inner, outer, steps, run_bytes)
    else:
        _fill_any(pages, into, out_of, inner, outer, steps, run_bytes)


fill_pages = _compile(_fill_pages)
