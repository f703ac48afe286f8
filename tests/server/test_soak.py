"""Eight instances, four models, a working set four times the arena; every loaded byte checked."""

from __future__ import annotations

from collections import Counter

import pytest
from support.server_nursery import Nursery
from support.server_pools import CHUNK_TOKENS, TestPool
from support.soak import CHUNKS, MODELS, PROMPTS

from hma_triton.client import HmaClient


def working_set_bytes() -> int:
    """Bytes of all chunks of all prompts of all models."""
    total = 0
    for kinds in MODELS:
        pool = TestPool(kinds)
        for kind in kinds:
            cache = pool.kv[f"{kind.name}.0"]
            blocks = 1 if kind.recurrent else CHUNK_TOKENS // kind.tokens_per_block
            total += cache[0].numel() * kind.layers * blocks * CHUNKS * PROMPTS
    return total


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(30.0, id="30s"),
        pytest.param(600.0, id="10min", marks=[pytest.mark.long, pytest.mark.timeout(1200)]),
    ],
)
def test_soak(processes: Nursery, url: str, seconds: float) -> None:
    arena_bytes = working_set_bytes() // 4
    server = processes.start(
        "server", url=url, host_bytes=arena_bytes, verify="sample", copy_threads=4
    )
    server.call("ready")
    children = [processes.start("soak", url=url, first_instance=first) for first in (0, 4)]

    def run(for_seconds: float) -> Counter[str]:
        for child in children:
            child.post("run", for_seconds)
        counts: Counter[str] = Counter()
        for child in children:
            count, faults = child.answer(for_seconds + 120)
            assert faults == []
            counts += count
        return counts

    warm = run(seconds / 6)
    settled = server.call("facts")
    counts = warm + run(seconds * 5 / 6)
    after = server.call("facts")
    assert after["resident_bytes"] - settled["resident_bytes"] < 16 << 20
    assert after["descriptors"] <= settled["descriptors"] + 8
    assert counts["loads"] > 20 and counts["stores"] > 20 and counts["hits"] > 20, counts
    with HmaClient(url) as observer:
        status = observer.status()
    assert status["counters"]["evicted_objects"] > 0, "the working set is larger than the arena"
    assert status["counters"]["corrupt_objects"] == 0
    assert status["arena"]["used_bytes"] <= arena_bytes
    assert status["leases"] == 0 and status["pinned_bytes"] == 0 and status["open_copies"] == 0
    committed = status["counters"]["committed_objects"]
    assert counts["stored objects"] == committed, "nothing is lost"
