"""The connector in the scheduler: which prefixes the server has, which blocks move in this step.

Nothing here waits for the server. A lookup is sent when a request arrives and answered later; a
store is ordered in the step that computes the last token of a chunk, from that step's own block
tables, because one step later an id may belong to another group.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hma_triton.client import HmaClient
from hma_triton.errors import HmaError
from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.engine_identity import adapter_digest
from hma_triton.integration.vllm.engine_shape import EngineShape
from hma_triton.integration.vllm.metadata import (
    GroupIds,
    HMAConnectorMetadata,
    HMAWorkerMetadata,
    LoadJob,
    StoreJob,
)
from hma_triton.integration.vllm.stats import HMAStats
from hma_triton.integration.vllm.stored_events import StoredEvents
from hma_triton.integration.vllm.warn_once import logger

NULL_BLOCK = 0
DEFAULT_LEASE_S = 60.0


class Phase(Enum):
    """Where a request stands with the cache."""

    WAITING = "waiting"  # lookup sent, or none to send; not admitted yet
    LOADING = "loading"  # the worker half writes its blocks
    RUNNING = "running"  # admitted, or about to be; nothing of the server's is held for it


@dataclass(slots=True)
class Tracked:
    """One request. Chunks before `next_chunk` are stored or were ordered to be.

    `left_behind` is the first chunk of a store that failed; it goes along with the next one.
    `adapter` is mixed into the digests of a request with an adapter (`engine_identity`).
    """

    request: Any
    adapter: bytes = b""
    phase: Phase = Phase.WAITING
    asked_at: float | None = None
    next_chunk: int = 0
    left_behind: int | None = None
    failed: bool = False


class SchedulerHalf:
    """One per engine, in the process of its scheduler."""

    def __init__(
        self,
        client: HmaClient,
        instance_id: str,
        shape: EngineShape,
        settings: ConnectorSettings,
        *,
        stores: bool = True,
        loads: bool = True,
        world_size: int = 1,
        events: StoredEvents | None = None,
    ) -> None:
        self._client = client
        self._instance_id = instance_id
        self._shape = shape
        self._settings = settings
        self._stores = stores
        self._loads = loads
        self._world_size = world_size
        self._events = events
        self._tracked: dict[str, Tracked] = {}
        # Requests that may still fill a chunk, in order of arrival.
        self._storing: dict[str, None] = {}
        # Requests that ended while their load was in flight.
        self._ended_loading: set[str] = set()
        # Stores ordered and not yet told of, by (request, start chunk, end chunk); for events.
        self._ordered: dict[tuple[str, int, int], Any] = {}
        self._orders: list[LoadJob] = []
        self._next_renewal = 0.0
        # An engine with nothing else to do asks in a loop; once a step is enough.
        self._has_let_in = False
        self.stats = HMAStats()

    def on_new_request(self, request: Any) -> None:
        """Track a request and send its lookup."""
        tracked = Tracked(request, adapter_digest(request.lora_request))
        self._tracked[request.request_id] = tracked
        self._ended_loading.discard(request.request_id)
        if self._stores:
            self._storing[request.request_id] = None
        self._ask(tracked)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond `local_tokens`; None while the server has not answered.

        Changes nothing, so the engine may ask any number of times.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.asked_at is None or tracked.failed:
            return 0, False
        reply = self._client.lookup_poll(request.request_id)
        if reply is None:
            if not self._has_let_in:
                self._has_let_in = True
                self._client.let_answers_in()
            return None, False
        beyond = reply.tokens - local_tokens
        return (beyond, True) if beyond > 0 else (0, False)

    def after_alloc(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """The engine has admitted a request, or given it the blocks to load into.

        It says so again, with all blocks, when a load has ended: there is nothing more to load.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.phase is not Phase.WAITING:
            return
        reply = None
        if tracked.asked_at is not None:
            reply = self._client.lookup_poll(request.request_id)
        chunks = 0 if reply is None or tracked.failed else reply.chunks
        tracked.next_chunk = max(tracked.next_chunk, chunks)
        self._count_lookup(tracked, reply, external_tokens)
        if external_tokens == 0:
            tracked.phase = Phase.RUNNING
            self._let_go(tracked)
            return
        tracked.phase = Phase.LOADING
        self._orders.append(
            self._load_job(tracked, blocks.get_block_ids(), chunks, external_tokens)
        )

    def build_meta(self, scheduler_output: Any) -> HMAConnectorMetadata:
        """The worker half's orders for this step."""
        meta = HMAConnectorMetadata(loads=self._orders)
        self._orders = []
        self._has_let_in = False
        scheduled = scheduler_output.num_scheduled_tokens
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._tracked:
                # One that the engine has taken up again at once needs no hit any more.
                self._restart(self._tracked[request_id], asks=request_id not in scheduled)
        if self._storing:
            block_state = scheduler_output.kv_connector_block_state
            # A decode step has nothing to store and is not to pay for it.
            for request_id in [one for one in self._storing if one in scheduled]:
                job = self._store_job(self._tracked[request_id], scheduled[request_id], block_state)
                if job is not None:
                    meta.stores.append(job)
        if self._events is not None:
            for job in meta.stores:
                self._ordered[job.key] = self._tracked[job.request_id].request
        self._renew_leases()
        return meta

    def update_output(self, output: Any) -> None:
        """The workers' results of a step, seen before the next one is scheduled."""
        failed = output.failed_recving or ()
        for request_id in output.finished_recving or ():
            if request_id in failed:
                self.stats.add("failed_loads")
            self._load_ended(request_id, failed=request_id in failed)
        meta = output.kv_connector_worker_meta
        if isinstance(meta, HMAWorkerMetadata):
            self._take_worker_meta(meta)

    def finished(self, request: Any) -> None:
        """A request has ended, in whatever way. What a load in flight holds goes with the load."""
        request_id = request.request_id
        tracked = self._tracked.pop(request_id, None)
        self._storing.pop(request_id, None)
        if tracked is None or tracked.asked_at is None:
            return
        if tracked.phase is Phase.LOADING:
            self._ended_loading.add(request_id)
        else:
            self._let_go(tracked)

    def reset_cache(self) -> bool:
        """Forget every key of this engine's namespace on the server; False when it cannot be had.

        What was computed before is not stored afterwards: the reset may stand for new weights.
        """
        for request_id, tracked in self._tracked.items():
            tracked.next_chunk, tracked.left_behind = 0, None
            if tracked.phase is not Phase.WAITING:
                self._storing.pop(request_id, None)
        try:
            self._client.clear(self._instance_id, timeout_s=self._settings.timeout_s)
        except HmaError as error:
            logger.warning("hma_triton: the cache was not reset: %s", error)
            return False
        if self._events is not None:
            self._events.cleared()
        for tracked in self._tracked.values():
            if tracked.phase is Phase.WAITING and tracked.asked_at is not None:
                self._let_go(tracked)
                self._ask(tracked)
        return True

    def take_events(self) -> Iterable[Any]:
        """KV events since the last call."""
        return self._events.take() if self._events is not None else ()

    def take_stats(self) -> HMAStats | None:
        """Counts since the last call, None when there are none."""
        if self.stats.is_empty():
            return None
        taken, self.stats = self.stats, HMAStats()
        return taken

    def shutdown(self) -> None:
        """Let go of the server."""
        self._client.close()

    def _ask(self, tracked: Tracked) -> None:
        """Send a lookup for the request's tokens, unless there is nothing it could find."""
        tracked.asked_at = None
        request = tracked.request
        if not self._loads or tracked.failed or request.skip_reading_prefix_cache:
            return
        most = self._shape.servable_tokens(request.num_tokens)
        digests = self._digests(tracked, 0, self._whole_chunks(request, most))
        if not digests:
            return
        self._client.lookup_submit(
            self._instance_id,
            request.request_id,
            digests,
            most,
            limit_s=self._settings.lookup_timeout_s,
        )
        tracked.asked_at = time.monotonic()

    def _restart(self, tracked: Tracked, *, asks: bool) -> None:
        """A preempted request starts from token 0 again, outputs included."""
        if self._stores:
            self._storing[tracked.request.request_id] = None
        if asks:
            tracked.phase = Phase.WAITING
            self._ask(tracked)

    def _load_ended(self, request_id: str, *, failed: bool) -> None:
        """The engine admits the request next, or asks anew after a failed load."""
        tracked = self._tracked.get(request_id)
        if request_id in self._ended_loading:
            self._ended_loading.discard(request_id)
            self._client.release(self._instance_id, request_id)
        elif tracked is not None and tracked.phase is Phase.LOADING:
            self._let_go(tracked)
            tracked.phase = Phase.RUNNING
            if failed:
                tracked.failed = True
                tracked.next_chunk = 0
                tracked.phase = Phase.WAITING

    def _renew_leases(self) -> None:
        """Ask again for requests that have waited so long that the server's lease may end."""
        now = time.monotonic()
        if now < self._next_renewal:
            return
        lease_s = self._client.lease_s or DEFAULT_LEASE_S
        self._next_renewal = now + min(1.0, lease_s / 8)
        oldest = now - lease_s / 2
        for tracked in self._tracked.values():
            if (
                tracked.phase is Phase.WAITING
                and tracked.asked_at is not None
                and tracked.asked_at < oldest
            ):
                self._ask(tracked)

    def _let_go(self, tracked: Tracked) -> None:
        if tracked.asked_at is not None:
            self._client.release(self._instance_id, tracked.request.request_id)
            tracked.asked_at = None

    def _load_job(
        self, tracked: Tracked, tables: Any, chunks: int, external_tokens: int
    ) -> LoadJob:
        """The order to write what lies between the engine's own hit and the server's."""
        request_id = tracked.request.request_id
        hit_tokens = chunks * self._shape.chunk_tokens
        skip_tokens = hit_tokens - external_tokens
        if skip_tokens < 0:
            return LoadJob(request_id, (), 0, {})
        block_ids: GroupIds = {
            group: list(tables[group][: hit_tokens // tokens])
            for group, tokens in self._shape.tokens_per_block.items()
        }
        digests = tuple(self._digests(tracked, 0, chunks))
        return LoadJob(request_id, digests, skip_tokens, block_ids)

    def _store_job(self, tracked: Tracked, count: int, block_state: Any) -> StoreJob | None:
        """The chunks whose last token this step computes, or that an earlier store left behind."""
        request = tracked.request
        step_end = request.num_computed_tokens + count
        if self._settings.store_decode:
            most = min(step_end, request.num_tokens)
        else:
            most = min(step_end, request.num_prompt_tokens)
            if step_end >= request.num_prompt_tokens:
                self._storing.pop(request.request_id, None)
        done = self._whole_chunks(request, most)
        start = tracked.next_chunk
        if done <= start:
            return None
        tables = block_state.get_block_ids(request.request_id)
        if tables is None:
            return None
        if tracked.left_behind is not None:
            start = min(start, tracked.left_behind)
        tracked.next_chunk, tracked.left_behind = done, None
        offers = block_state.boundary_state_offloads.get(request.request_id, ())
        return StoreJob(
            request.request_id,
            start,
            tuple(self._digests(tracked, start, done)),
            self._digests(tracked, start - 1, start)[0] if start else b"",
            {
                group: self._range_ids(group, tables[group], start, done, step_end, offers)
                for group in self._shape.tokens_per_block
            },
        )

    def _range_ids(
        self, group: int, table: Any, start: int, end: int, step_end: int, offers: Any
    ) -> list[int]:
        """Ids of group `group` over chunks [start, end), nulls where nothing valid lies.

        A recurrent group has a state only where the step ended on the block's edge, and where the
        engine itself offers one (`offers`: group, block id, tokens); any other block of its table
        may hold the running state of some position inside it.
        """
        tokens = self._shape.tokens_per_block[group]
        chunk = self._shape.chunk_tokens
        first, last = start * chunk // tokens, end * chunk // tokens
        if group not in self._shape.recurrent:
            return list(table[first:last])
        ids = [NULL_BLOCK] * (last - first)
        states = {boundary: block for owner, block, boundary in offers if owner == group}
        if step_end % tokens == 0 and step_end // tokens <= len(table):
            states[step_end] = table[step_end // tokens - 1]
        for boundary, block in states.items():
            position = boundary // tokens - 1 - first
            if boundary % tokens == 0 and 0 <= position < len(ids):
                ids[position] = block
        return ids

    def _whole_chunks(self, request: Any, tokens: int) -> int:
        """Chunks that end at or before `tokens` and whose hash the engine has computed."""
        hashed = len(request.block_hashes) // self._shape.hashes_per_chunk
        return min(tokens // self._shape.chunk_tokens, hashed)

    def _digests(self, tracked: Tracked, start: int, end: int) -> list[bytes]:
        """Digests of chunks [start, end): the engine's chained hash at each chunk's last block."""
        step, hashes = self._shape.hashes_per_chunk, tracked.request.block_hashes
        digests = [bytes(hashes[(chunk + 1) * step - 1]) for chunk in range(start, end)]
        if not tracked.adapter:
            return digests
        return [hashlib.sha256(tracked.adapter + digest).digest() for digest in digests]

    def _count_lookup(self, tracked: Tracked, reply: Any, external_tokens: int) -> None:
        if tracked.asked_at is None or reply is None:
            return
        self.stats.add("lookups")
        self.stats.add("hit_tokens", external_tokens)
        if reply.tokens == 0:
            self.stats.add_reason("lookup_misses", reply.reason)

    def _take_worker_meta(self, meta: HMAWorkerMetadata) -> None:
        for request_id, chunk in meta.failed.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                earlier = chunk if tracked.left_behind is None else tracked.left_behind
                tracked.left_behind = min(earlier, chunk)
        if self._events is None:
            return
        for key, ranks in meta.stored.items():
            # A request may have ended in the very step that stored its last chunk.
            request = self._ordered.pop(key, None)
            if request is not None and ranks == self._world_size:
                self._events.stored(request, key[1], key[2], self._shape)
        for key in [key for key in self._ordered if key[0] in meta.failed]:
            del self._ordered[key]
