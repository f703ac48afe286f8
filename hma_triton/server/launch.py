"""Running a server: in this process, or as a child that ends with it however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig
from hma_triton.errors import HmaError, ServerUnavailableError
from hma_triton.server.loop import CacheServer

EXIT_CLEAN, EXIT_COPIES_LEFT = 0, 5


def serve(config: ServerConfig) -> int:
    """Serve until SIGTERM, SIGINT or the parent's end; gives the exit status.

    0: all copies had ended. 5: some had not after `config.shutdown_s`, or a driver call does not
    return; the process must end without waiting for them.

    Raises:
        ConfigError, CapacityError: as `CacheServer`.
    """
    server = CacheServer(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    ended = server.run()
    stuck, _ = server.handlers.registrar.overdue
    return EXIT_CLEAN if ended and not stuck else EXIT_COPIES_LEFT


@dataclass(slots=True)
class EmbeddedServer:
    """A server of this process alone. It ends with `close`, or when this process ends."""

    url: str
    process: subprocess.Popen[bytes]
    directory: Path

    @property
    def pid(self) -> int:
        """The server's process."""
        return self.process.pid

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the server and remove its socket. Idempotent."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


def start_embedded(
    config: ServerConfig | None = None,
    *,
    timeout_s: float = 30.0,
    environment: dict[str, str] | None = None,
) -> EmbeddedServer:
    """Start a server in a child process and wait until it answers.

    `config.url` and `config.parent_pid` are replaced: the socket lives in a directory of its own,
    mode 0700, and the server watches this process.

    Raises:
        ServerUnavailableError: it did not come up; the message has the end of its output.
    """
    directory = Path(tempfile.mkdtemp(prefix="hma-triton-"))
    url = f"ipc://{directory / 'server.sock'}"
    config = replace(config or ServerConfig(url=url), url=url, parent_pid=os.getpid())
    settings = msgspec.json.encode(config).decode()
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hma_triton.server.child", settings],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
    server = EmbeddedServer(url, process, directory)
    try:
        with HmaClient(url, connect_timeout_s=timeout_s, role="launcher") as client:
            _wait_until_up(client, process, timeout_s)
    except HmaError as error:
        said = log.read_bytes()[-2000:].decode(errors="replace")
        server.close()
        raise ServerUnavailableError(f"the embedded server did not start: {said}") from error
    return server


def _wait_until_up(client: HmaClient, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    step_s = 0.5
    for _ in range(max(1, int(timeout_s / step_s))):
        try:
            client.connect(step_s)
        except ServerUnavailableError:
            if process.poll() is not None:
                raise
        else:
            return
    client.connect(step_s)
