"""What the tests of field cases share."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import msgspec

from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig
from hma_triton.integration.vllm.connector import HMATritonConnector

CONFIG = ServerConfig(url="ipc:///replaced", host_bytes=16 << 20)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return [(seed * 7919 + index * 31) % 1009 for index in range(count)]


def leases(url: str) -> int:
    with HmaClient(url) as client:
        client.connect()
        return int(client.status()["leases"])


def registered(url: str) -> set[str]:
    with HmaClient(url) as client:
        client.connect()
        return {each["instance_id"] for each in client.status()["registrations"]}


def eventually(check: Any, seconds: float = 5.0) -> None:
    """Messages that nobody waits for arrive a little later."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connector_of(engine: Any) -> HMATritonConnector:
    """vLLM's door to both halves of a replayed engine."""
    connector = HMATritonConnector.__new__(HMATritonConnector)
    connector._scheduler, connector._worker = engine.scheduler, engine.worker
    return connector


def stored_ranges(result: Any) -> list[tuple[int, int]]:
    return [(job.start_chunk, job.start_chunk + len(job.digests)) for job in result.meta.stores]


def serve_at(url: str) -> subprocess.Popen[bytes]:
    """A server on this very address, in a process that ends with this one."""
    settings = msgspec.json.encode(replace(CONFIG, url=url, parent_pid=os.getpid())).decode()
    return subprocess.Popen([sys.executable, "-m", "hma_triton.server.child", settings])
