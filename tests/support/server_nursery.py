"""Real processes in milliseconds: one program imports everything once, then forks.

It forks servers and drivers. Each answers calls over a pipe of its own until it is killed or told
to end. The nursery reaps them; none outlives the nursery, which ends with the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

KEY = b"server-nursery"
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Child:
    """A forked process. `call` waits for its answer; `post` and `answer` do so in two steps."""

    pid: int
    connection: Connection
    pidfd: int
    stop_folder: Path
    ended: bool = False

    def post(self, method: str, *arguments: Any) -> None:
        self.connection.send((method, arguments))

    def answer(self, timeout_s: float = 60.0) -> Any:
        assert self.connection.poll(timeout_s), f"process {self.pid} gave no answer"
        outcome, value = self.connection.recv()
        assert outcome == "ok", value
        return value

    def call(self, method: str, *arguments: Any, timeout_s: float = 60.0) -> Any:
        self.post(method, *arguments)
        return self.answer(timeout_s)

    def signal(self, number: int) -> None:
        if not self.ended:
            signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait_end()

    def wait_end(self, timeout_s: float = 30.0) -> None:
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        assert poller.poll(timeout_s * 1000), f"process {self.pid} does not end"
        self.ended = True

    def has_answer(self) -> bool:
        """Whether the posted call has been answered."""
        return self.connection.poll(0)

    def has_stopped_at(self, point: str) -> bool:
        return (self.stop_folder / point).exists() and self.is_stopped()

    def wait_stopped_at(self, point: str, timeout_s: float = 30.0) -> None:
        until = time.monotonic() + timeout_s
        while not self.has_stopped_at(point):
            assert time.monotonic() < until, f"process {self.pid} never came to {point}"
            time.sleep(0.002)

    def is_stopped(self) -> bool:
        stat = Path(f"/proc/{self.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def close(self) -> None:
        """Idempotent."""
        if not self.connection.closed:
            self.kill()
            self.connection.close()
            os.close(self.pidfd)


@dataclass(slots=True)
class Nursery:
    folder: Path
    process: subprocess.Popen[bytes]
    children: list[Child] = field(default_factory=list)

    def start(self, kind: str, stop_at: str = "", **arguments: Any) -> Child:
        """Fork a process of `kind`: `server`, `driver` or `soak`."""
        stop_folder = Path(tempfile.mkdtemp(dir=self.folder))
        connection = Client(str(self.folder / "nursery"), family="AF_UNIX", authkey=KEY)
        connection.send((kind, stop_at, str(stop_folder), arguments))
        pid = connection.recv()
        child = Child(pid, connection, os.pidfd_open(pid), stop_folder)
        self.children.append(child)
        return child

    def release(self) -> None:
        """End all children."""
        for child in self.children:
            child.close()
        self.children.clear()


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    with tempfile.TemporaryDirectory(prefix="hma-nursery-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.server_nursery", folder],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            until = time.monotonic() + 120
            while not (Path(folder) / "nursery").exists():
                assert process.poll() is None, "the nursery did not start"
                assert time.monotonic() < until
                time.sleep(0.01)
            made = Nursery(Path(folder), process)
            yield made
            made.release()
        finally:
            process.terminate()
            process.wait(30)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _serve_calls(connection: Connection, target: Callable[..., Any]) -> None:
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("ok", getattr(target, method)(*arguments)))
        except BaseException as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise


def main(folder: str) -> None:
    from support import server_children
    from support.soak import SoakChild

    from hma_triton import stop_points

    kinds = {**server_children.KINDS, "soak": SoakChild}

    server_children.warm_up()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    me = os.getpid()
    with Listener(str(Path(folder) / "nursery"), family="AF_UNIX", authkey=KEY) as listener:
        while True:
            connection = listener.accept()
            kind, stop_at, stop_folder, arguments = connection.recv()
            if os.fork() == 0:
                _end_with(me)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener._listener._socket.close()  # type: ignore[attr-defined]
                os.environ["HMA_TEST_STOP_AT"] = stop_at
                os.environ["HMA_TEST_STOP_DIR"] = stop_folder
                stop_points.arm()
                connection.send(os.getpid())
                target = kinds[kind](**arguments)
                _serve_calls(connection, target)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
