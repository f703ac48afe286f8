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
    """Move one run of any length: whole lines past the cache, the edges through it."""
    if nbytes >= 64:
        done = 0
        edge = (-destination) & 63
        if edge:
            copy_bytes(destination, source, 64, False)
            done = edge
        while done + 256 <= nbytes:
            copy_bytes(destination + done, source + done, 256, True)
            done += 256
        while done + 64 <= nbytes:
            copy_bytes(destination + done, source + done, 64, True)
            done += 64
        if done < nbytes:
            done = nbytes - 64
            copy_bytes(destination + done, source + done, 64, False)
        return
    copy_short(destination, source, nbytes)


copy_run = numba.njit(nogil=True)(_copy_run)


def _copy_four_runs(destinations: Any, sources: Any, lengths: Any) -> None:
    """Move four runs in step; what they are longer than the shortest, one by one."""
    shortest = min(min(lengths[0], lengths[1]), min(lengths[2], lengths[3]))
    done = 0
    if shortest >= 2 * _STEP_BYTES:
        for stream in range(STREAMS):
            edge = (-destinations[stream]) & 63
            if edge:
                copy_bytes(destinations[stream], sources[stream], 64, False)
                destinations[stream] += edge
                sources[stream] += edge
                lengths[stream] -= edge
        d0, d1, d2, d3 = destinations[0], destinations[1], destinations[2], destinations[3]
        s0, s1, s2, s3 = sources[0], sources[1], sources[2], sources[3]
        shortest = min(min(lengths[0], lengths[1]), min(lengths[2], lengths[3]))
        while done + _STEP_BYTES <= shortest:
            copy_bytes(d0 + done, s0 + done, _STEP_BYTES, True)
            copy_bytes(d1 + done, s1 + done, _STEP_BYTES, True)
            copy_bytes(d2 + done, s2 + done, _STEP_BYTES, True)
            copy_bytes(d3 + done, s3 + done, _STEP_BYTES, True)
            done += _STEP_BYTES
    for stream in range(STREAMS):
        copy_run(destinations[stream] + done, sources[stream] + done, lengths[stream] - done)


copy_four_runs = numba.njit(nogil=True)(_copy_four_runs)
