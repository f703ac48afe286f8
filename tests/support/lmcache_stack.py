"""LMCache's real server in a process, and a real engine with LMCache's own connector."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmcache
from support.engine_process import Completion, Engine, EngineError, Nursery

CHUNK_TOKENS = 256
BLOCK_TOKENS = 128
OWN_SERVER = [sys.executable, "-m", "lmcache.cli.main", "server"]
SWAP_SERVER = [sys.executable, str(Path(__file__).with_name("lmcache_swap_server.py"))]
OUR_SERVER = [sys.executable, "-m", "hma_triton.cli.main", "lmcache-server"]
SERVER_READY_SECONDS = 60
QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_LOG_LEVEL": "INFO",
    "LMCACHE_DISABLE_BANNER": "1",
    "OMP_NUM_THREADS": "1",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def copy_without_core(folder: Path, broken: bool) -> Path:
    """LMCache as installed, link by link, its compiled parts left out or not loadable."""
    source = Path(lmcache.__file__).parent
    target = folder / "lmcache"
    target.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.suffix != ".so":
            (target / entry.name).symlink_to(entry)
        elif broken:
            (target / entry.name).write_bytes(b"not a library")
    metadata = next(source.parent.glob("lmcache-*.dist-info"))
    (folder / metadata.name).symlink_to(metadata)
    return folder


class Server:
    """One server process; `folder` takes its log and its second tier. Use as a context manager."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        *options: str,
        tier: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tier = tier or folder / "tier"
        self.tier.mkdir(exist_ok=True)
        self.port, self.http_port = free_port(), free_port()
        self._log_path = folder / "server.log"
        self._report_path = folder / "swap-reports.jsonl"
        self._log = self._log_path.open("wb")
        arguments = {
            "host": "127.0.0.1",
            "port": self.port,
            "http-host": "127.0.0.1",
            "http-port": self.http_port,
            "l1-size-gb": 0.5,
            "eviction-policy": "LRU",
            "chunk-size": CHUNK_TOKENS,
            "supported-transfer-mode": "lmcache_driven",
            "l2-adapter": json.dumps({"type": "fs", "base_path": str(self.tier)}),
        }
        flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
        self._process = subprocess.Popen(
            [*command, *flags, *options],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                **QUIET,
                "HMA_SWAP_REPORT": str(self._report_path),
                **(environment or {}),
            },
        )

    def wait_ready(self) -> Server:
        deadline = time.monotonic() + SERVER_READY_SECONDS
        while "cache server is running..." not in self.log():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise EngineError(f"LMCache's server did not start:\n{self.log()[-4000:]}")
            time.sleep(0.05)
        return self

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def swap(self) -> dict[str, Any]:
        """Takes our operations out of the running server, or puts them back; what is so now."""
        return self._signal(signal.SIGUSR1)

    def report(self) -> dict[str, Any]:
        """Whether our operations are installed, and the blocks that they have moved."""
        return self._signal(signal.SIGUSR2)

    def _signal(self, number: signal.Signals) -> dict[str, Any]:
        before = self._reports()
        self._process.send_signal(number)
        deadline = time.monotonic() + 20
        while len(self._reports()) == len(before):
            if time.monotonic() > deadline:
                raise EngineError(f"no report from the server:\n{self.log()[-4000:]}")
            time.sleep(0.02)
        answer: dict[str, Any] = json.loads(self._reports()[-1])
        return answer

    def _reports(self) -> list[str]:
        path = self._report_path
        return path.read_text().splitlines() if path.exists() else []

    def wait_objects(self, count: int) -> dict[str, bytes]:
        """The second tier's objects by name, once there are `count` and none still grows."""
        deadline = time.monotonic() + 30
        before: dict[str, bytes] = {}
        while time.monotonic() < deadline:
            found = {path.name: path.read_bytes() for path in self.tier.rglob("*.data")}
            if len(found) == count and found == before:
                return found
            before = found
            time.sleep(0.2)
        raise EngineError(f"{len(before)} objects in the second tier, not {count}")

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
        self._log.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ConnectedEngine(Engine):
    """An engine whose connector is LMCache's own, unchanged."""

    def __init__(self, nursery: Nursery, folder: Path, model: Path, server: Server) -> None:
        self._connection = nursery.connect()
        self.log_path = folder / "engine.log"
        self.pid = self._connection.recv()
        try:
            self.call("run", hide_llvmlite_dunders, ())
            self.call("start", engine_settings(model, server), QUIET, str(self.log_path))
        except EngineError as error:
            self.kill()
            raise EngineError(f"{error}\n{self.log()[-6000:]}") from None

    def forget(self) -> None:
        """Lets the connector finish its stores, then drops the engine's own prefix cache."""
        self.run(settle_and_reset)

    def ask(self, prompt: list[int]) -> Completion:
        return self.generate([prompt])[0]


def engine_settings(model: Path, server: Server) -> dict[str, Any]:
    return {
        "model": str(model),
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "dtype": "bfloat16",
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": 400,
        "seed": 0,
        "enforce_eager": True,
        "kv_transfer_config": {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": server.port,
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        },
    }


def hide_llvmlite_dunders(_llm: Any) -> None:
    """vLLM 0.32 looks at `__dict__` of everything imported, and llvmlite's library answers wrongly.

    Its `ffi.lib` takes every unknown name for a C function. LMCache imports it (through numba)
    before vLLM's worker starts when engine and worker are one process, as in these tests.
    """
    from llvmlite.binding import ffi

    original = ffi._lib_wrapper.__getattr__

    def getattr_without_dunders(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    ffi._lib_wrapper.__getattr__ = getattr_without_dunders


def settle_and_reset(llm: Any) -> None:
    deadline = time.monotonic() + 30
    while True:
        llm.llm_engine.step()
        if llm.reset_prefix_cache():
            return
        if time.monotonic() > deadline:
            raise TimeoutError("blocks are still held 30 s after the last request")
        time.sleep(0.01)
