"""Moves of single runs, alone and four in step, past the cache and through it.

Stores past the cache write whole lines without reading them first. Four runs in step hide the
latency of random pages: of a page of a few KiB the first lines are most of the cost.
"""

from __future__ import annotations

from typing import Any

import numba

from hma_triton.kernels.cpu_words import copy_bytes

STREAMS = 4
_STEP_BYTES = 256


def _copy_short(destination: int, source: int, nbytes: int) -> None:
    """Move fewer than 64 bytes."""
    done = 0
    if nbytes & 32:
        copy_bytes(destination, source, 32, False)
        done = 32
    if nbytes & 16:
        copy_bytes(destination + done, source + done, 16, False)
        done += 16
    if nbytes & 8:
        copy_bytes(destination + done, source + done, 8, False)
        done += 8
    if nbytes & 4:
        copy_bytes(destination + done, source + done, 4, False)
        done += 4
    if nbytes & 2:
        copy_bytes(destination + done, source + done, 2, False)
        done += 2
    if nbytes & 1:
        copy_bytes(destination + done, source + done, 1, False)


copy_short = numba.njit(nogil=True)(_copy_short)


def _copy_cached(destination: int, source: int, nbytes: int) -> None:
    """Move one run of any length through the cache."""
    done = 0
    while done + 64 <= nbytes:
        copy_bytes(destination + done, source + done, 64, False)
        done += 64
    if done < nbytes:
        copy_short(destination + done, source + done, nbytes - done)


copy_cached = numba.njit(nogil=True)(_copy_cached)


def _copy_run(destination: int, source: int, nbytes: int) -> None:
    """Move one run of any length: whole lines past the cache, the edges through it.

    No line is written both ways: what is in the cache would have to be thrown out of it again.
    """
    done = min((-destination) & 63, nbytes)
    if done:
        copy_short(destination, source, done)
    while done + 256 <= nbytes:
        copy_bytes(destination + done, source + done, 256, True)
        done += 256
    while done + 64 <= nbytes:
        copy_bytes(destination + done, source + done, 64, True)
        done += 64
    if done < nbytes:
        copy_short(destination + done, source + done, nbytes - done)


copy_run = numba.njit(nogil=True)(_copy_run)


def _copy_four_runs(into: Any, out_of: Any, lengths: Any, first: int) -> None:
    """Move the four runs from index `first` on in step; what is longer than the shortest, alone."""
    a, b, c, d = first, first + 1, first + 2, first + 3
    shortest = min(min(lengths[a], lengths[b]), min(lengths[c], lengths[d]))
    done = 0
    if shortest >= 2 * _STEP_BYTES:
        for stream in range(first, first + STREAMS):
            edge = (-into[stream]) & 63
            if edge:
                copy_short(into[stream], out_of[stream], edge)
                into[stream] += edge
                out_of[stream] += edge
                lengths[stream] -= edge
        shortest = min(min(lengths[a], lengths[b]), min(lengths[c], lengths[d]))
        d0, d1, d2, d3 = into[a], into[b], into[c], into[d]
        s0, s1, s2, s3 = out_of[a], out_of[b], out_of[c], out_of[d]
        while done + _STEP_BYTES <= shortest:
            copy_bytes(d0 + done, s0 + done, _STEP_BYTES, True)
            copy_bytes(d1 + done, s1 + done, _STEP_BYTES, True)
            copy_bytes(d2 + done, s2 + done, _STEP_BYTES, True)
            copy_bytes(d3 + done, s3 + done, _STEP_BYTES, True)
            done += _STEP_BYTES
    for stream in range(first, first + STREAMS):
        copy_run(into[stream] + done, out_of[stream] + done, lengths[stream] - done)


copy_four_runs = numba.njit(nogil=True)(_copy_four_runs)
