"""Every named step of store, lookup and retrieve, with each side killed there or stopped there.

A stopped process is held past every deadline and then let go on. Whatever happens: no wrong hit, no
write into blocks that were given away, no hang, nothing left in `/dev/shm`, and a client that comes
back by itself.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from support.server_nursery import Child, Nursery

from hma_triton.client import HmaClient
from hma_triton.stop_points import CLIENT_POINTS, SERVER_POINTS

CHUNKS = 4
TOKENS = CHUNKS * 32
SHORT_S = 0.25
LONG_S = 20.0
LEASE_S = 0.5
ROUNDS = [pytest.param(1, id="once"), pytest.param(20, id="many", marks=pytest.mark.long)]


def start_server(processes: Nursery, url: str, stop_at: str = "") -> Child:
    server = processes.start(
        "server", stop_at, url=url, host_bytes=4 << 20, lease_s=LEASE_S, verify="all"
    )
    assert server.call("ready")
    return server


def check_nothing_left(processes: Nursery) -> None:
    """End all processes; `/dev/shm` then has no entry of theirs."""
    pids = [child.pid for child in processes.children]
    processes.release()
    left = [name for name in os.listdir("/dev/shm") for pid in pids if f"_{pid}_" in name]
    assert left == []


def operate(driver: Child, point: str, deadline_s: float) -> None:
    """Begin the operation that passes `point`."""
    kind = point.split(".")[1]
    if kind == "store":
        driver.post("store", 1, CHUNKS, deadline_s)
    elif kind == "lookup":
        driver.post("lookup", 1, CHUNKS, "r", deadline_s)
    else:
        driver.post("load", 1, CHUNKS, "r", deadline_s)


def operate_until_stopped(stopped: Child, driver: Child, point: str) -> float:
    """Begin the operation with a deadline that passes while `stopped` stands at `point`.

    On a machine so busy that the deadline passes before the point is reached, try a longer one.
    Gives the deadline, in seconds.
    """
    answers = []
    for deadline_s in (SHORT_S, 4 * SHORT_S, 16 * SHORT_S, LONG_S):
        operate(driver, point, deadline_s)
        while not driver.has_answer():
            if stopped.has_stopped_at(point):
                return deadline_s
            time.sleep(0.002)
        answers.append(driver.answer())
    raise AssertionError(f"{point} was never reached: {answers}")


def prepare(driver: Child, point: str) -> None:
    """What must have happened before the operation at `point` makes sense."""
    if point.split(".")[1] != "store":
        # in later rounds it is there already
        assert driver.call("store", 1, CHUNKS, LONG_S)[0] == ""


def check_serves(driver: Child, seed: int = 2) -> None:
    """A full round works: store, hit, load."""
    assert driver.call("store", seed, CHUNKS, LONG_S)[0] == ""
    tokens, reason, _ = driver.call("lookup", seed, CHUNKS, "check", LONG_S)
    assert (tokens, reason) == (TOKENS, "all")
    assert driver.call("load", seed, CHUNKS, "check", LONG_S) == (True, "")


def check_any_hit_is_true(driver: Child) -> None:
    """Whatever the first prompt hits, if anything, its bytes are right."""
    tokens, _, _ = driver.call("lookup", 1, CHUNKS, "judge", LONG_S)
    assert tokens in (0, TOKENS), "a store is all or nothing"
    if tokens:
        assert driver.call("load", 1, CHUNKS, "judge", LONG_S) == (True, "")


def check_skipped_at_once(stores: list[tuple[str, int, float]]) -> None:
    """Nobody waits for a deadline; what a busy machine adds to one of them is not ours."""
    assert {(code, stored) for code, stored, _ in stores} == {("unavailable", 0)}
    waits = [waited for _, _, waited in stores]
    assert min(waits) < 1 and max(waits) < LONG_S / 2, waits


def use_once(processes: Nursery, url: str, observer: HmaClient) -> None:
    """What the first use takes for good, in descriptors and memory, is taken before measuring."""
    driver = processes.start("driver", url=url)
    driver.call("register")
    check_serves(driver, seed=3)
    driver.close()
    wait_for(is_quiet, observer)


def check_flat(process: Child, before: dict[str, int]) -> None:
    """Descriptors, threads and memory come back to what they were; unmapping takes a moment."""
    until = time.monotonic() + 10
    while True:
        after = process.call("facts")
        flat = (
            after["descriptors"] <= before["descriptors"]
            # the second of two control threads starts when it is first needed
            and after["threads"] <= before["threads"] + 1
            and after["resident_bytes"] - before["resident_bytes"] < 8 << 20
        )
        if flat:
            return
        assert time.monotonic() < until, (before, after)
        time.sleep(0.02)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("point", SERVER_POINTS)
def test_server_killed(processes: Nursery, url: str, point: str, rounds: int) -> None:
    for _ in range(rounds):
        server = start_server(processes, url, stop_at=point)
        driver = processes.start("driver", url=url)
        driver.call("register")
        prepare(driver, point)
        assert driver.call("self_check")
        before = driver.call("facts")
        operate(driver, point, LONG_S)
        server.wait_stopped_at(point)
        started = time.monotonic()
        server.kill()
        kind = point.split(".")[1]
        if kind == "store":
            code, stored, _ = driver.answer()
            assert (code, stored) == ("unavailable", 0)
        elif kind == "lookup":
            tokens, reason, _ = driver.answer()
            assert (tokens, reason) == (0, "unavailable")
        else:
            assert driver.answer() == (False, "unavailable")
        assert time.monotonic() - started < 5, "a dead server is noticed at once"
        assert driver.call("nothing_written_for", 0.05)
        gap = [driver.call("store", 1, CHUNKS, LONG_S) for _ in range(3)]
        check_skipped_at_once(gap)
        server = start_server(processes, url)
        assert driver.call("connected"), "the client comes back and registers by itself"
        assert driver.call("lookup", 1, CHUNKS, "new", LONG_S)[0] == 0
        check_serves(driver)
        check_flat(driver, before)
        check_nothing_left(processes)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("point", SERVER_POINTS)
def test_server_stopped(processes: Nursery, url: str, point: str, rounds: int) -> None:
    for _ in range(rounds):
        server = start_server(processes, url, stop_at=point)
        driver = processes.start("driver", url=url)
        driver.call("register")
        prepare(driver, point)
        deadline_s = operate_until_stopped(server, driver, point)
        kind = point.split(".")[1]
        if kind == "store":
            code, stored, waited = driver.answer()
            assert (code, stored) == ("timeout", 0)
            assert waited < deadline_s + 5
        elif kind == "lookup":
            tokens, reason, waited = driver.answer()
            assert (tokens, reason) == (0, "timeout")
            assert waited < deadline_s + 5
        else:
            time.sleep(2 * deadline_s)
            assert not driver.has_answer(), "the blocks are not given up yet"
        if kind != "retrieve":
            driver.call("reuse_blocks")
        time.sleep(LEASE_S)
        server.signal(signal.SIGCONT)
        if kind == "retrieve":
            ok, code = driver.answer()
            assert ok or code in ("deadline", "aborted", "timeout"), code
        assert driver.call("nothing_written_for", 0.1)
        check_any_hit_is_true(driver)
        check_serves(driver)
        with HmaClient(url) as observer:
            wait_for(lambda status: status["leases"] == 0, observer)
        check_nothing_left(processes)


def wait_for(condition, observer: HmaClient, timeout_s: float = 10.0) -> dict:
    until = time.monotonic() + timeout_s
    while not condition(status := observer.status()):
        assert time.monotonic() < until, status
        time.sleep(0.02)
    return status


def is_quiet(status: dict) -> bool:
    return (
        status["leases"] == 0
        and status["open_copies"] == 0
        and status["pinned_bytes"] == 0
        and len(status["registrations"]) == 0
    )


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("point", CLIENT_POINTS)
def test_client_killed(processes: Nursery, url: str, point: str, rounds: int) -> None:
    server = start_server(processes, url)
    with HmaClient(url, role="observer") as observer:
        observer.connect()
        use_once(processes, url, observer)
        before = server.call("facts")
        for _ in range(rounds):
            driver = processes.start("driver", point, url=url)
            driver.call("register")
            prepare(driver, point)
            operate(driver, point, LONG_S)
            driver.wait_stopped_at(point)
            driver.kill()
            started = time.monotonic()
            wait_for(is_quiet, observer)
            assert time.monotonic() - started < 3, "a dead peer's state goes at once"
            successor = processes.start("driver", url=url)
            successor.call("register")
            check_any_hit_is_true(successor)
            check_serves(successor)
            successor.close()
            wait_for(is_quiet, observer)
        check_flat(server, before)
    check_nothing_left(processes)


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("point", CLIENT_POINTS)
def test_client_stopped(processes: Nursery, url: str, point: str, rounds: int) -> None:
    server = start_server(processes, url)
    with HmaClient(url, role="observer") as observer:
        observer.connect()
        use_once(processes, url, observer)
        before = server.call("facts")
        for _ in range(rounds):
            driver = processes.start("driver", point, url=url)
            driver.call("register")
            prepare(driver, point)
            deadline_s = operate_until_stopped(driver, driver, point)
            time.sleep(deadline_s + LEASE_S)
            assert observer.ping(2.0) < 1, "the others are served"
            wait_for(lambda status: status["leases"] == 0, observer)
            driver.signal(signal.SIGCONT)
            outcome = driver.answer()
            if point.split(".")[1] == "retrieve":
                ok, code = outcome
                assert ok or code in ("deadline", "aborted", "timeout"), code
            assert driver.call("nothing_written_for", 0.05)
            check_any_hit_is_true(driver)
            check_serves(driver)
            driver.close()
            wait_for(is_quiet, observer)
        check_flat(server, before)
    check_nothing_left(processes)
