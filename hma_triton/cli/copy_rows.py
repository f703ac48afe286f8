"""Rows of `bench copy`: one measured direction of one kernel group."""

from __future__ import annotations

from dataclasses import dataclass

ALL_GROUPS = "all"
OURS = "hma-triton"
PLAIN = "memcpy"
LMCACHE = "lmcache"


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Times of one copy. `method` is what moved the bytes; percentiles are over `repeats`.

    `share_of_memcpy` and `times_lmcache` compare medians of the same interleaved run: our speed
    over the other's. None where the other was not measured.
    """

    case: str
    kernel_group: str
    format: str
    object_layout: str
    direction: str
    method: str
    implementation: str
    threads: int
    tokens: int
    blocks: int
    nbytes: int
    page_bytes: int
    runs_per_page: int
    run_bytes: int
    repeats: int
    p10_ms: float
    p50_ms: float
    p90_ms: float
    gb_per_s: float
    share_of_memcpy: float | None
    times_lmcache: float | None
