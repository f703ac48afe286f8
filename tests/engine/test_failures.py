"""A server that is slow, stalled, full, of another version or gone: the engine serves on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support.engine_cases import check_equal
from support.engine_families import prompt
from support.engine_probes import forget_our_keys, tracked_requests, wait_for_lookups
from support.engine_process import Engine
from support.engine_rig import Rig, audit_lines
from support.replay_tools import eventually

from hma_triton import messages as m
from hma_triton.config import ServerConfig
from hma_triton.server.launch import EmbeddedServer, start_embedded

gemma3 = pytest.mark.parametrize("rig", ["gemma3"], indirect=True)
QUICK = {"hma.store_timeout_s": 0.5, "hma.lookup_timeout_s": 0.2, "hma.breaker_s": 0.5}


@pytest.fixture
def lone_server() -> Iterator[EmbeddedServer]:
    """A server that the test may stall or kill."""
    made = start_embedded(ServerConfig(url="ipc:///replaced", host_bytes=64 << 20))
    yield made
    if made.process.poll() is None:
        os.kill(made.pid, signal.SIGCONT)
    made.close()


@pytest.fixture
def lone_engine(rig: Rig, lone_server: EmbeddedServer) -> Iterator[Engine]:
    engine = rig.start_ours({"hma.server_url": lone_server.url, **QUICK})
    yield engine
    engine.stop()


@gemma3
def test_a_stalled_server_costs_one_timeout(
    rig: Rig, lone_engine: Engine, lone_server: EmbeddedServer
) -> None:
    asked = [prompt(700, seed=100), prompt(777, seed=101), prompt(520, seed=102)]
    plain = rig.expected(asked)
    lone_engine.generate([prompt(300, seed=103)])
    os.kill(lone_server.pid, signal.SIGSTOP)
    started = time.monotonic()
    cold = lone_engine.generate(asked)
    seconds = time.monotonic() - started

    check_equal(rig, cold, plain)
    # three lookups that run out of time, one store that does; the breaker skips the others
    assert seconds < 3 * 0.2 + 0.5 + 15
    assert lone_engine.run(tracked_requests) == 0
    warnings = [line for line in lone_engine.log().splitlines() if "the engine goes on" in line]
    assert len(warnings) == 1

    os.kill(lone_server.pid, signal.SIGCONT)
    time.sleep(2.0)
    lone_engine.reset_prefix_cache()
    lone_engine.generate(asked)
    lone_engine.reset_prefix_cache()
    warm = lone_engine.generate(asked)
    assert [one.cached_tokens for one in warm] == [512, 768, 512]
    check_equal(rig, warm, plain)


@gemma3
def test_blocks_under_load_stay_taken_until_the_copier_is_known_dead(
    rig: Rig, lone_server: EmbeddedServer
) -> None:
    asked = prompt(1301, seed=104)
    plain = rig.expected([asked])
    settings = {"hma.server_url": lone_server.url, **QUICK, "hma.load_timeout_s": 0.5}
    with rig.start_ours(settings) as engine:
        engine.generate([asked])
        engine.reset_prefix_cache()
        loads = len(audit_lines(rig.audit_path, "load"))
        engine.call("add", "stalled", asked, {})
        engine.run(wait_for_lookups)
        os.kill(lone_server.pid, signal.SIGSTOP)
        time.sleep(0.1)
        assert engine.call("step", 40) == {}
        time.sleep(1.0)
        # long past the deadline: neither scheduled nor given up
        assert engine.call("step", 40) == {}
        os.kill(lone_server.pid, signal.SIGKILL)
        lone_server.process.wait()
        finished: dict[str, Any] = {}
        eventually(lambda: finished.update(engine.call("step", 20)) or finished, 20.0)

    assert finished["stalled"].cached_tokens == 0
    assert finished["stalled"].tokens == plain[0].tokens
    assert len(audit_lines(rig.audit_path, "load")) == loads


@gemma3
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load(rig: Rig, lone_server: EmbeddedServer, policy: str) -> None:
    asked = prompt(1301, seed=105)
    plain = rig.expected([asked])
    with rig.start_ours(
        {"hma.server_url": lone_server.url}, kv_transfer_config={"kv_load_failure_policy": policy}
    ) as engine:
        engine.generate([asked])
        engine.reset_prefix_cache()
        engine.call("add", "failing", asked, {})
        engine.run(wait_for_lookups)
        assert engine.run(forget_our_keys) > 0
        finished: dict[str, Any] = {}
        eventually(lambda: finished.update(engine.call("step", 20)) or finished, 20.0)
        if policy == "fail":
            assert finished["failing"].finish_reason == "error"
        else:
            assert finished["failing"].cached_tokens == 0
            assert finished["failing"].tokens == plain[0].tokens
        # the engine lives, and the recomputed prefix was stored again
        after = engine.generate([prompt(300, seed=106)])
        assert len(after[0].tokens) == 6
        assert engine.run(tracked_requests) == 0


@gemma3
def test_a_full_server(rig: Rig) -> None:
    # one chunk of this model has 896 KiB
    small = start_embedded(ServerConfig(url="ipc:///replaced", host_bytes=2 << 20))
    asked = [prompt(1301, seed=107), prompt(700, seed=108)]
    plain = rig.expected(asked)
    try:
        with rig.start_ours({"hma.server_url": small.url}) as engine:
            for _ in range(2):
                given = engine.generate(asked)
                check_equal(rig, given, plain)
                engine.reset_prefix_cache()
    finally:
        small.close()


@gemma3
def test_a_server_of_another_version(rig: Rig, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    url = f"ipc://{tmp_path}/old.sock"
    ended = threading.Event()
    thread = threading.Thread(target=_refuse_hellos, args=(url, ended))
    thread.start()
    try:
        asked = [prompt(300, seed=109)]
        plain = rig.expected(asked)
        with rig.start_ours({"hma.server_url": url, **QUICK}) as engine:
            check_equal(rig, engine.generate(asked), plain)
            lines = engine.log().splitlines()
            assert sum("no use of this cache server" in line for line in lines) == 1
    finally:
        ended.set()
        thread.join()


def _refuse_hellos(url: str, ended: threading.Event) -> None:
    """Answers every message as a server of another protocol version would."""
    decoder = m.RequestDecoder()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(url)
        while not ended.is_set():
            if not socket.poll(50):
                continue
            *address, frame = socket.recv_multipart()
            reply = m.ErrorReply(
                seq=decoder.decode(frame).seq,
                code=m.ErrorCode.UNSUPPORTED_VERSION.value,
                message="this server speaks version 0",
            )
            socket.send_multipart([*address, m.encode(reply)])
