"""Field cases of K7 and K9, the connector's part: failures, restarts, order."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.replay_tools import CONFIG, eventually, registered, serve_at, stored_ranges, tokens_of
from support.schedule_replay import bytes_of
from support.toy_config import full, state, window

from hma_triton.errors import RemoteError
from hma_triton.messages import Unregister
from hma_triton.server.launch import EmbeddedServer, start_embedded


def test_71_a_failed_load_is_reported_once_and_not_tried_again(engine_of: Any) -> None:
    engine = engine_of(full(16), window(16, 64), state(16), chunk=48)
    tokens = tokens_of(145)
    first = engine.request("a", tokens)
    engine.allocate(first, [[], [], []], 0)
    tables = [list(range(1, 10)), list(range(11, 20)), [0] * 8 + [21]]
    engine.compute(first, 144, tables)
    second = engine.request("b", tokens)
    assert engine.matched(second) == 144
    engine.scheduler_client.clear(engine.scheduler._instance_id)
    engine.allocate(second, [list(range(31, 40)), [0] * 5 + [41, 42, 43, 44], [0] * 8 + [51]], 144)

    result = engine.drain()

    assert (result.finished, result.failed) == ({"b"}, {"b"})
    assert engine.step({}).finished == set()
    assert engine.matched(second) == 0
    engine.allocate(second, [[], [], []], 0)
    assert stored_ranges(engine.compute(second, 144, tables)) == [(0, 3)]
    # nor when it is preempted later, though all of it is there now
    engine.step({}, preempted=["b"])
    assert engine.matched(second) == 0
    assert engine.matched(engine.request("c", tokens)) == 144


def test_73_an_idle_engine_stays_registered(engine_of: Any) -> None:
    short = start_embedded(replace(CONFIG, lease_s=0.2))
    try:
        engine = engine_of(full(16), url=short.url, chunk=16)
        time.sleep(1.0)
        request = engine.request("a", tokens_of(16))
        engine.allocate(request, [[1]], 0)
        result = engine.compute(request, 16, [[1]])
        assert stored_ranges(result) == [(0, 1)]
        assert engine.worker.stats.data["stores"] == 1
    finally:
        engine.close()
        short.close()


def test_73_a_lost_registration_comes_back(engine_of: Any, server: EmbeddedServer) -> None:
    engine = engine_of(full(16), chunk=16)
    name = engine.worker.registration.instance_id
    # the server forgets the pool; the client does not know
    engine.worker_client._link.tell(lambda seq: Unregister(seq=seq, instance_id=name))
    eventually(lambda: name not in registered(server.url))
    request = engine.request("a", tokens_of(16))
    engine.allocate(request, [[1]], 0)
    engine.compute(request, 16, [[1]])

    assert engine.worker.stats.data["stores"] == 1


def test_76_a_restarted_server_is_used_again(engine_of: Any) -> None:
    folder_server = start_embedded(CONFIG)
    url = folder_server.url
    engine = engine_of(
        full(16), url=url, chunk=16, settings={"hma.breaker_s": 0.2, "hma.store_timeout_s": 0.5}
    )
    os.kill(folder_server.pid, signal.SIGKILL)
    folder_server.process.wait()
    for index in range(3):
        request = engine.request(f"gap{index}", tokens_of(16, index))
        assert engine.matched(request) == 0
        engine.allocate(request, [[1]], 0)
        started = time.monotonic()
        engine.compute(request, 16, [[1]])
        assert time.monotonic() - started < 1.0
        engine.finish(request)
    child = serve_at(url)
    try:
        eventually(lambda: not engine.worker._breaker.is_open, 15.0)
        request = engine.request("after", tokens_of(16, 9))
        engine.matched(request)
        engine.allocate(request, [[1]], 0)
        engine.compute(request, 16, [[1]])
        assert engine.matched(engine.request("again", tokens_of(16, 9))) == 16
    finally:
        engine.close()
        child.terminate()
        child.wait()
        folder_server.close()


def test_79_the_same_engine_registers_again(engine_of: Any) -> None:
    first = engine_of(full(16), chunk=16, name="same")
    second = engine_of(full(16), chunk=16, name="same")
    request = second.request("a", tokens_of(16))
    second.allocate(request, [[1]], 0)
    second.compute(request, 16, [[1]])

    assert second.worker.stats.data["stores"] == 1
    assert first.worker.registration.instance_id == "same"


def test_80_too_few_slots_end_the_start_with_the_settings_name(engine_of: Any) -> None:
    small = start_embedded(replace(CONFIG, max_registrations=1))
    try:
        first = engine_of(full(16), url=small.url, chunk=16)
        with pytest.raises(RemoteError, match="--max-registrations is 1"):
            engine_of(full(16), url=small.url, chunk=16)
        first.close()
    finally:
        small.close()


def test_91_a_block_is_not_written_before_the_load_was_ordered(engine_of: Any) -> None:
    engine = engine_of(full(16), chunk=16)
    first = engine.request("a", tokens_of(16))
    engine.allocate(first, [[1]], 0)
    engine.compute(first, 16, [[1]])
    right = bytes_of(engine.page(0, 1))
    engine.wipe()
    second = engine.request("b", tokens_of(16))
    assert engine.matched(second) == 16
    engine.allocate(second, [[2]], 16)
    time.sleep(0.3)
    # allocated, not ordered: the step that orders it may still use the block
    assert set(bytes_of(engine.page(0, 2))) == {0xEE}
    engine.drain()

    assert bytes_of(engine.page(0, 2)) == right
    assert torch.equal(engine.page(0, 1), engine.page(0, 3))
