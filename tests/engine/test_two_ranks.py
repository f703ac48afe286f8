"""Two ranks of one engine against one server: every rank its own bytes, or one set for both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.replay_tools import tokens_of
from support.schedule_replay import ReplayEngine
from support.toy_config import full, state, toy, window

from hma_triton.client import HmaClient
from hma_triton.geometries import stand_ins
from hma_triton.integration.vllm.stored_events import StoredEvents
from hma_triton.server.launch import EmbeddedServer

LATENT = 24
TABLES = [[1, 2, 3]]
OTHERS = [[4, 5, 6]]


def latent_pool() -> tuple[Any, dict[str, torch.Tensor]]:
    """One MLA layer with blocks of 16 tokens."""
    page = 16 * LATENT * 2
    spec = stand_ins.MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=LATENT,
        dtype=torch.bfloat16,
        num_states=16,
        unpadded_page_size_bytes=page,
        page_size_bytes=page,
    )
    group = stand_ins.KVCacheGroupSpec(layer_names=["mla"], kv_cache_spec=spec)
    config = stand_ins.KVCacheConfig(
        num_blocks=64, kv_cache_groups=[group], kv_cache_layout="LBHNC"
    )
    return config, {"mla": torch.zeros(64, 1, 16, LATENT, dtype=torch.bfloat16)}


@pytest.fixture
def ranks_of(server: EmbeddedServer, request: pytest.FixtureRequest) -> Any:
    """Makes engines of two ranks, each with a pool of its own and other bytes in it."""
    made: list[ReplayEngine] = []

    def make(*specs: Any, world_size: int = 2, **options: Any) -> ReplayEngine:
        name = f"{request.node.name}-{len(made)}"
        engines = []
        for rank in range(world_size):
            config, caches = toy(*specs) if specs else latent_pool()
            engines.append(
                ReplayEngine(
                    server.url,
                    config,
                    caches,
                    name=name,
                    model=request.node.name,
                    rank=rank,
                    world_size=world_size,
                    settings={"hma.chunk_tokens": 16},
                    **options,
                )
            )
        made.extend(engines)
        engines[0].other_ranks = engines[1:]
        for rank, engine in enumerate(engines):
            scramble(engine, rank)
        return engines[0]

    yield make
    for engine in reversed(made):
        engine.close()


def scramble(engine: ReplayEngine, seed: int) -> None:
    """Random bytes in the whole pool."""
    generator = torch.Generator().manual_seed(seed)
    for cache in engine.caches.values():
        storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
        storage.random_(0, 256, generator=generator)


def all_pages(engine: ReplayEngine, tables: Any) -> list[dict[Any, bytes]]:
    return [one.snapshot(tables, 48) for one in (engine, *engine.other_ranks)]


def objects(url: str) -> int:
    with HmaClient(url) as client:
        client.connect()
        return int(client.status()["counters"]["committed_objects"])


@pytest.mark.parametrize(
    ("beside", "tables", "others"),
    [
        ([], [[1, 2, 3]], [[4, 5, 6]]),
        ([window(16, 32)], [[1, 2, 3], [0, 7, 8]], [[4, 5, 6], [0, 9, 10]]),
        ([state(16)], [[1, 2, 3], [0, 0, 7]], [[4, 5, 6], [0, 0, 8]]),
    ],
    ids=["full", "window", "state"],
)
def test_every_rank_gets_its_own_bytes_back(
    ranks_of: Any, beside: list[Any], tables: Any, others: Any
) -> None:
    engine = ranks_of(full(16), *beside)
    first = engine.request("a", tokens_of(49))
    engine.allocate(first, tables, 0)
    first.num_computed_tokens = 16
    engine.step({"a": (first, 32, tables)})
    right = all_pages(engine, tables)
    assert right[0] != right[1]
    second = engine.request("b", tokens_of(49))
    assert engine.matched(second) == 48
    engine.allocate(second, others, 48)
    result = engine.drain()

    assert (result.finished, result.failed) == ({"b"}, set())
    assert all_pages(engine, others) == right


def test_a_hit_needs_all_ranks(ranks_of: Any) -> None:
    engine = ranks_of(full(16), events=StoredEvents())
    (other,) = engine.other_ranks
    first = engine.request("a", tokens_of(48))
    engine.allocate(first, TABLES, 0)
    meta = engine.order({"a": (first, 48, TABLES)})
    # rank 1's store is skipped, as by its breaker
    other.worker._breaker.failed()
    engine.carry_out(meta)

    assert list(engine.scheduler.take_events()) == []
    assert engine.matched(engine.request("b", tokens_of(48))) == 0


def test_a_load_that_fails_on_one_rank_failed(ranks_of: Any) -> None:
    engine = ranks_of(full(16))
    (other,) = engine.other_ranks
    first = engine.request("a", tokens_of(48))
    engine.allocate(first, TABLES, 0)
    engine.step({"a": (first, 48, TABLES)})
    second = engine.request("b", tokens_of(48))
    assert engine.matched(second) == 48
    engine.allocate(second, OTHERS, 48)
    meta = engine.order({})
    outputs = [engine.work(meta)]
    # it is refused there: the server no longer knows the pool of rank 1
    other.worker_client.unregister(other.worker.registration.instance_id, 1)
    outputs.append(other.work(meta))
    first_told = engine.tell(outputs, meta)
    rest = engine.drain()

    assert first_told.finished | rest.finished == {"b"}
    assert first_told.failed | rest.failed == {"b"}
    assert engine.matched(second) == 0


def test_replicated_kv_is_stored_once_and_read_by_all(
    ranks_of: Any, server: EmbeddedServer
) -> None:
    engine = ranks_of()
    before = objects(server.url)
    first = engine.request("a", tokens_of(48))
    engine.allocate(first, TABLES, 0)
    engine.step({"a": (first, 48, TABLES)})
    assert objects(server.url) - before == 3
    right = engine.snapshot(TABLES, 48)
    second = engine.request("b", tokens_of(48))
    assert engine.matched(second) == 48
    engine.allocate(second, OTHERS, 48)
    assert engine.drain().failed == set()

    # rank 0's bytes, on both
    assert all_pages(engine, OTHERS) == [right, right]


def test_worlds_of_different_size_never_meet(ranks_of: Any) -> None:
    two = ranks_of(full(16))
    first = two.request("a", tokens_of(48))
    two.allocate(first, TABLES, 0)
    two.step({"a": (first, 48, TABLES)})
    one = ranks_of(full(16), world_size=1)

    assert one.matched(one.request("b", tokens_of(48))) == 0
    assert two.matched(two.request("b", tokens_of(48))) == 48
