"""Threads for work that may sit in a driver: a call that never returns holds up nobody else."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

log = logging.getLogger("hma_triton.server")

Result = TypeVar("Result")


class _Task:
    """One call, its outcome, and whether it still holds a turn."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.name = function.__name__.strip("_")
        self.work = partial(function, *args)
        self.future: Future[Any] = Future()
        self.overdue = False
        self.ended = False


class ControlThreads:
    """Runs at most `turns` calls at once, each on a thread of its own that no exit waits for.

    A call that takes longer than `limit_s` is logged and counted, and loses its turn to the next
    one; its outcome still counts when it comes.
    """

    def __init__(self, turns: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._free_turns = turns
        self._waiting: deque[_Task] = deque()
        self._stopped = False
        self._overdue = 0
        self._overdue_total = 0

    @property
    def overdue(self) -> int:
        """Calls that run longer than the limit now."""
        return self._overdue

    @property
    def overdue_total(self) -> int:
        """Calls that ever did."""
        return self._overdue_total

    def submit(self, function: Callable[..., Result], *args: Any) -> Future[Result]:
        """Run `function(*args)` when it has a turn; cancelled when the threads have stopped."""
        task = _Task(function, args)
        with self._lock:
            stopped = self._stopped
            if not stopped:
                self._waiting.append(task)
        if stopped:
            task.future.cancel()
        self._start_waiting()
        return task.future

    def stop(self) -> None:
        """Start nothing more. What runs goes with the process."""
        with self._lock:
            self._stopped = True
            waiting, self._waiting = self._waiting, deque()
        for task in waiting:
            task.future.cancel()

    def _start_waiting(self) -> None:
        with self._lock:
            ready = []
            while self._waiting and self._free_turns:
                self._free_turns -= 1
                ready.append(self._waiting.popleft())
        for task in ready:
            watch = threading.Timer(self._limit_s, self._overrun, (task,))
            watch.daemon = True
            thread = threading.Thread(
                target=self._run, args=(task, watch), name=f"hma-{task.name}", daemon=True
            )
            try:
                watch.start()
                thread.start()
            except RuntimeError as error:
                watch.cancel()
                self._give_up(task, error)

    def _give_up(self, task: _Task, error: RuntimeError) -> None:
        """No thread is to be had: the call fails, its turn does not go with it."""
        log.error("%s was not done: %s", task.name, error)
        with self._lock:
            task.ended = True
            self._free_turns += 1
        if task.future.set_running_or_notify_cancel():
            task.future.set_exception(error)
        self._start_waiting()

    def _run(self, task: _Task, watch: threading.Timer) -> None:
        if task.future.set_running_or_notify_cancel():
            try:
                result = task.work()
            except BaseException as error:
                task.future.set_exception(error)
            else:
                task.future.set_result(result)
        watch.cancel()
        with self._lock:
            task.ended = True
            if task.overdue:
                self._overdue -= 1
            else:
                self._free_turns += 1
        if task.overdue:
            log.warning("%s, which took longer than %.0f s, has ended", task.name, self._limit_s)
        self._start_waiting()

    def _overrun(self, task: _Task) -> None:
        with self._lock:
            if task.ended:
                return
            task.overdue = True
            self._overdue += 1
            self._overdue_total += 1
            self._free_turns += 1
        log.error(
            "%s has not ended within %.0f s (a driver call that does not return?); others go on",
            task.name,
            self._limit_s,
        )
        self._start_waiting()
