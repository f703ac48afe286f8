"""The engines of `bench e2e`: plain, with our connector, with LMCache's; each in its process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hma_triton.errors import TransferError

READY_SECONDS = 120
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
}


class EnginePeer:
    """The caller's side of one `e2e_engine` process.

    Raises:
        TransferError: the process ended; its log says why.
    """

    def __init__(self, name: str, settings: Mapping[str, Any], folder: Path) -> None:
        self.name = name
        self._log_path = folder / f"{name}.log"
        commands_read, commands_write = os.pipe()
        answers_read, answers_write = os.pipe()
        arguments = [str(commands_read), str(answers_write)]
        if name == "lmcache":
            arguments.append("--hide-llvmlite")
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hma_triton.cli.e2e_engine", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(commands_read, answers_write),
                env={**os.environ, **ENVIRONMENT},
            )
        os.close(commands_read)
        os.close(answers_write)
        self._commands = os.fdopen(commands_write, "w")
        self._answers = os.fdopen(answers_read)
        self.call("start", dict(settings))

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer to one command."""
        try:
            self._commands.write(json.dumps([name, arguments]) + "\n")
            self._commands.flush()
            line = self._answers.readline()
        except OSError:
            line = ""
        if not line:
            log = self._log_path.read_text(errors="replace")
            raise TransferError(f"the {self.name} engine ended in {name!r}:\n{log[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the engine's process."""
        if self._process.poll() is None:
            try:
                self.call("stop")
                self._process.wait(20)
            except (TransferError, subprocess.TimeoutExpired):
                self._process.kill()
        self._process.wait()
        with suppress(BrokenPipeError):
            self._commands.close()
        self._answers.close()


class LMCachePeer:
    """LMCache's own server, for its connector in the same run."""

    def __init__(self, folder: Path, chunk_tokens: int, gigabytes: float) -> None:
        self.port, http_port = _free_port(), _free_port()
        self._log_path = folder / "lmcache-server.log"
        flags = {
            "host": "127.0.0.1",
            "port": self.port,
            "http-host": "127.0.0.1",
            "http-port": http_port,
            "l1-size-gb": gigabytes,
            "eviction-policy": "LRU",
            "chunk-size": chunk_tokens,
            "supported-transfer-mode": "lmcache_driven",
        }
        options = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.cli.main", "server", *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT},
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while "cache server is running" not in self._log_path.read_text(errors="replace"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                log = self._log_path.read_text(errors="replace")
                raise TransferError(f"LMCache's server did not start:\n{log[-3000:]}")
            time.sleep(0.1)

    def connector(self) -> dict[str, Any]:
        """`kv_transfer_config` of an engine that uses this server."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": self.port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }

    def close(self) -> None:
        """End the server."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def our_connector(gigabytes: float) -> dict[str, Any]:
    """`kv_transfer_config` of an engine with our connector and a server of its own."""
    return {
        "kv_connector": "HMATritonConnector",
        "kv_connector_module_path": "hma_triton.integration.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"hma.host_gb": gigabytes},
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
