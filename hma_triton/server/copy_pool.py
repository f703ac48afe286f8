"""Threads that copy. Every registration has a lane; lanes take turns, and none takes all threads.

A lane that is full refuses work, which becomes a miss: nobody waits for a slow neighbour.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol


class CopyJob(Protocol):
    """One copy. `run` is called on a thread of the pool and must not raise."""

    def run(self) -> None:
        """Do the copy; keep the outcome for the loop."""


@dataclass(slots=True)
class _Lane:
    queue: deque[CopyJob] = field(default_factory=deque)
    running: int = 0


class CopyPool:
    """`threads` copy threads. `on_done(job)` is called on the copy thread after each job."""

    def __init__(self, threads: int, queue_limit: int, on_done: Callable[[CopyJob], None]) -> None:
        self._queue_limit = queue_limit
        self._on_done = on_done
        # one lane alone leaves a thread to the others
        self._lane_limit = max(1, threads - 1)
        self._lanes: dict[Hashable, _Lane] = {}
        self._turn: deque[Hashable] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._work, name=f"hma-copy-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane_key: Hashable, job: CopyJob) -> bool:
        """Queue a job; False when the lane is full or the pool stops."""
        with self._changed:
            lane = self._lanes.setdefault(lane_key, _Lane())
            if self._stopping or len(lane.queue) >= self._queue_limit:
                return False
            lane.queue.append(job)
            self._turn.append(lane_key)
            self._changed.notify()
            return True

    def cancel(self, lane_key: Hashable, job: CopyJob) -> bool:
        """Take a job out of its queue; False when it has started."""
        with self._changed:
            lane = self._lanes.get(lane_key)
            if lane is None or job not in lane.queue:
                return False
            lane.queue.remove(job)
            return True

    def forget(self, lane_key: Hashable) -> None:
        """Drop an empty lane."""
        with self._changed:
            lane = self._lanes.get(lane_key)
            if lane is not None and not lane.queue and not lane.running:
                del self._lanes[lane_key]

    @property
    def queued(self) -> int:
        """Jobs that have not started."""
        with self._changed:
            return sum(len(lane.queue) for lane in self._lanes.values())

    @property
    def running(self) -> int:
        """Jobs that are being copied."""
        with self._changed:
            return sum(lane.running for lane in self._lanes.values())

    def stop(self, timeout_s: float) -> bool:
        """Take no more work and let running jobs end; False when they did not in time."""
        with self._changed:
            self._stopping = True
            for lane in self._lanes.values():
                lane.queue.clear()
            self._changed.notify_all()
        each = timeout_s / max(1, len(self._threads))
        for thread in self._threads:
            thread.join(each)
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self) -> tuple[_Lane, CopyJob] | None:
        """The next job of the lane whose turn it is; called under the lock."""
        for _ in range(len(self._turn)):
            key = self._turn.popleft()
            lane = self._lanes.get(key)
            if lane is None or not lane.queue:
                continue
            if lane.running >= self._lane_limit:
                self._turn.append(key)
                continue
            lane.running += 1
            return lane, lane.queue.popleft()
        return None

    def _work(self) -> None:
        while True:
            with self._changed:
                while (found := self._next()) is None:
                    if self._stopping:
                        return
                    self._changed.wait()
                lane, job = found
            job.run()
            with self._changed:
                lane.running -= 1
                self._changed.notify()
            self._on_done(job)
            # an idle thread must not keep the last pool mapped
            del found, lane, job
