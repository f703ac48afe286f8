"""A request, its lookup, its load and its stores, crossing each other at awkward moments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.replay_tools import CONFIG, eventually, leases, stored_ranges, tokens_of
from support.toy_config import full, window
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from hma_triton.client import HmaClient
from hma_triton.integration.vllm.stored_events import StoredEvents
from hma_triton.server.launch import EmbeddedServer, start_embedded

BRIEF = {"hma.lookup_timeout_s": 0.2, "hma.store_timeout_s": 0.3, "hma.timeout_s": 0.3}
TABLE = [1, 2, 3]
LEASE_S = 1.5


@pytest.fixture
def lone_server() -> Iterator[EmbeddedServer]:
    """A server that the test may stop; what it promises holds a little while."""
    made = start_embedded(replace(CONFIG, lease_s=LEASE_S))
    yield made
    if made.process.poll() is None:
        os.kill(made.pid, signal.SIGCONT)
    made.close()


def store(engine: Any, name: str = "first", seed: int = 0) -> list[int]:
    """A request of three chunks that came, was stored and went; its tokens."""
    tokens = tokens_of(48, seed)
    request = engine.request(name, tokens)
    engine.allocate(request, [TABLE], 0)
    assert stored_ranges(engine.compute(request, 48, [TABLE])) == [(0, 3)]
    engine.finish(request)
    return tokens


def nothing_held(engine: Any, url: str) -> bool:
    """Neither half, nor the client, nor the server holds anything for any request."""
    half = engine.scheduler
    kept = (half._tracked, half._storing, half._ended_loading, half._ordered)
    return not any(kept) and not engine.scheduler_client._lookups and leases(url) == 0


def expired(url: str) -> int:
    """Leases that have ended because nobody renewed them."""
    with HmaClient(url) as client:
        client.connect()
        return int(client.status()["expired_leases"])


@pytest.mark.parametrize("loses", [False, True], ids=["loads", "fails"])
def test_a_request_that_ends_while_it_loads(
    engine_of: Any, server: EmbeddedServer, loses: bool
) -> None:
    engine = engine_of(full(16), chunk=16)
    tokens = store(engine)
    request = engine.request("b", tokens)
    assert engine.matched(request) == 48
    if loses:
        engine.scheduler_client.clear(engine.scheduler._instance_id)
    engine.allocate(request, [[4, 5, 6]], 48)
    meta = engine.order({})
    # an abort, or the engine's end for a load that failed: both come before the results do
    engine.finish(request)
    first = engine.carry_out(meta)
    rest = engine.drain()

    # its blocks are free from then on, so it must be said once, and of a failure too
    assert sorted([*first.finished, *rest.finished]) == ["b"]
    assert first.failed | rest.failed == ({"b"} if loses else set())
    assert engine.scheduler.stats.data.get("failed_loads", 0) == int(loses)
    eventually(lambda: nothing_held(engine, server.url))


def test_a_name_used_again_is_another_request(engine_of: Any, lone_server: EmbeddedServer) -> None:
    engine = engine_of(full(16), url=lone_server.url, chunk=16)
    tokens = store(engine)
    os.kill(lone_server.pid, signal.SIGSTOP)
    # its lookup is on its way to a server that does not answer
    engine.finish(engine.request("b", tokens))
    again = engine.request("b", tokens_of(48, 9))
    assert engine.scheduler.matched_tokens(again, 0) == (None, False)
    os.kill(lone_server.pid, signal.SIGCONT)

    assert engine.matched(again) == 0
    third = engine.request("c", tokens)
    assert engine.matched(third) == 48
    engine.finish(third)
    engine.finish(again)
    eventually(lambda: nothing_held(engine, lone_server.url))


def test_preempted_and_taken_up_in_one_step(engine_of: Any, server: EmbeddedServer) -> None:
    """As after vLLM's `reset_prefix_cache(reset_running_requests=True)`."""
    engine = engine_of(full(16), chunk=16)
    request = engine.request("a", tokens_of(48))
    engine.allocate(request, [TABLE], 0)
    engine.compute(request, 32, [TABLE])
    request.num_computed_tokens = 0
    assert engine.scheduler.matched_tokens(request, 0) == (0, False)
    engine.allocate(request, [[4, 5, 6]], 0)
    engine.fill(request, [[4, 5, 6]], 0, 48)
    result = engine.step({"a": (request, 48, [[4, 5, 6]])}, preempted=["a"])

    assert stored_ranges(result) == [(2, 3)]
    # nobody would ever take up the answer to another lookup
    assert not engine.scheduler_client._lookups
    assert leases(server.url) == 0


def test_an_answer_outlives_the_lease_while_its_request_waits(
    engine_of: Any, lone_server: EmbeddedServer
) -> None:
    engine = engine_of(full(16), url=lone_server.url, chunk=16)
    tokens = store(engine)
    left, waiting = engine.request("left", tokens), engine.request("waiting", tokens)
    assert engine.matched(left) == 48
    engine.finish(left)
    assert engine.matched(waiting) == 48
    until = time.monotonic() + 2.5 * LEASE_S
    while time.monotonic() < until:
        engine.step({})
        time.sleep(0.01)
    assert (leases(lone_server.url), expired(lone_server.url)) == (1, 0)
    assert engine.matched(waiting) == 48
    engine.allocate(waiting, [[4, 5, 6]], 48)
    result = engine.drain()
    assert (result.finished, result.failed) == ({"waiting"}, set())

    # with no steps nobody renews
    idle = engine.request("idle", tokens)
    assert engine.matched(idle) == 48
    eventually(lambda: expired(lone_server.url) == 1, 20.0)


def test_a_stalled_server_holds_up_nothing(engine_of: Any, lone_server: EmbeddedServer) -> None:
    settings = {**BRIEF, "hma.store_timeout_s": 60, "hma.lookup_timeout_s": 2}
    engine = engine_of(full(16), url=lone_server.url, chunk=16, settings=settings)
    tokens = store(engine)
    os.kill(lone_server.pid, signal.SIGSTOP)
    request = engine.request("b", tokens)
    started = time.monotonic()
    slowest = 0.0
    while engine.scheduler.matched_tokens(request, 0) == (None, False):
        before = time.monotonic()
        engine.scheduler.matched_tokens(request, 0)
        slowest = max(slowest, time.monotonic() - before)
        assert time.monotonic() - started < 30
        time.sleep(0.001)
    assert engine.scheduler.matched_tokens(request, 0) == (0, False)
    assert slowest < 1
    engine.allocate(request, [TABLE], 0)
    engine.finish(request)
    os.kill(lone_server.pid, signal.SIGCONT)

    # what the late answer pinned is given back
    eventually(lambda: nothing_held(engine, lone_server.url))


def test_who_waits_in_a_loop_lets_the_answers_in_once_a_step(
    engine_of: Any, lone_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine with nothing else to do keeps the interpreter to itself: 5 ms for each message."""
    engine = engine_of(
        full(16), url=lone_server.url, chunk=16, settings={"hma.lookup_timeout_s": 60}
    )
    tokens = store(engine)
    let_in: list[str] = []
    for name, client in (("scheduler", engine.scheduler_client), ("worker", engine.worker_client)):
        monkeypatch.setattr(client, "let_answers_in", lambda name=name: let_in.append(name))
    os.kill(lone_server.pid, signal.SIGSTOP)
    request = engine.request("b", tokens)
    for _ in range(3):
        assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    assert let_in == ["scheduler"]
    engine.step({})
    assert engine.scheduler.matched_tokens(request, 0) == (None, False)
    assert let_in == ["scheduler"] * 2
    os.kill(lone_server.pid, signal.SIGCONT)
    hit = engine.matched(request)
    assert hit > 0

    os.kill(lone_server.pid, signal.SIGSTOP)
    engine.allocate(request, [TABLE], hit)
    let_in.clear()
    engine.step({})
    engine.step({})
    assert let_in == ["worker"] * 2
    os.kill(lone_server.pid, signal.SIGCONT)
    assert engine.drain().finished == {"b"}
    let_in.clear()
    engine.step({})
    assert not let_in


def test_67_a_store_that_a_stalled_server_has_not_read_is_dropped(
    engine_of: Any, lone_server: EmbeddedServer
) -> None:
    settings = {**BRIEF, "hma.lookup_timeout_s": 60, "hma.breaker_s": 0.2}
    engine = engine_of(full(16), window(16, 32), url=lone_server.url, chunk=16, settings=settings)
    request = engine.request("a", tokens_of(48))
    tables = [TABLE, [4, 5, 6]]
    engine.allocate(request, tables, 0)
    os.kill(lone_server.pid, signal.SIGSTOP)
    engine.compute(request, 48, tables)
    assert engine.worker.stats.data["failures"] == {"timeout": 1}
    # preempted: other tokens are written into the blocks before the server reads them
    engine.step({}, preempted=["a"])
    engine.wipe()
    os.kill(lone_server.pid, signal.SIGCONT)
    eventually(lambda: not engine.worker._breaker.is_open)

    assert engine.matched(engine.request("b", tokens_of(48))) == 0


def test_a_failed_store_goes_along_with_the_next_chunk(
    engine_of: Any, lone_server: EmbeddedServer
) -> None:
    settings = {**BRIEF, "hma.breaker_s": 60, "hma.store_decode": True}
    engine = engine_of(full(16), url=lone_server.url, chunk=16, settings=settings)
    request = engine.request("a", tokens_of(16))
    engine.allocate(request, [TABLE], 0)
    os.kill(lone_server.pid, signal.SIGSTOP)
    orders = [stored_ranges(engine.compute(request, 16, [TABLE]))]
    for token in range(16):
        request.tokens.append(token)
        orders.append(stored_ranges(engine.compute(request, 1, [TABLE])))

    # not once a step: a decode step is not to pay for it again and again
    assert orders == [[(0, 1)], *[[]] * 15, [(0, 2)]]


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_the_last_chunk_is_told_of_though_its_request_ends_with_it(
    engine_of: Any, ends: bool
) -> None:
    engine = engine_of(full(16), chunk=16, events=StoredEvents())
    request = engine.request("a", tokens_of(48))
    engine.allocate(request, [TABLE], 0)
    meta = engine.order({"a": (request, 48, [TABLE])})
    output = engine.work(meta)
    if ends:
        # the engine frees a request before it hands over the results of its step
        engine.finish(request)
    engine.tell([output], meta)

    (event,) = engine.scheduler.take_events()
    assert event.block_hashes == [maybe_convert_block_hash(one) for one in request.block_hashes]
    assert (event.token_ids, event.parent_block_hash) == (request.tokens, None)
    assert not engine.scheduler._ordered


def test_a_reset_asks_again_for_those_who_wait(engine_of: Any, server: EmbeddedServer) -> None:
    engine = engine_of(full(16), chunk=16, events=StoredEvents())
    tokens = store(engine)
    list(engine.scheduler.take_events())
    request = engine.request("b", tokens)
    assert engine.matched(request) == 48

    assert engine.scheduler.reset_cache()

    assert engine.matched(request) == 0
    assert [type(one).__name__ for one in engine.scheduler.take_events()] == ["AllBlocksCleared"]
    eventually(lambda: leases(server.url) == 0)


def test_what_was_computed_before_a_reset_is_not_stored_after_it(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=16)
    tokens = tokens_of(48)
    request = engine.request("a", tokens)
    engine.allocate(request, [TABLE], 0)
    engine.compute(request, 16, [TABLE])
    assert engine.scheduler.reset_cache()

    assert stored_ranges(engine.compute(request, 32, [TABLE])) == []
    assert engine.matched(engine.request("b", tokens)) == 0
    # from its own start it computes everything anew
    engine.step({}, preempted=["a"])
    assert engine.matched(request) == 0
    engine.allocate(request, [TABLE], 0)
    request.num_computed_tokens = 0
    assert stored_ranges(engine.compute(request, 48, [TABLE])) == [(0, 3)]


def test_a_reset_without_a_server_is_no_error(engine_of: Any, lone_server: EmbeddedServer) -> None:
    engine = engine_of(full(16), url=lone_server.url, chunk=16, settings=BRIEF)
    os.kill(lone_server.pid, signal.SIGKILL)
    lone_server.process.wait()

    assert engine.scheduler.reset_cache() is False
