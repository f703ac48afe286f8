"""Concurrent callers of one copier: every byte right, nothing shared but the helper threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from support.copy_cases import CopyCase, single_run_case
from support.transposed_cases import transposed_case

from hma_triton.errors import TransferError
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.cpu import BYTES_PER_THREAD, CpuCopier
from hma_triton.kernels.cpu_movers import pages_mover, runs_mover
from hma_triton.kernels.reference import ReferenceCopier

CALLERS = 8
ROUNDS = 40

# each over the size from which helper threads take part
CASES = (
    single_run_case(70_000, range(30), rows=1, num_blocks=40),
    single_run_case(300_000, range(9), rows=1, num_blocks=12),
    transposed_case(128, 8, 256, range(9), rows=1, num_blocks=12),
    transposed_case(500, 4, 100, range(12), rows=1, num_blocks=14),
)


class SlowHelpers:
    """Shares of which a helper thread takes one that lasts; the caller finds nothing left."""

    def __init__(self) -> None:
        self.caller = threading.get_ident()
        self.began = threading.Event()
        self.running = 0

    def run(self) -> None:
        if threading.get_ident() == self.caller:
            self.began.wait(5)
            return
        self.running += 1
        self.began.set()
        time.sleep(0.2)
        self.running -= 1


@pytest.mark.parametrize("refused", ["second", "interrupt"])
def test_no_thread_copies_on_when_the_call_has_ended(refused: str, monkeypatch) -> None:
    """The blocks are given away then: a thread that could not be started changes nothing there."""
    shares, start, started = SlowHelpers(), threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if started:
            shares.began.wait(5)
            raise RuntimeError("can't start new thread") if refused == "second" else SystemExit
        started.append(thread)
        start(thread)

    copier = CpuCopier(4, "numpy")
    case = single_run_case(1 << 20, range(8), rows=1, num_blocks=8)
    monkeypatch.setattr(copier._implementation, "shares", lambda *_: shares)
    monkeypatch.setattr(threading.Thread, "start", limited)
    arguments = (case.spec, Direction.STORE, np.arange(8), np.arange(8))
    try:
        if refused == "second":
            copier.copy_blocks(*arguments)
        else:
            with pytest.raises(SystemExit):
                copier.copy_blocks(*arguments)
        assert started
        assert shares.running == 0
    finally:
        copier.close()


@dataclass(frozen=True)
class Lane:
    """Memory of one caller, and what it must hold after each direction."""

    spec: CopySpec
    ids: Int64Array
    places: Int64Array
    pool: npt.NDArray[np.uint8]
    host: npt.NDArray[np.uint8]
    stored: npt.NDArray[np.uint8]
    retrieved: npt.NDArray[np.uint8]
    noise: npt.NDArray[np.uint8]

    def run(self, copier: CpuCopier, direction: Direction) -> None:
        """Copy into poison, then compare everything."""
        source, target, expected = (
            (self.pool, self.host, self.stored)
            if direction is Direction.STORE
            else (self.host, self.pool, self.retrieved)
        )
        source[:] = self.noise[: source.size]
        target[:] = 0xEE
        copier.copy_blocks(self.spec, direction, self.ids, self.places)
        assert np.array_equal(target, expected)
        assert np.array_equal(source, self.noise[: source.size])


def make_lane(case: CopyCase, seed: int) -> Lane:
    random = np.random.default_rng(seed)
    pool = np.zeros(case.pool_bytes, dtype=np.uint8)
    host = np.zeros(case.object_bytes, dtype=np.uint8)
    noise = random.integers(0, 256, max(pool.size, host.size), dtype=np.uint8)
    ids = random.permutation(case.spec.num_blocks)[: len(case.places)].astype(np.int64)
    places = np.array(case.places, dtype=np.int64) + host.ctypes.data
    rows = tuple(row + pool.ctypes.data for row in case.spec.row_addresses)
    fields = {name: getattr(case.spec, name) for name in CopySpec.__dataclass_fields__}
    spec = CopySpec(**{**fields, "row_addresses": rows})
    expected = []
    for direction, source, target in (
        (Direction.STORE, pool, host),
        (Direction.RETRIEVE, host, pool),
    ):
        source[:] = noise[: source.size]
        target[:] = 0xEE
        ReferenceCopier().copy_blocks(spec, direction, ids, places)
        expected.append(target.copy())
    return Lane(spec, ids, places, pool, host, expected[0], expected[1], noise)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("implementation", ["compiled", "numpy"])
def test_callers_at_the_same_time(implementation: str, threads: int) -> None:
    lanes = [make_lane(CASES[i % len(CASES)], seed=i) for i in range(CALLERS)]
    assert min(lane.ids.size * lane.spec.block_bytes for lane in lanes) >= 2 * BYTES_PER_THREAD
    copier = CpuCopier(threads, implementation)
    copier.prepare([lane.spec for lane in lanes])
    start = threading.Barrier(CALLERS)

    def call(lane: Lane) -> None:
        start.wait()
        for turn in range(ROUNDS):
            lane.run(copier, Direction(turn % 2))

    with ThreadPoolExecutor(CALLERS) as callers:
        for done in [callers.submit(call, lane) for lane in lanes]:
            done.result()
    copier.close()


def test_many_readers_of_one_pool() -> None:
    lane = make_lane(CASES[0], seed=99)
    lane.pool[:] = lane.noise[: lane.pool.size]
    hosts = [np.zeros_like(lane.host) for _ in range(CALLERS)]
    with CpuCopierContext(2) as copier, ThreadPoolExecutor(CALLERS) as callers:
        copies = [
            callers.submit(
                copier.copy_blocks,
                lane.spec,
                Direction.STORE,
                lane.ids,
                lane.places - lane.host.ctypes.data + host.ctypes.data,
            )
            for host in hosts
        ]
        for done in copies:
            done.result()
    for host in hosts:
        held = host.reshape(len(lane.ids), -1)
        assert np.array_equal(held, lane.pool.reshape(lane.spec.num_blocks, -1)[lane.ids])


class CpuCopierContext(CpuCopier):
    def __enter__(self) -> CpuCopier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_preparing_while_others_copy() -> None:
    """A second registration does not disturb the copies of the first."""
    lanes = [make_lane(CASES[i % len(CASES)], seed=i) for i in range(4)]
    with CpuCopierContext(2) as copier, ThreadPoolExecutor(5) as callers:

        def register() -> None:
            for _ in range(ROUNDS):
                copier.prepare([lane.spec for lane in lanes])

        def call(lane: Lane) -> None:
            for turn in range(ROUNDS):
                lane.run(copier, Direction(turn % 2))

        work = [callers.submit(register), *(callers.submit(call, lane) for lane in lanes)]
        for done in work:
            done.result()


def test_closing_lets_copies_end() -> None:
    """A close from elsewhere: copies under way end whole, later ones are refused."""
    lanes = [make_lane(CASES[i % len(CASES)], seed=i) for i in range(4)]
    copier = CpuCopier(2)
    begun = threading.Barrier(5)

    def call(lane: Lane) -> int:
        begun.wait()
        for turn in range(1000):
            try:
                lane.run(copier, Direction(turn % 2))
            except TransferError as error:
                assert "closed" in str(error)
                return turn
        raise AssertionError("the copier was never closed")

    with ThreadPoolExecutor(4) as callers:
        copies = [callers.submit(call, lane) for lane in lanes]
        begun.wait()
        copier.close()
        assert all(done.result() < 1000 for done in copies)


def test_movers_release_the_interpreter_lock() -> None:
    for mover in (runs_mover(), pages_mover()):
        assert mover.targetoptions["nogil"] is True  # type: ignore[attr-defined]
