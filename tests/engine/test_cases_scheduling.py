"""Field cases of K6 (and 41, 52, 83): what the scheduler half counts, keeps and lets go."""

from __future__ import annotations

from typing import Any

import pytest
from support.replay_tools import connector_of, eventually, leases, stored_ranges, tokens_of
from support.schedule_replay import bytes_of
from support.toy_config import full, window

from hma_triton.server.launch import EmbeddedServer


@pytest.mark.parametrize("polls", [1, 2, 5])
@pytest.mark.parametrize("hit", [0, 512])
def test_64_polling_changes_nothing(engine_of: Any, polls: int, hit: int) -> None:
    engine = engine_of(full(16), chunk=256)
    tokens = tokens_of(1024)
    if hit:
        other = engine.request("a", tokens[:hit])
        engine.allocate(other, [[]], 0)
        engine.compute(other, hit, [list(range(1, hit // 16 + 1))])
    request = engine.request("b", tokens)
    assert [engine.matched(request) for _ in range(polls)] == [hit] * polls
    assert [engine.matched(request, hit + 256) for _ in range(polls)] == [0] * polls
    blocks = [[block % 63 + 1 for block in range(64)]]
    engine.allocate(request, [blocks[0][: hit // 16]], hit)
    engine.drain()
    request.num_computed_tokens = hit

    result = engine.step({"b": (request, 1024 - hit, blocks)})

    assert stored_ranges(result) == [(hit // 256, 4)]


def test_64_a_longer_local_hit_still_stores_what_the_server_lacks(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=256)
    tokens = tokens_of(1024)
    request = engine.request("b", tokens)
    assert engine.matched(request, 768) == 0
    blocks = [[block % 63 + 1 for block in range(64)]]
    engine.allocate(request, blocks, 0)
    request.num_computed_tokens = 768

    assert stored_ranges(engine.step({"b": (request, 256, blocks)})) == [(0, 4)]


def test_64_a_local_hit_beyond_the_servers_stores_from_the_servers_end(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=256)
    tokens = tokens_of(1024)
    blocks = [[block % 63 + 1 for block in range(64)]]
    first = engine.request("a", tokens[:512])
    engine.allocate(first, [[]], 0)
    engine.compute(first, 512, [blocks[0][:32]])
    request = engine.request("b", tokens)
    assert [engine.matched(request, local) for local in (0, 768, 768)] == [512, 0, 0]
    engine.allocate(request, blocks, 0)
    request.num_computed_tokens = 768

    assert stored_ranges(engine.step({"b": (request, 256, blocks)})) == [(2, 4)]


def test_41_blocks_given_twice_are_loaded_once(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=48)
    first = engine.request("a", tokens_of(50))
    engine.allocate(first, [[]], 0)
    engine.compute(first, 48, [[1, 2, 3]])
    right = engine.snapshot([[1, 2, 3]], 48)
    request = engine.request("b", tokens_of(50))
    assert engine.matched(request) == 48
    engine.allocate(request, [[4, 5, 6]], 48)
    engine.allocate(request, [[4, 5, 6]], 48)
    meta = engine.order({})
    assert [job.block_ids for job in meta.loads] == [{0: [4, 5, 6]}]
    engine.carry_out(meta)
    engine.drain()
    # the engine's own second call, when the load has ended: all blocks, nothing to load
    engine.allocate(request, [[4, 5, 6, 7]], 0)
    request.num_computed_tokens = 48

    assert engine.step({"b": (request, 2, [[4, 5, 6, 7]])}).meta.loads == []
    assert engine.snapshot([[4, 5, 6]], 48) == right


def test_41_blocks_below_the_local_hit_are_not_written(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=64)
    first = engine.request("a", tokens_of(64))
    engine.allocate(first, [[]], 0)
    engine.compute(first, 64, [[1, 2, 3, 4]])
    right = engine.snapshot([[1, 2, 3, 4]], 64)
    engine.wipe()
    request = engine.request("b", tokens_of(64))
    assert engine.matched(request, 48) == 16
    engine.allocate(request, [[5, 6, 7, 8]], 16)
    engine.drain()

    assert engine.snapshot([[5, 6, 7, 8]], 64, 48) == {
        place: page for place, page in right.items() if place[1] == 3
    }
    for block in (5, 6, 7):
        assert set(bytes_of(engine.page(0, block))) == {0xEE}


def test_65_every_chunk_of_a_chunked_prefill_is_stored_once(engine_of: Any) -> None:
    engine = engine_of(full(8), chunk=16)
    request = engine.request("a", tokens_of(128))
    engine.allocate(request, [[]], 0)
    table = list(range(1, 17))
    ranges = []
    for _ in range(6):
        count = min(24, 128 - request.num_computed_tokens)
        ranges += stored_ranges(engine.compute(request, count, [table]))

    assert ranges == [(0, 1), (1, 3), (3, 4), (4, 6), (6, 7), (7, 8)]
    engine.finish(request)
    assert engine.matched(engine.request("b", tokens_of(128))) == 128


def test_65_a_resumed_request_brings_all_of_its_blocks(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=16)
    request = engine.request("a", tokens_of(48), salt="x")
    engine.allocate(request, [[1, 2, 3]], 0)
    engine.compute(request, 16, [[1, 2, 3]])
    engine.step({}, preempted=["a"])
    assert engine.matched(request) == 16
    engine.allocate(request, [[7]], 16)
    engine.drain()
    request.num_computed_tokens = 16
    engine.wipe()

    result = engine.compute(request, 32, [[7, 8, 9]])

    assert result.meta.stores[0].block_ids == {0: [8, 9]}
    assert result.meta.stores[0].start_chunk == 1


@pytest.mark.parametrize("decoded", [False, True])
def test_52_generated_tokens_are_stored_only_when_asked_for(engine_of: Any, decoded: bool) -> None:
    engine = engine_of(full(8), window(8, 16), chunk=8, settings={"hma.store_decode": decoded})
    request = engine.request("a", tokens_of(32))
    tables = [list(range(1, 11)), [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]]
    engine.allocate(request, tables, 0)
    assert stored_ranges(engine.compute(request, 32, tables)) == [(0, 4)]
    ranges = []
    for token in range(48):
        request.tokens.append(token)
        # the window slides: the engine takes back what lies before it
        slid = max(0, request.num_computed_tokens - 16) // 8
        now = [tables[0], [0] * slid + tables[1][slid:]]
        ranges += stored_ranges(engine.compute(request, 1, now))

    assert ranges == ([(chunk, chunk + 1) for chunk in range(4, 10)] if decoded else [])
    assert engine.matched(engine.request("b", request.tokens)) == (80 if decoded else 32)


def test_67_a_store_has_read_its_blocks_before_the_step_ends(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=16)
    request = engine.request("a", tokens_of(33))
    engine.allocate(request, [[3, 4, 5]], 0)
    engine.compute(request, 33, [[3, 4, 5]])
    right = engine.snapshot([[3, 4]], 32)
    # preempted: the next step's model writes other tokens into the blocks
    engine.step({}, preempted=["a"])
    engine.wipe()

    assert engine.matched(request) == 32
    engine.allocate(request, [[6, 7]], 32)
    engine.drain()

    assert engine.snapshot([[6, 7]], 32) == right


def test_67_a_preempted_request_is_looked_up_with_its_outputs(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=16, settings={"hma.store_decode": True})
    request = engine.request("a", tokens_of(32))
    engine.allocate(request, [[1, 2]], 0)
    engine.compute(request, 32, [[1, 2]])
    for token in range(16):
        request.tokens.append(token)
        engine.compute(request, 1, [[1, 2, 3]])
    request.tokens.append(99)
    engine.step({}, preempted=["a"])

    assert engine.matched(request) == 48


def test_68_no_load_and_no_lease_without_external_tokens(
    engine_of: Any, server: EmbeddedServer
) -> None:
    engine = engine_of(full(16), chunk=256)
    first = engine.request("a", tokens_of(256))
    engine.allocate(first, [[]], 0)
    engine.compute(first, 256, [list(range(1, 17))])
    second = engine.request("b", tokens_of(300))
    assert engine.matched(second) == 256
    assert leases(server.url) == 1
    engine.allocate(second, [list(range(1, 17))], 0)

    assert engine.step({}).meta.loads == []
    eventually(lambda: leases(server.url) == 0)


@pytest.mark.parametrize("end", ["abort", "abort after the answer", "loaded"])
def test_83_a_lease_ends_with_its_request(engine_of: Any, server: EmbeddedServer, end: str) -> None:
    engine = engine_of(full(16), chunk=256)
    first = engine.request("a", tokens_of(256))
    engine.allocate(first, [[]], 0)
    engine.compute(first, 256, [list(range(1, 17))])
    second = engine.request("b", tokens_of(300))
    if end != "abort":
        assert engine.matched(second) == 256
    if end == "loaded":
        engine.allocate(second, [list(range(20, 36))], 256)
        engine.drain()
    engine.finish(second)

    eventually(lambda: leases(server.url) == 0)


@pytest.mark.parametrize(
    ("stores", "loads", "stored", "found"),
    [(True, False, 4, 0), (False, True, 0, 0), (True, True, 4, 1024)],
    ids=["producer", "consumer", "both"],
)
def test_70_roles(engine_of: Any, stores: bool, loads: bool, stored: int, found: int) -> None:
    engine = engine_of(full(16), chunk=256, stores=stores, loads=loads)
    blocks = [[block % 63 + 1 for block in range(64)]]
    request = engine.request("a", tokens_of(1024))
    engine.allocate(request, blocks, 0)
    ranges = stored_ranges(engine.step({"a": (request, 512, blocks)}))
    ranges += stored_ranges(engine.step({"a": (request, 512, blocks)}))

    assert sum(end - start for start, end in ranges) == stored
    assert engine.matched(engine.request("b", tokens_of(1024))) == found
    # nobody waits for a store at a request's end, so no send is ever reported
    results = connector_of(engine).get_transfer_results({"a"})
    assert not results.finished_sending
    assert connector_of(engine).request_finished_all_groups(request, ([],)) == (False, None)
