"""What an operator and a router see: counters in vLLM's Prometheus endpoint, KV events."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import zmq
from support.engine_families import prompt
from support.engine_probes import prometheus_values
from support.engine_rig import Rig
from vllm.distributed.kv_events import BlockStored, KVEventBatch

from hma_triton.integration.vllm.stats import HMAStats

gemma3 = pytest.mark.parametrize("rig", ["gemma3"], indirect=True)


def test_counts_of_ranks_halves_and_intervals_add_up() -> None:
    first, second = HMAStats(), HMAStats()
    first.add("loads")
    first.add("loaded_bytes", 10)
    first.add("hit_tokens", 0)
    first.add_reason("failures", "timeout")
    second.add("loads", 2)
    second.add_reason("failures", "timeout")
    second.add_reason("failures", "full")
    total = first.aggregate(second)

    assert total.reduce() == {
        "loads": 3,
        "loaded_bytes": 10,
        "failures[timeout]": 2,
        "failures[full]": 1,
    }
    # neither was changed, nor shares what the sum counts
    assert (first.data["failures"], second.data["loads"]) == ({"timeout": 1}, 2)
    total.reset()
    assert total.is_empty()
    assert not first.is_empty()


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("timeout", "timeout"),
        ("chunk 7 missing in group 2", "incomplete"),
        ("ranks: 1 of 2 are registered", "ranks"),
        ("error: unknown_instance: instance 'x' is not registered", "unknown_instance"),
        ("", "unknown"),
    ],
)
def test_reasons_are_few(reason: str, label: str) -> None:
    stats = HMAStats()
    stats.add_reason("lookup_misses", reason)
    assert stats.data == {"lookup_misses": {label: 1}}


@gemma3
def test_counters(rig: Rig) -> None:
    asked = [prompt(1301, seed=110)]
    with rig.start_ours({"hma.namespace": "counted"}, disable_log_stats=False) as engine:
        engine.generate(asked)
        engine.reset_prefix_cache()
        engine.generate(asked)
        seen = engine.run(prometheus_values, "hma_triton_connector_")

    assert seen["lookups"] == 2
    assert seen["lookup_misses[incomplete]"] == 1
    assert seen["hit_tokens"] == 1280
    assert (seen["stores"], seen["loads"]) == (1, 1)
    # one object of the full group, one of the windowed groups, per chunk
    assert seen["stored_objects"] == 5 * 2
    # 12 windowed layers, 2 full; a page has 32 KiB; the window of 300 keeps whole chunks
    assert seen["stored_bytes"] == 5 * 14 * 2 * 32768
    # a hit at 1280 needs all 10 full blocks and the last 3 of the window
    assert seen["loaded_bytes"] == (2 * 10 + 12 * 3) * 32768
    assert seen.get("failed_loads", 0) == 0
    assert 0 < seen["store_seconds"] < 10


@gemma3
def test_kv_events(rig: Rig, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    asked = prompt(700, seed=111)
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(endpoint)
        subscriber.subscribe(b"")
        settings = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        with rig.start_ours({"hma.namespace": "told"}, kv_events_config=settings) as engine:
            engine.generate([prompt(300, seed=112)])
            # its only step stores it and ends it
            engine.generate([asked], max_tokens=1)
            events = []
            while subscriber.poll(2000):
                frames = subscriber.recv_multipart()
                events += msgspec.msgpack.decode(frames[-1], type=KVEventBatch).events

    ours = [one for one in events if isinstance(one, BlockStored) and one.medium == "CPU"]
    (stored,) = [one for one in ours if one.token_ids == asked[:512]]
    assert len(stored.block_hashes) == 4
    assert (stored.block_size, stored.parent_block_hash) == (128, None)
    own = [one for one in events if isinstance(one, BlockStored) and one.medium == "GPU"]
    hashes = {block_hash for one in own for block_hash in one.block_hashes}
    assert set(stored.block_hashes) <= hashes
