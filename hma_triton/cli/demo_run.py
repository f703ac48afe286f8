"""One request's life against a real cache server, with `DemoPool` in the engine's place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hma_triton.cli.demo_pool import NULL_BLOCK, DemoPool, Difference
from hma_triton.client import HmaClient
from hma_triton.errors import TransferError
from hma_triton.group_view import (
    EngineGroupInfo,
    expand_engine_block_ids,
    num_engine_groups,
    slice_block_ids_per_group,
)
from hma_triton.keys import chunk_digests
from hma_triton.messages import DIGEST_BYTES, LookupReply
from hma_triton.plan import kept_blocks

_INSTANCE = "demo"
_LIMIT_S = 120.0
_PLAIN_COPIES = 3


@dataclass(frozen=True, slots=True)
class Movement:
    """Bytes that were moved in one direction, and how long the server's copies took."""

    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (1e9) per second."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Every page of a hit compared, and every byte around the pages."""

    pages_bytes: int
    differences: list[Difference]
    bytes_written_elsewhere: int

    @property
    def equal(self) -> bool:
        """Whether the pages hold what was stored and nothing else was touched."""
        return not self.differences and not self.bytes_written_elsewhere


class DemoRun:
    """A registered pool, and the steps of a request over it.

    Args:
        pool: the worker's pool; its storage moves into shared memory here.
        client: connected or not.
        model_name: goes into the key of every object.
        chunk_tokens: tokens of one object.
    """

    def __init__(
        self, pool: DemoPool, client: HmaClient, model_name: str, chunk_tokens: int
    ) -> None:
        self.pool = pool
        self.chunk_tokens = chunk_tokens
        self._client = client
        client.connect()
        client.register_kv_caches(
            _INSTANCE,
            pool.kv_caches,
            model_name,
            1,
            "vllm",
            pool.layout_hints.to_wire(),
            pool.infos,
            chunk_tokens=chunk_tokens,
        )

    def digests(self, tokens: Sequence[int]) -> bytes:
        """Packed digests of the whole chunks of `tokens`."""
        return chunk_digests(np.asarray(tokens), self.chunk_tokens)

    def compute_and_store(self, digests: bytes, step_tokens: int) -> Movement:
        """Computes the chunks step by step, stores each step's own, lets windows slide.

        Raises:
            TransferError: the server did not store a step; says why.
        """
        end = len(digests) // DIGEST_BYTES * self.chunk_tokens
        nbytes, seconds = 0, 0.0
        for start in range(0, end, step_tokens):
            stop = min(start + step_tokens, end)
            self.pool.allocate(stop)
            self.pool.compute(start, stop)
            first, last = start // self.chunk_tokens, stop // self.chunk_tokens
            reply = self._client.store(
                _INSTANCE,
                0,
                first,
                digests[first * DIGEST_BYTES : last * DIGEST_BYTES],
                digests[(first - 1) * DIGEST_BYTES : first * DIGEST_BYTES] if first else b"",
                self._block_ids(start, stop),
                deadline_s=_LIMIT_S,
            )
            if reply.code:
                raise TransferError(
                    f"tokens {start} to {stop} were not stored: {reply.code} {reply.message}"
                )
            nbytes += reply.nbytes
            seconds += reply.seconds
            self.pool.free_what_slid_out(stop)
        return Movement(nbytes, seconds)

    def forget(self) -> None:
        """Drops what is stored, and frees the blocks of the request."""
        self._client.clear(_INSTANCE, timeout_s=_LIMIT_S)
        self.pool.reset()

    def look_up(self, request: str, digests: bytes, max_tokens: int) -> LookupReply:
        """How much of the prefix the server can serve; it stays pinned for `request`."""
        return self._client.lookup(_INSTANCE, request, digests, max_tokens, timeout_s=_LIMIT_S)

    def retrieve(self, request: str, digests: bytes, hit_tokens: int) -> Movement:
        """Wipes the pool and fills the blocks that a hit of `hit_tokens` needs.

        Raises:
            TransferError: the server did not fill them; says why.
        """
        self.pool.reset()
        self.pool.allocate_hit(hit_tokens)
        chunks = hit_tokens // self.chunk_tokens
        ticket = self._client.retrieve_submit(
            _INSTANCE,
            0,
            request,
            digests[: chunks * DIGEST_BYTES],
            0,
            self._block_ids(0, hit_tokens),
            deadline_s=_LIMIT_S,
        )
        reply = ticket.wait(_LIMIT_S)
        if reply is None or not reply.ok:
            why = "no answer" if reply is None else f"{reply.code} {reply.message}"
            raise TransferError(f"{hit_tokens} tokens were not retrieved: {why}")
        return Movement(reply.nbytes, reply.seconds)

    def verify(self, hit_tokens: int) -> Verdict:
        """Compares the pages of the hit, then everything around them."""
        pages = sum(self.bytes_retrieved(info, hit_tokens) for info in self.pool.infos)
        differences = self.pool.differences(hit_tokens)
        return Verdict(pages, differences, self.pool.bytes_written_elsewhere(hit_tokens))

    def bytes_stored(self, info: EngineGroupInfo, tokens: int) -> int:
        """What the rule of an info's group keeps of so many tokens."""
        window = None if info.sw_size_tokens < 0 else info.sw_size_tokens
        kept = kept_blocks(info.tokens_per_block, window, info.recurrent_state, self.chunk_tokens)
        return tokens // self.chunk_tokens * kept * self.pool.page_bytes(info)

    def bytes_retrieved(self, info: EngineGroupInfo, hit_tokens: int) -> int:
        """Live bytes of the blocks that the tables name now."""
        table = self.pool.tables[info.engine_group_id][: hit_tokens // info.tokens_per_block]
        return sum(block_id != NULL_BLOCK for block_id in table) * self.pool.page_bytes(info)

    def bytes_of_every_block(self, info: EngineGroupInfo, tokens: int) -> int:
        """What a copy that knows no windows moves: all blocks of the range."""
        return tokens // info.tokens_per_block * self.pool.page_bytes(info)

    def _block_ids(self, start_tokens: int, end_tokens: int) -> list[list[int]]:
        per_block = [0] * num_engine_groups(self.pool.infos)
        for info in self.pool.infos:
            per_block[info.engine_group_id] = info.tokens_per_block
        lists = slice_block_ids_per_group(self.pool.tables, per_block, start_tokens, end_tokens)
        return expand_engine_block_ids(self.pool.infos, lists)


def plain_copy(nbytes: int, threads: int) -> Movement:
    """One contiguous copy of so many bytes, warm: what this machine's memory gives."""
    torch.set_num_threads(threads)
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.zeros(nbytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(_PLAIN_COPIES):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return Movement(nbytes, best)
