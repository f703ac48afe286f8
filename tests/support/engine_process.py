"""A vLLM engine in a process of its own, driven from a test over a socket.

Importing vLLM takes longer than starting a tiny engine. So one nursery process per test session
imports it once and forks a process for every engine; a fork starts no engine code before it is told
to, and the nursery itself never runs a model.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

AUTHKEY = b"hma-engine-tests"
READY_SECONDS = 120


class EngineError(Exception):
    """The engine process answered with an error, or died; the text is what it said last."""


@dataclass(frozen=True)
class Completion:
    """What one request gave: the generated tokens and, per token, {token id: log-probability}."""

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    cached_tokens: int
    finish_reason: str | None
    prompt_tokens: int


class Nursery:
    """Forks engine processes from one that has imported vLLM. One per session; close() ends all."""

    def __init__(self, folder: Path) -> None:
        self._address = str(folder / "nursery.sock")
        self._folder = folder
        self._count = 0
        tests = str(Path(__file__).parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._log = (folder / "nursery.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.engine_nursery", self._address],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def connect(self) -> Connection:
        """A connection to a fresh fork; waits until the nursery has imported vLLM."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                return Client(self._address, family="AF_UNIX", authkey=AUTHKEY)
            if self._process.poll() is not None or time.monotonic() > deadline:
                text = (self._folder / "nursery.log").read_text(errors="replace")
                raise EngineError(f"the engine nursery did not start:\n{text[-4000:]}")
            time.sleep(0.05)

    def start(
        self, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> Engine:
        """A started engine. `settings` go to `vllm.LLM`, `environment` is set before.

        Raises:
            EngineError: the engine did not start; the message ends with its log.
        """
        self._count += 1
        log = self._folder / f"engine-{self._count}.log"
        return Engine(self.connect(), log, settings, environment or {})

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()


class Engine:
    """The test's side of one engine process. Use as a context manager, or call stop()."""

    def __init__(
        self,
        connection: Connection,
        log: Path,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        self._connection = connection
        self.log_path = log
        self.pid: int = connection.recv()
        try:
            self.call("start", dict(settings), dict(environment), str(log))
        except EngineError as error:
            self.kill()
            raise EngineError(f"{error}\n{self.log()[-6000:]}") from None

    def log(self) -> str:
        """Everything that the engine's processes wrote to stdout and stderr."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def send(self, command: str, *arguments: Any) -> None:
        """Starts a command without waiting; answer() fetches its result."""
        self._connection.send((command, arguments))

    def answer(self, timeout: float = 240) -> Any:
        """The result of the oldest command that was sent and not yet answered."""
        try:
            if not self._connection.poll(timeout):
                raise EngineError(
                    f"no answer from the engine within {timeout} s\n{self.log()[-4000:]}"
                )
            ok, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise EngineError(f"the engine process ended\n{self.log()[-4000:]}") from None
        if not ok:
            raise EngineError(value)
        return value

    def call(self, command: str, *arguments: Any, timeout: float = 240) -> Any:
        self.send(command, *arguments)
        return self.answer(timeout)

    def generate(
        self, prompts: Sequence[Sequence[int]], *, together: bool = False, **sampling: Any
    ) -> list[Completion]:
        """Completions of `prompts`, one after the other, or `together` in one batch."""
        return self.call("generate", [list(prompt) for prompt in prompts], together, sampling)

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 240) -> Any:
        """`function(llm, *arguments)` inside the engine process; importable by name there."""
        return self.call("run", function, arguments, timeout=timeout)

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """Drops the engine's own prefix cache, and with `connector` ours too."""
        return self.call("reset", connector)

    def stop(self) -> None:
        """Ends the engine as a server does at shutdown; kills it when that takes too long."""
        with suppress(EngineError, OSError):
            self.call("stop", timeout=60)
        self._connection.close()
        self._wait_gone(20)

    def kill(self) -> None:
        """SIGKILL: no shutdown code runs."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._connection.close()
        self._wait_gone(20)

    def _wait_gone(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while Path(f"/proc/{self.pid}").exists():
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                raise EngineError(f"engine process {self.pid} did not end:\n{self.log()[-4000:]}")
            time.sleep(0.02)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
