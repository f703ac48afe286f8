"""The engine's own server, when none is configured: one per engine, ended with it.

Every process of the engine derives the same address from the engine's instance id. Whichever rank
comes first starts the server, under a lock on the folder of the sockets; the server watches the
process that started it and ends when that ends, however it ends.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig, default_socket_directory, prepare_socket_directory
from hma_triton.errors import ServerUnavailableError

PROBE_SECONDS = 0.25
END_SECONDS = 10.0


class EmbeddedServer:
    """The server that this process started. Its output goes where this process's goes."""

    def __init__(self, config: ServerConfig) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hma_triton.server.child", msgspec.json.encode(config).decode()],
            stdin=subprocess.DEVNULL,
        )

    @property
    def pid(self) -> int:
        """The server's process."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def close(self) -> None:
        """Stop the server; kills one that does not stop. Idempotent."""
        if self.has_ended:
            return
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def embedded_url(instance_id: str) -> str:
    """The address of the embedded server of this engine instance."""
    name = hashlib.sha256(instance_id.encode()).hexdigest()[:16]
    return f"ipc://{default_socket_directory()}/{name}.sock"


def ensure_embedded_server(
    instance_id: str, host_bytes: int, timeout_s: float
) -> EmbeddedServer | None:
    """Start this instance's server, unless another process of the engine has. None: it has.

    Raises:
        ConfigError: the folder of the sockets is not this user's alone.
        ServerUnavailableError: the server did not answer within `timeout_s`, or others that start
            theirs took as long.
    """
    url = embedded_url(instance_id)
    prepare_socket_directory(url)
    with _locked(default_socket_directory(), timeout_s):
        if _answers(url, PROBE_SECONDS):
            return None
        server = EmbeddedServer(
            ServerConfig(url=url, host_bytes=host_bytes, parent_pid=os.getpid())
        )
        deadline = time.monotonic() + timeout_s
        while not _answers(url, PROBE_SECONDS):
            if server.has_ended or time.monotonic() > deadline:
                server.close()
                raise ServerUnavailableError(
                    f"the engine's own server did not answer on {url} within {timeout_s} s;"
                    " its own words are above"
                )
        return server


def _answers(url: str, timeout_s: float) -> bool:
    path = Path(url.removeprefix("ipc://"))
    if not path.exists():
        time.sleep(min(timeout_s, 0.05))
        return False
    with HmaClient(url, connect_timeout_s=timeout_s, role="launcher") as client:
        try:
            client.connect(timeout_s)
        except ServerUnavailableError:
            return False
    return True


@contextmanager
def _locked(folder: Path, timeout_s: float) -> Iterator[None]:
    """Holds the folder's lock; the kernel lets go of it when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + timeout_s
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                raise ServerUnavailableError(
                    f"another process has held the lock on {folder} for {timeout_s} s"
                )
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
