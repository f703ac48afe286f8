"""A real server in a thread of the test's process, for tests that need no second process."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.server_pools import TestPool

from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig
from hma_triton.server.loop import CacheServer


@dataclass(slots=True)
class ThreadedServer:
    server: CacheServer
    url: str
    thread: threading.Thread

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()

    @contextlib.contextmanager
    def client(self, **options: object) -> Iterator[HmaClient]:
        with HmaClient(self.url, role="test", **options) as client:  # type: ignore[arg-type]
            client.connect()
            yield client


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running_server(**settings: object) -> Iterator[ThreadedServer]:
    """A server with 8 MiB of arena unless said otherwise."""
    with tempfile.TemporaryDirectory(prefix="hma-test-") as folder:
        url = str(settings.pop("url", f"ipc://{Path(folder) / 's.sock'}"))
        config = ServerConfig(url=url, **{"host_bytes": 8 << 20, **settings})  # type: ignore[arg-type]
        server = CacheServer(config)
        thread = threading.Thread(target=server.run, name="server-under-test")
        thread.start()
        running = ThreadedServer(server, url, thread)
        try:
            yield running
        finally:
            if thread.is_alive():
                running.stop()


def register(
    client: HmaClient, pool: TestPool, instance: str = "i", world: int = 1, **more: object
):
    """Register a test pool."""
    arguments = {**pool.registration(), **more}
    return client.register_kv_caches(instance, world_size=world, timeout_s=60, **arguments)
