"""Plans and hits of a long hybrid request; the mark is 1 ms for a plan from arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.hybrid_request import (
    CHUNK_TOKENS,
    NUM_CHUNKS,
    NUM_TOKENS,
    RULES,
    ids_of_infos,
    ids_to_retrieve,
    plan_layout,
)
from hma_triton.plan import longest_hit, plan_retrieve, plan_store, storable_chunks

_ALL = np.ones((len(RULES), NUM_CHUNKS), dtype=np.bool_)


def test_plan_store(benchmark: Any) -> None:
    plan = benchmark(plan_store, plan_layout(), ids_of_infos(), _ALL)
    assert not plan.skipped
    assert plan.groups[0].block_ids.size == NUM_CHUNKS * CHUNK_TOKENS // 16


def test_plan_retrieve(benchmark: Any) -> None:
    plan = benchmark(plan_retrieve, plan_layout(), ids_to_retrieve(), _ALL)
    assert [group.block_ids.size for group in plan.groups][1:] == [64, 32, 1, 1]


def test_storable_chunks(benchmark: Any) -> None:
    storable = benchmark(storable_chunks, plan_layout(), ids_of_infos(), NUM_CHUNKS)
    assert storable.all()


def test_longest_hit(benchmark: Any) -> None:
    present = _ALL.copy()
    present[2, 1::2] = False
    hit = benchmark(longest_hit, RULES, present, CHUNK_TOKENS, NUM_TOKENS)
    assert hit.chunks == NUM_CHUNKS - 1 + NUM_CHUNKS % 2
