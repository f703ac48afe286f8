"""Which prefix lengths are served by what is present, and what a prefix of one length needs.

A window of w chunks needs the last w chunks of a prefix; a window below 1 needs all of them.
Presence bits lie chunk by chunk, in it group by group, in it rank by rank: so does the core of
0.5.6, though its stub file puts groups outermost.
"""

from __future__ import annotations

from collections.abc import Sequence

from hma_triton.integration.lmcache.standin.bitmap import Bitmap


def _needed(length: int, window: int) -> range:
    """Chunks that a prefix of `length` chunks needs."""
    return range(max(0, length - window) if window > 0 else 0, length)


def _first_bits(group: int, num_groups: int, num_chunks: int, num_ranks: int) -> range:
    """Position of rank 0 of every chunk of `group`."""
    step = num_groups * num_ranks
    return range(group * num_ranks, num_chunks * step, step) if num_chunks else range(0)


def _servable(present: Sequence[bool], window: int) -> int:
    """Integer whose bit L says that a prefix of L chunks is served, for L from 0 on."""
    served, run = 1, 0
    for chunk, is_present in enumerate(present):
        run = run + 1 if is_present else 0
        length = chunk + 1
        if run >= len(_needed(length, window)):
            served |= 1 << length
    return served


def fold(found: Bitmap, num_chunks: int, num_ranks: int, group_windows: Sequence[int]) -> Bitmap:
    """Servable lengths [num_chunks]: bit j where every group serves a prefix of j + 1 chunks.

    So does the core of 0.5.6; its stub file still describes a bit more, for a prefix of nothing.
    """
    served = (1 << num_chunks + 1) - 1
    for group, window in enumerate(group_windows):
        present = [
            all(found.test(first + rank) for rank in range(num_ranks))
            for first in _first_bits(group, len(group_windows), num_chunks, num_ranks)
        ]
        served &= _servable(present, window)
    return Bitmap.of(num_chunks, served >> 1)


def unfold(
    hit_length: int, num_chunks: int, num_ranks: int, group_windows: Sequence[int]
) -> Bitmap:
    """What a hit of `hit_length` chunks needs, in the order of `fold`'s presence bits."""
    length = min(hit_length, num_chunks)
    mask = Bitmap(len(group_windows) * num_chunks * num_ranks)
    for group, window in enumerate(group_windows):
        firsts = _first_bits(group, len(group_windows), num_chunks, num_ranks)
        for chunk in _needed(length, window):
            mask.set_range(firsts[chunk], firsts[chunk] + num_ranks)
    return mask


def fold_grouped(rows: Sequence[Bitmap], windows: Sequence[int]) -> Bitmap:
    """Bit j where every row serves a prefix of j + 1 chunks.

    Raises:
        ValueError: rows and windows of different counts, or rows of different sizes.
    """
    if len(rows) != len(windows):
        raise ValueError(f"{len(rows)} rows for {len(windows)} windows")
    if len({row.size() for row in rows}) > 1:
        raise ValueError("rows of different sizes")
    if not rows:
        return Bitmap(0)
    num_chunks = rows[0].size()
    served = (1 << num_chunks + 1) - 1
    for row, window in zip(rows, windows, strict=True):
        served &= _servable([row.test(chunk) for chunk in range(num_chunks)], window)
    return Bitmap.of(num_chunks, served >> 1)


def unfold_grouped(hit_length: int, num_chunks: int, windows: Sequence[int]) -> list[Bitmap]:
    """What a hit of `hit_length` chunks needs, one bitmap [num_chunks] per window."""
    length = min(hit_length, num_chunks)
    rows = []
    for window in windows:
        row = Bitmap(num_chunks)
        row.set_range(_needed(length, window).start, length)
        rows.append(row)
    return rows
