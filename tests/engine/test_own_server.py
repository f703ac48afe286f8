"""Start-up of an engine's worker: its own server or another's, and how long it waits for it."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from typing import Any

import pytest
from support.replay_tools import CONFIG, eventually, stored_ranges, tokens_of
from support.toy_config import full

from hma_triton.config import default_socket_directory, prepare_socket_directory
from hma_triton.errors import RemoteError, ServerUnavailableError
from hma_triton.integration.vllm.embedded_server import embedded_url, ensure_embedded_server
from hma_triton.server.launch import start_embedded


def test_an_own_server_smaller_than_a_chunk_ends_the_start(engine_of: Any) -> None:
    settings = {"hma.server_url": "", "hma.host_gb": 2 / 1024}
    names = {"url": embedded_url("small"), "name": "small"}
    with pytest.raises(RemoteError, match=r"an object of 4194304 bytes .* raise --host-gb"):
        engine_of(full(16), chunk=1 << 16, settings=settings, **names)
    engine = engine_of(full(16), chunk=1 << 14, settings=settings, **names)
    assert engine.worker.registration.registered


def test_start_up_does_not_wait_for_ever_for_others_that_start() -> None:
    prepare_socket_directory(embedded_url("late"))
    descriptor = os.open(default_socket_directory(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        started = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=r"held the lock on .* for 0.3 s"):
            ensure_embedded_server("late", 1 << 20, 0.3)
        assert time.monotonic() - started < 10
    finally:
        os.close(descriptor)


def test_a_stalled_server_does_not_hold_up_the_start(engine_of: Any) -> None:
    server = start_embedded(CONFIG)
    try:
        os.kill(server.pid, signal.SIGSTOP)
        settings = {"hma.start_timeout_s": 0.5, "hma.breaker_s": 0.2}
        started = time.monotonic()
        engine = engine_of(full(16), url=server.url, chunk=16, settings=settings)
        assert time.monotonic() - started < 20
        assert not engine.worker.registration.registered
        request = engine.request("a", tokens_of(16))
        assert engine.scheduler.matched_tokens(request, 0)[0] in (None, 0)
        os.kill(server.pid, signal.SIGCONT)

        # it is taken up by itself
        eventually(lambda: not engine.worker._breaker.is_open, 20.0)
        other = engine.request("b", tokens_of(16))
        assert engine.matched(other) == 0
        engine.allocate(other, [[1]], 0)
        assert stored_ranges(engine.compute(other, 16, [[1]])) == [(0, 1)]
        assert engine.worker.stats.data["stores"] == 1
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.close()
