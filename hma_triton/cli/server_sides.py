"""The two servers that `bench server` asks in turn: ours, and LMCache's with its own client."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch

from hma_triton.cli.copy_case import Register, Registration, chunk_tokens_of
from hma_triton.cli.lmcache_servers import OWN, BenchServer
from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig
from hma_triton.engine import TransferEngine
from hma_triton.errors import ServerUnavailableError, TransferError
from hma_triton.kernels.addressing import Int64Array
from hma_triton.keys import chunk_digests
from hma_triton.server.launch import start_embedded

Result = TypeVar("Result")
Seconds = dict[str, list[float]]
PING, LOOKUP, STORE, RETRIEVE = "message", "lookup", "store", "retrieve"
_INSTANCE = "bench"
_SEED = 20261129
_PATIENCE_S = 120.0
_NOT_FOUND_S = 20.0


class OurSide:
    """Our server in a process of its own, and the pools of one rank.

    A request's blocks lie in the first half of the pool, in random order; what is loaded goes to
    the second half, and is compared.

    Raises:
        ConfigError: fewer tokens than a chunk.
    """

    def __init__(self, register: Register, tokens: int, requests: int, threads: int) -> None:
        probe = register(2)
        self.chunk_tokens = chunk_tokens_of(probe.infos)
        self.chunks = max(1, tokens // self.chunk_tokens)
        self.tokens = self.chunks * self.chunk_tokens
        blocks = {
            info.engine_group_id: self.tokens // info.tokens_per_block for info in probe.infos
        }
        # groups lie over each other, so a block id belongs to one of them; 0 is the null block
        total = sum(blocks.values())
        registration = register(2 * total + 1)
        self._caches = registration.kv_caches
        self._infos = registration.infos
        _write_noise(self._caches.values())
        order = np.random.default_rng(_SEED).permutation(total).astype(np.int64) + 1
        ends = np.cumsum(list(blocks.values()))[:-1]
        by_group = dict(zip(blocks, np.split(order, ends), strict=True))
        self.source = [by_group[info.engine_group_id] for info in self._infos]
        self.target = [ids + total for ids in self.source]
        self._registration = registration
        sizes = self._make_engine(probe)
        groups = range(len(sizes.manager.object_groups))
        self.object_nbytes = tuple(sizes.object_nbytes(group) for group in groups)
        sizes.close()
        self._engine: TransferEngine | None = None
        self.nbytes = self.chunks * sum(self.object_nbytes)
        self._server = start_embedded(
            ServerConfig(
                url="ipc:///replaced",
                host_bytes=int(1.2 * (requests + 2) * self.nbytes) + (64 << 20),
                copier_threads=threads,
                # as LMCache does it; a first touch costs more than the copy
                touch="start",
            ),
            timeout_s=_PATIENCE_S,
        )
        self._client = HmaClient(self._server.url, timeout_s=_PATIENCE_S)
        self._hints = registration.hints.to_wire()
        self.seconds: Seconds = defaultdict(list)

    def _make_engine(self, registration: Registration) -> TransferEngine:
        return TransferEngine(
            registration.kv_caches,
            registration.infos,
            layout_hints=registration.hints,
            chunk_tokens=self.chunk_tokens,
        )

    @property
    def engine(self) -> TransferEngine:
        """An engine of this process over the registered pools."""
        if self._engine is None:
            # registering moves the pools, so addresses are taken afterwards
            self._engine = self._make_engine(self._registration)
        return self._engine

    def start(self) -> None:
        """Register the pools.

        Raises:
            RemoteError, ServerUnavailableError: the server does not take them.
        """
        self._client.register_kv_caches(
            _INSTANCE,
            self._caches,
            "bench",
            1,
            "vllm",
            self._hints,
            self._infos,
            chunk_tokens=self.chunk_tokens,
            timeout_s=_PATIENCE_S,
        )

    def request(self, number: int) -> None:
        """Ask for a new prompt, store it, find it, load it; times of each step.

        Raises:
            ServerUnavailableError: a step that the server did not do.
        """
        digests = chunk_digests(
            np.full(self.tokens, number, dtype=np.int64), self.chunk_tokens, "bench"
        )
        self._time(PING, self._client.ping)
        missed = self._client.lookup(_INSTANCE, f"{number}/cold", digests, self.tokens)
        stored = self._time(
            STORE,
            lambda: self._client.store(_INSTANCE, 0, 0, digests, b"", self.source),
        )
        hit = self._time(
            LOOKUP,
            lambda: self._client.lookup(_INSTANCE, f"{number}", digests, self.tokens),
        )
        loaded = self._time(
            RETRIEVE,
            lambda: self._client.retrieve(_INSTANCE, 0, f"{number}", digests, 0, self.target),
        )
        if missed.tokens or stored.code or hit.tokens != self.tokens or not loaded.ok:
            raise ServerUnavailableError(f"request {number}: {missed}, {stored}, {hit}, {loaded}")

    def check(self) -> None:
        """Compare what was loaded last with what was stored.

        Raises:
            TransferError: other bytes came back.
        """
        both = [self._objects(ids) for ids in (self.source, self.target)]
        for group, (one, other) in enumerate(zip(*both, strict=True)):
            if not torch.equal(one, other):
                raise TransferError(f"object group {group}: other bytes came back than were stored")

    def _objects(self, ids: list[Int64Array]) -> list[torch.Tensor]:
        found = [torch.zeros(self.chunks, size, dtype=torch.uint8) for size in self.object_nbytes]
        self.engine.store(ids, [list(of_group) for of_group in found])
        return found

    def _time(self, what: str, work: Callable[[], Result]) -> Result:
        started = time.perf_counter()
        result = work()
        self.seconds[what].append(time.perf_counter() - started)
        return result

    def __enter__(self) -> OurSide:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()
        self._server.close()
        if self._engine is not None:
            self._engine.close()


class LMCacheSide(BenchServer):
    """LMCache's own server in its `lmcache_driven` mode, timed by its own client."""

    def __init__(self, folder: Path, gib: float, threads: int) -> None:
        super().__init__(OWN, folder, gib, threads)
        self.seconds: Seconds = defaultdict(list)

    def __enter__(self) -> LMCacheSide:
        return self

    def timed_request(self, number: int) -> None:
        """Store a new prompt, find it, load it; times as LMCache's client takes them.

        Raises:
            ServerUnavailableError: a step that the server did not do.
        """
        client = self._client
        request = client.create_request(number, f"bench-{number}", "bench")
        tokens = request.num_full_tokens
        stored = client.store(request, 0, tokens)
        client.end_session(request)
        deadline = time.monotonic() + _NOT_FOUND_S
        for attempt in itertools.count():
            again = client.create_request(number, f"bench-{number}-{attempt}", "bench")
            found = client.lookup(again)
            if found.is_full_hit:
                break
            client.end_session(again)
            if time.monotonic() > deadline:
                raise ServerUnavailableError(f"LMCache: request {number} is not found")
            # a store is committed a little after its answer
            time.sleep(0.02)
        loaded = client.retrieve(again, 0, tokens)
        client.end_session(again)
        if not (stored.succeeded and loaded.succeeded):
            raise ServerUnavailableError(f"LMCache: request {number}: {stored}, {loaded}")
        for what, result in ((STORE, stored), (LOOKUP, found), (RETRIEVE, loaded)):
            self.seconds[what].append(result.latency_ms / 1e3)


def _write_noise(caches: Iterable[torch.Tensor]) -> None:
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    seen = set()
    for cache in caches:
        storage = cache.untyped_storage()
        if storage.data_ptr() in seen:
            continue
        seen.add(storage.data_ptr())
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        for start in range(0, flat.numel(), noise.numel()):
            end = min(start + noise.numel(), flat.numel())
            flat[start:end].copy_(noise[: end - start])
