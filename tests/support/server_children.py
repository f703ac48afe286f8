"""What the nursery forks: a cache server, and a driver that plays an engine's rank."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import torch
from support.server_pools import TestPool, prompt, resident_bytes
from support.server_thread import register

from hma_triton import messages as m
from hma_triton.client import HmaClient, Ticket
from hma_triton.config import ServerConfig
from hma_triton.cpu_event import CpuEvent
from hma_triton.engine import TransferEngine
from hma_triton.server.loop import CacheServer


def warm_up() -> None:
    """Compile the copy path, without starting a thread that a fork would lose."""
    torch.set_num_threads(1)
    pool = TestPool()
    TransferEngine(
        pool.kv,
        pool.infos,
        layout_hints={"kv_layout": "HND"},
        chunk_tokens=32,
        threads=1,
    ).close()
    gc.collect()
    gc.freeze()


class ServerChild:
    """A server in a process of its own; its loop runs beside the calls."""

    def __init__(self, **settings: Any) -> None:
        self._server = CacheServer(ServerConfig(copier_threads=1, **settings))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    def ready(self) -> bool:
        return True

    def facts(self) -> dict[str, int]:
        return process_facts()

    def stop(self) -> None:
        self._server.stop()
        self._thread.join(30)


class DriverChild:
    """One rank of an engine with a pool of its own."""

    def __init__(
        self, url: str, instance: str = "i", rank: int = 0, world: int = 1, timeout_s: float = 5.0
    ) -> None:
        self.pool = TestPool(rank=rank)
        self.instance, self.rank, self.world = instance, rank, world
        self.client = HmaClient(url, timeout_s=timeout_s, role=f"rank {rank}")
        self._tickets: dict[str, Ticket[Any]] = {}

    def register(self) -> str:
        return register(self.client, self.pool, self.instance, self.world).fingerprint

    def connected(self, timeout_s: float = 20.0) -> bool:
        self.client.connect(timeout_s)
        return True

    def store(self, seed: int, chunks: int, deadline_s: float) -> tuple[str, int, float]:
        """Write the prompt's content and store it: code, objects stored, seconds waited."""
        digests, ids = prompt(seed, chunks), self.pool.all_ids(chunks)
        self.pool.write(digests, ids)
        started = time.monotonic()
        reply = self.client.store(
            self.instance, self.rank, 0, digests, b"", ids, deadline_s=deadline_s
        )
        return reply.code, reply.stored, time.monotonic() - started

    def store_with_event_that_never_fires(self, seed: int, chunks: int) -> None:
        self._event = CpuEvent()
        self._tickets["event"] = self.client.store_submit(
            self.instance,
            self.rank,
            0,
            prompt(seed, chunks),
            b"",
            self.pool.all_ids(chunks),
            deadline_s=3600,
            event=self._event.record(),
        )
        self.client.ping()

    def self_check(self) -> bool:
        """Content written is content found; touches all the memory that checking needs."""
        digests, ids = prompt(0, 4), self.pool.all_ids(4)
        self.pool.write(digests, ids)
        written = self.pool.wrong(digests, ids)
        self.pool.wipe()
        return not written and len(self.pool.wrong(digests, ids)) == sum(map(len, ids))

    def reuse_blocks(self) -> None:
        """The engine gives the blocks to somebody else."""
        self.pool.wipe(0x77)

    def lookup(
        self, seed: int, chunks: int, request: str, limit_s: float
    ) -> tuple[int, str, float]:
        started = time.monotonic()
        reply = self.client.lookup(self.instance, request, prompt(seed, chunks), 10**6, limit_s)
        return reply.tokens, reply.reason, time.monotonic() - started

    def load(self, seed: int, chunks: int, request: str, deadline_s: float) -> tuple[bool, str]:
        """Load the whole prompt into wiped blocks; `bad bytes` when a success is not true."""
        self.load_submit(seed, chunks, request, deadline_s)
        return self.load_result(seed, chunks, request)

    def load_submit(self, seed: int, chunks: int, request: str, deadline_s: float) -> None:
        self.pool.wipe()
        self._tickets[request] = self.client.retrieve_submit(
            self.instance,
            self.rank,
            request,
            prompt(seed, chunks),
            0,
            self.pool.load_ids(chunks * 32),
            deadline_s=deadline_s,
        )

    def load_result(self, seed: int, chunks: int, request: str) -> tuple[bool, str]:
        reply: m.RetrieveReply = self._tickets.pop(request).result()
        if reply.ok:
            wrong = self.pool.wrong(prompt(seed, chunks), self.pool.load_ids(chunks * 32))
            if wrong or not self.pool.null_blocks_untouched():
                return False, f"bad bytes: {wrong}"
        return reply.ok, reply.code

    def nothing_written_for(self, seconds: float) -> bool:
        """Whether reused blocks stay as they are."""
        self.pool.wipe(0x99)
        time.sleep(seconds)
        return all(bool((cache[1:] == 0x99).all()) for cache in self.pool.kv.values())

    def release(self, request: str) -> None:
        self.client.release(self.instance, request)

    def facts(self) -> dict[str, int]:
        return process_facts()

    def close(self) -> None:
        self.client.close()


def process_facts() -> dict[str, int]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_bytes": resident_bytes(),
        "threads": threading.active_count(),
    }


KINDS = {"server": ServerChild, "driver": DriverChild}
