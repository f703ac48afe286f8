"""Pinning at the server's start, and driver calls that do not return: over the fake driver."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCudaDriver, FakeGpu

from hma_triton.config import ServerConfig
from hma_triton.errors import CapacityError, ConfigError, TransferError
from hma_triton.objects.arena import Arena
from hma_triton.server import pinned_arena, registrar
from hma_triton.server.control_threads import ControlThreads
from hma_triton.server.launch import EXIT_COPIES_LEFT, serve
from hma_triton.server.loop import CacheServer
from hma_triton.server.pinned_arena import PinnedArena

CUDA = torch.device("cuda", 0)


class SlowDriver(FakeCudaDriver):
    """Registering waits until a test lets it go on."""

    gate = threading.Event()

    def register_host(self, address: int, nbytes: int) -> None:
        assert self.gate.wait(10)
        super().register_host(address, nbytes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    made = FakeGpu()
    SlowDriver.gate = threading.Event()
    SlowDriver.gate.set()
    monkeypatch.setattr(pinned_arena, "CudaDriver", lambda index=0: SlowDriver(made, index))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    yield made
    SlowDriver.gate.set()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s/s.sock"


def _started(mode: str) -> PinnedArena:
    made = PinnedArena(Arena(1 << 20), mode)
    made.start()
    return made


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_the_arena_is_pinned_at_the_start_and_once(gpu: FakeGpu, mode: str) -> None:
    started = _started(mode)
    first = started.for_device(CUDA)
    assert first is not None and started.for_device(CUDA) is first
    assert started.for_device(torch.device("cpu")) is None
    assert gpu.names().count("register_host") == 1 and started.is_pinned


def test_auto_pins_beside_the_start_and_registrations_wait_for_it(gpu: FakeGpu) -> None:
    SlowDriver.gate.clear()
    started = _started("auto")
    assert not started.is_pinned, "the start does not wait"
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(started.for_device(CUDA)))
    waiting.start()
    assert started.for_device(torch.device("cpu")) is None, "a pool on the CPU waits for nothing"
    assert not found
    SlowDriver.gate.set()
    waiting.join(10)
    assert found and found[0] is not None
    assert all(ident != threading.get_ident() for ident, _ in gpu.threads)


def test_a_server_with_auto_answers_while_the_arena_is_pinned(gpu: FakeGpu, url: str) -> None:
    SlowDriver.gate.clear()
    began = time.monotonic()
    server = CacheServer(ServerConfig(url=url, host_bytes=1 << 20))
    assert time.monotonic() - began < 5
    assert server.snapshot()["arena"]["pinned"] is False
    server._turn()
    SlowDriver.gate.set()
    server.handlers.registrar.pinned_arena.for_device(CUDA)
    assert server.snapshot()["arena"]["pinned"] is True
    server.stop()
    assert server.run()


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_without_pins_pools_on_a_device_are_still_served(
    gpu: FakeGpu, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.refuse_register_after = 0
    with caplog.at_level(logging.INFO, logger="hma_triton.server"):
        started = _started(mode)
        assert started.for_device(CUDA) is None
    said = [record.message for record in caplog.records if "plain shared memory" in record.message]
    assert len(said) == 1
    assert ("cannot be pinned: cudaErrorMemoryAllocation" in said[0]) == (mode == "auto")
    assert "register_host" not in gpu.names() or mode == "auto"


def test_on_is_an_error_at_the_start(
    gpu: FakeGpu, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.refuse_register_after = 0
    config = ServerConfig(url=url, host_bytes=1 << 20, pin="on")
    with pytest.raises(CapacityError, match="cannot be pinned"):
        CacheServer(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no GPU"):
        CacheServer(config)


def test_auto_without_a_device_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hma_triton.server"):
        assert not _started("auto").is_pinned
    assert [record.message for record in caplog.records] == [
        f"the arena is plain shared memory: torch {torch.__version__} finds no GPU that it can use"
    ]


def test_settings_of_pinning() -> None:
    assert ServerConfig(url="ipc:///tmp/x").pin == "auto"
    with pytest.raises(ConfigError, match=r"pin 'maybe' is unknown; use one of \('auto', 'on'"):
        ServerConfig(url="ipc:///tmp/x", pin="maybe")


def _eventually(right: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not right():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_calls_that_hang_lose_their_turn_and_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    threads, gate = ControlThreads(2, 0.05), threading.Event()

    def hang() -> str:
        gate.wait(10)
        return "late"

    stuck = [threads.submit(hang) for _ in range(2)]
    with caplog.at_level(logging.WARNING, logger="hma_triton.server"):
        assert threads.submit(lambda: "next").result(10) == "next"
    _eventually(lambda: (threads.overdue, threads.overdue_total) == (2, 2))
    assert "hang has not ended within 0 s" in caplog.text
    gate.set()
    assert [future.result(10) for future in stuck] == ["late", "late"]
    _eventually(lambda: threads.overdue == 0)
    assert threads.overdue_total == 2


def test_at_most_as_many_calls_as_turns_and_errors_reach_their_future() -> None:
    threads = ControlThreads(2, 60)
    lock, running, most = threading.Lock(), [0], [0]

    def work() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.005)
        with lock:
            running[0] -= 1

    def fail() -> None:
        raise TransferError("no")

    for future in [threads.submit(work) for _ in range(12)]:
        future.result(10)
    assert most[0] <= 2
    with pytest.raises(TransferError, match="no"):
        threads.submit(fail).result(10)
    assert threads.overdue_total == 0


def test_a_call_that_gets_no_thread_fails_and_gives_its_turn_back(monkeypatch) -> None:
    start = threading.Thread.start
    refuse = True

    def limited(thread: threading.Thread) -> None:
        if refuse and thread.name == "hma-called":
            raise RuntimeError("can't start new thread")
        start(thread)

    def called() -> int:
        return 1

    monkeypatch.setattr(threading.Thread, "start", limited)
    threads = ControlThreads(2, 60)
    for _ in range(5):
        with pytest.raises(RuntimeError, match="new thread"):
            threads.submit(called).result(5)
    refuse = False
    assert [threads.submit(called).result(5) for _ in range(5)] == [1] * 5
    assert threads.overdue == 0


def test_stopping_waits_for_nothing_and_cancels_what_waits() -> None:
    threads, gate = ControlThreads(1, 60), threading.Event()
    threads.submit(gate.wait, 10)
    waiting = threads.submit(gate.wait, 10)
    began = time.monotonic()
    threads.stop()
    assert waiting.cancelled() and threads.submit(gate.wait).cancelled()
    assert time.monotonic() - began < 1
    gate.set()


def test_a_release_that_hangs_does_not_hold_up_the_next_or_the_end(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registrar, "_CONTROL_LIMIT_S", 0.05)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    gate, released = threading.Event(), []
    made: list[CacheServer] = []
    real = CacheServer.run

    def pool(close: Callable[[], object]) -> Any:
        part = SimpleNamespace(close=close)
        return SimpleNamespace(engine=part, caches=part, instance_id="i", rank=0)

    def refuse() -> None:
        released.append("tried")
        raise TransferError("cudaIpcCloseMemHandle failed")

    def run(server: CacheServer) -> bool:
        made.append(server)
        control = server.handlers.registrar
        for _ in range(2):
            control._release_pool(pool(lambda: gate.wait(10)))
        control._release_pool(pool(refuse))
        _eventually(lambda: len(released) == 2)
        _eventually(lambda: server.snapshot()["overdue_calls"] == {"now": 2, "ever": 2})
        assert b"hma_overdue_calls 2.0" in _scrape(server)
        server.stop()
        return real(server)

    monkeypatch.setattr(CacheServer, "run", run)
    began = time.monotonic()
    config = ServerConfig(url=url, host_bytes=1 << 20)
    assert serve(config) == EXIT_COPIES_LEFT
    assert time.monotonic() - began < 8
    gate.set()
    _eventually(lambda: made[0].handlers.registrar.overdue == (0, 2))


def _scrape(server: CacheServer) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(server.handlers.metrics.registry)


def test_settings_that_cannot_be_served_are_found_before_memory_is_pinned(
    gpu: FakeGpu, url: str
) -> None:
    config = ServerConfig(url=url, host_bytes=1 << 20, pin="on", curve_key_file="/nowhere/key")
    with pytest.raises(ConfigError, match="/nowhere/key"):
        CacheServer(config)
    assert "register_host" not in gpu.names()


def test_a_server_that_cannot_pin_leaves_no_socket(gpu: FakeGpu, url: str) -> None:
    gpu.refuse_register_after = 0
    with pytest.raises(CapacityError):
        CacheServer(ServerConfig(url=url, host_bytes=1 << 20, pin="on"))
    assert not Path(url.removeprefix("ipc://")).exists()
