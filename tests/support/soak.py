"""Four instances in one process that store, look up and load for a while and check every byte."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter

from support.server_children import process_facts
from support.server_pools import CHUNK_TOKENS, FULL, HYBRID, STATE, WINDOW, TestPool, first, prompt
from support.server_thread import register

from hma_triton.client import HmaClient

# of each model: which groups, and how many prompts of how many chunks
MODELS = (HYBRID, (FULL, WINDOW), (FULL, STATE), (FULL,))
PROMPTS, CHUNKS = 48, 8


class SoakChild:
    """Instances `first_instance` and on, one of each model; children share the models."""

    def __init__(self, url: str, first_instance: int) -> None:
        self._url = url
        self._first = first_instance
        self._done: list[tuple[Counter[str], list[str]]] = []
        self._threads: list[threading.Thread] = []

    def run(self, seconds: float) -> tuple[Counter[str], list[str]]:
        """What happened, and every byte that was wrong."""
        self._done = []
        until = time.monotonic() + seconds
        self._threads = [
            threading.Thread(target=self._instance, args=(number, until)) for number in range(4)
        ]
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join()
        counts: Counter[str] = Counter()
        faults: list[str] = []
        for count, fault in self._done:
            counts += count
            faults += fault
        if len(self._done) != 4:
            faults.append("an instance did not come to its end")
        return counts, faults

    def facts(self) -> dict[str, int]:
        return process_facts()

    def _instance(self, number: int, until: float) -> None:
        pool = TestPool(MODELS[number], blocks=40)
        name = f"soak-{self._first + number}"
        counts: Counter[str] = Counter()
        faults: list[str] = []
        choice = random.Random(self._first + number)
        with HmaClient(self._url, timeout_s=20) as client:
            register(client, pool, name, namespace=f"model-{number}")
            turn = 0
            while time.monotonic() < until and not faults:
                turn += 1
                # some prompts are asked for far more often than others
                seed = min(choice.randrange(PROMPTS), choice.randrange(PROMPTS))
                self._turn(client, pool, name, f"{name}/{turn}", seed, choice, counts, faults)
        self._done.append((counts, faults))

    def _turn(
        self,
        client: HmaClient,
        pool: TestPool,
        name: str,
        request: str,
        seed: int,
        choice: random.Random,
        counts: Counter[str],
        faults: list[str],
    ) -> None:
        chunks = choice.randint(1, CHUNKS)
        digests = first(prompt(seed, CHUNKS), chunks)
        hit = client.lookup(name, request, digests, chunks * CHUNK_TOKENS)
        counts["lookups"] += 1
        if hit.reason in ("unavailable", "timeout") or hit.reason.startswith("error"):
            faults.append(f"{request}: {hit.reason}")
            return
        if hit.tokens:
            counts["hits"] += 1
            if choice.random() < 0.1:
                client.release(name, request)
            else:
                self._load(client, pool, name, request, first(digests, hit.chunks), counts, faults)
        if hit.chunks < chunks:
            ids = pool.all_ids(chunks, first=seed)
            pool.write(digests, ids)
            reply = client.store(name, 0, 0, digests, b"", ids)
            counts["stores"] += 1
            counts["stored objects"] += reply.stored
            if reply.code in ("busy", "capacity"):
                counts[f"stores refused: {reply.code}"] += 1
            elif reply.code:
                faults.append(f"{request}: store: {reply.code}: {reply.message}")

    def _load(
        self,
        client: HmaClient,
        pool: TestPool,
        name: str,
        request: str,
        digests: bytes,
        counts: Counter[str],
        faults: list[str],
    ) -> None:
        tokens = len(digests) // 32 * CHUNK_TOKENS
        target = pool.load_ids(tokens, first=len(request))
        pool.wipe()
        reply = client.retrieve(name, 0, request, digests, 0, target)
        counts["loads"] += 1
        if not reply.ok:
            if reply.code == "busy":
                counts["loads refused: busy"] += 1
            else:
                faults.append(f"{request}: a promised hit was not served: {reply}")
        elif wrong := pool.wrong(digests, target):
            faults.append(f"{request}: {wrong}")
        elif not pool.null_blocks_untouched():
            faults.append(f"{request}: a null block was written")
