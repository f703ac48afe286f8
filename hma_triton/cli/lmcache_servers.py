"""LMCache's server with its own operations and with ours, asked in turn by LMCache's own client."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hma_triton.errors import ServerUnavailableError, TransferError

OWN, OURS = "lmcache", "hma-triton"
_COMMANDS = {
    OWN: ("-m", "lmcache.cli.main", "server"),
    OURS: ("-m", "hma_triton.cli.main", "lmcache-server"),
}
_READY = "cache server is running..."
_READY_SECONDS = 120.0
_COMMIT_SECONDS = 20.0
_TIMES = re.compile(r"(Stored|Retrieved) (\d+) tokens in ([0-9.]+) seconds")


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Seconds inside one server, one entry per request, as its log states them (whole ms)."""

    store_seconds: tuple[float, ...]
    retrieve_seconds: tuple[float, ...]


class BenchServer:
    """One server process and one of LMCache's bench clients. Use as a context manager."""

    def __init__(self, kind: str, folder: Path, gib: float, threads: int) -> None:
        self._port, self._http_port = _free_port(), _free_port()
        self._log_path = folder / f"{kind}.log"
        self._log = self._log_path.open("wb")
        options = {
            "host": "127.0.0.1",
            "port": self._port,
            "http-host": "127.0.0.1",
            "http-port": self._http_port,
            "l1-size-gb": gib,
            "eviction-policy": "LRU",
            "chunk-size": 256,
            "supported-transfer-mode": "lmcache_driven",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "INFO"}
        self._process = subprocess.Popen(
            [sys.executable, *_COMMANDS[kind], *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet, "OMP_NUM_THREADS": str(threads)},
        )
        self._client: Any = None

    def connect(self, shape_spec: str, tokens: int) -> None:
        """Wait for the server, allocate the client's pools and register them.

        Raises:
            ServerUnavailableError: the server did not start.
        """
        deadline = time.monotonic() + _READY_SECONDS
        while _READY not in self.log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerUnavailableError(f"LMCache's server did not start: {self.log()[-800:]}")
            time.sleep(0.1)
        package = "lmcache.cli.commands.bench.server_bench"
        config = importlib.import_module(f"{package}.config")
        settings = config.BenchConfig(
            rpc_url=f"tcp://127.0.0.1:{self._port}",
            http_url=f"http://127.0.0.1:{self._http_port}",
            mode="cpu",
            transfer_mode="lmcache_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=tokens,
            kvcache_shape_spec=shape_spec,
            num_blocks=0,
            block_size=0,
        )
        client = importlib.import_module(f"{package}.client").ServerBenchClient
        self._client = client(settings, lambda _line: None)
        self._client.start()

    def request(self, number: int) -> None:
        """Store a new request, wait until it can be found, and retrieve it.

        Raises:
            ServerUnavailableError: the server could not store, find or retrieve it.
            TransferError: other bytes came back.
        """
        client = self._client
        request = client.create_request(number, f"bench-{number}", "bench")
        tokens = request.num_full_tokens
        before = client.compute_checksums(request, 0, tokens)
        stored = client.store(request, 0, tokens)
        client.end_session(request)
        client.zero_destination(request, 0, tokens)
        # a store is committed a little after its answer
        deadline = time.monotonic() + _COMMIT_SECONDS
        for attempt in itertools.count():
            again = client.create_request(number, f"bench-{number}-{attempt}", "bench")
            if client.lookup(again).is_full_hit:
                break
            client.end_session(again)
            if time.monotonic() > deadline:
                raise ServerUnavailableError(f"request {number} was stored and is not found")
            time.sleep(0.05)
        retrieved = client.retrieve(again, 0, tokens)
        client.end_session(again)
        if not (stored.succeeded and retrieved.succeeded):
            raise ServerUnavailableError(f"request {number} failed: {stored}, {retrieved}")
        if client.compute_checksums(again, 0, tokens) != before:
            raise TransferError(f"request {number}: other bytes came back than were stored")

    def times(self) -> ServerTimes:
        """What the server's log says so far."""
        found = _TIMES.findall(self.log())
        return ServerTimes(
            tuple(float(seconds) for word, _, seconds in found if word == "Stored"),
            tuple(float(seconds) for word, _, seconds in found if word == "Retrieved"),
        )

    def log(self) -> str:
        """Everything that the server has printed."""
        return self._log_path.read_text(errors="replace")

    def __enter__(self) -> BenchServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._client.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


@contextmanager
def both_servers(gib: float, threads: int) -> Iterator[dict[str, BenchServer]]:
    """One server of each kind, starting."""
    with tempfile.TemporaryDirectory(prefix="hma-bench-") as name, ExitStack() as stack:
        yield {
            kind: stack.enter_context(BenchServer(kind, Path(name), gib, threads))
            for kind in (OWN, OURS)
        }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
