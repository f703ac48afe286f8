"""`hma-triton bench server --compare lmcache`."""

from __future__ import annotations

from functools import partial

import pytest

from hma_triton.cli import bench_server
from hma_triton.cli.copy_case import shape_registration
from hma_triton.cli.server_sides import LOOKUP, RETRIEVE, STORE


def test_beside_lmcaches_own_server() -> None:
    """Both servers, asked in turn; every step of LMCache's is timed too."""
    rows = bench_server.measure(
        "case",
        partial(shape_registration, "(2,64,16,2,32):bfloat16:2"),
        "(2,64,16,2,32):bfloat16:2",
        (256, 2, 1),
        lambda: None,
    )
    by_key = {(row.what, row.method): row for row in rows}
    for step in (LOOKUP, STORE, RETRIEVE):
        ours, other = by_key[step, "hma-triton"], by_key[step, "lmcache"]
        assert ours.repeats == other.repeats == 2
        assert ours.times_lmcache == pytest.approx(other.p50_ms / ours.p50_ms, rel=1e-6)
