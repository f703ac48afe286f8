"""The connector in a worker: its pool is registered, its orders carried out, its results told.

Stores are waited for within the step that computed their tokens; loads go on between steps. Nothing
that the server does, or fails to do, raises here once the engine is up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hma_triton.client import HmaClient, Ticket
from hma_triton.integration.vllm.audit import Audit
from hma_triton.integration.vllm.breaker import StoreBreaker
from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.metadata import (
    HMAConnectorMetadata,
    HMAWorkerMetadata,
    LoadJob,
    StoreJob,
)
from hma_triton.integration.vllm.registration import PoolRegistration
from hma_triton.integration.vllm.stats import HMAStats
from hma_triton.integration.vllm.warn_once import WarnOnce
from hma_triton.messages import RetrieveReply, StoreReply

REPLY_MARGIN_S = 0.1
"""How long after a store's deadline its answer may still be on its way."""
SLOW_BYTES_PER_SECOND = 200e6
"""A committed store is slow when it took `slow_store_s` longer than its bytes at this rate."""
UNKNOWN = "timeout"
"""The code of a store that was not answered: the server may have committed it in time."""
AWAY = ("unavailable", "timeout", "busy", "shutting_down", "deadline")
"""Codes that speak of the server's state, not of this store."""


@dataclass(slots=True)
class _Loading:
    """A load in flight. `ticket` None: there was nothing to order, it has failed."""

    job: LoadJob
    ticket: Ticket[RetrieveReply] | None
    started: float


class WorkerHalf:
    """One per rank, in the process of its worker."""

    def __init__(
        self, client: HmaClient, registration: PoolRegistration, settings: ConnectorSettings
    ) -> None:
        self._client = client
        self._registration = registration
        self._settings = settings
        self._audit: Audit | None = None
        self._loading: dict[str, _Loading] = {}
        self._meta = HMAWorkerMetadata()
        self._warn = WarnOnce()
        self._breaker = StoreBreaker(self._probe, settings.breaker_s)
        self.stats = HMAStats()

    @property
    def registration(self) -> PoolRegistration:
        """The pool as the server knows it."""
        return self._registration

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Register the pool. Without a server the engine starts all the same, and caches later.

        Raises:
            HmaError: groups that cannot be served, or a registration that the server refuses.
        """
        if not self._registration.register(kv_caches):
            self.stats.add_reason("failures", "unavailable")
            self._breaker.failed()
        if self._settings.audit:
            self._audit = Audit(
                self._settings.audit,
                self._registration.kv_caches,
                self._registration.infos,
                self._registration.rank,
            )

    def start_loads(self, meta: HMAConnectorMetadata) -> None:
        """Send this step's loads; `finished_loads` tells when they have ended."""
        for job in meta.loads:
            ticket = None
            if job.digests:
                ticket = self._client.retrieve_submit(
                    self._registration.instance_id,
                    self._registration.rank,
                    job.request_id,
                    job.digests,
                    job.skip_tokens,
                    self._registration.expand(job.block_ids),
                    deadline_s=self._settings.load_timeout_s,
                    event=self._registration.step_event(),
                )
            self._loading[job.request_id] = _Loading(job, ticket, time.monotonic())

    def finished_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them that failed.

        A load that ran out of time is reported only when its copier has answered or is known dead:
        until then its blocks are not the engine's.
        """
        finished: set[str] = set()
        failed: set[str] = set()
        for request_id, loading in list(self._loading.items()):
            reply = None if loading.ticket is None else loading.ticket.poll()
            if loading.ticket is not None and reply is None:
                continue
            del self._loading[request_id]
            finished.add(request_id)
            if reply is not None and reply.ok:
                self._loaded(loading, reply)
            else:
                failed.add(request_id)
                self._load_failed(request_id, reply)
        if self._loading and not finished:
            self._client.let_answers_in()
        return finished, failed

    def save(self, meta: HMAConnectorMetadata) -> None:
        """Carry out this step's stores; returns when their copies have ended or been given up."""
        if not meta.stores:
            return
        if self._breaker.is_open:
            self.stats.add("skipped_stores", len(meta.stores))
            self._meta.failed |= {job.request_id: job.start_chunk for job in meta.stores}
            return
        started = time.monotonic()
        event = self._registration.step_event()
        # one deadline for all: nothing is committed after the step has given up waiting
        end = started + self._settings.store_timeout_s
        tickets = [(job, self._store_submit(job, event, end)) for job in meta.stores]
        for job, ticket in tickets:
            reply = ticket.wait(max(0.0, end - time.monotonic()) + REPLY_MARGIN_S)
            self._take_store(job, reply, time.monotonic() - started)
        self.stats.add("store_seconds", time.monotonic() - started)

    def take_meta(self) -> HMAWorkerMetadata | None:
        """This step's results for the scheduler half, None when there are none."""
        if not self._meta.stored and not self._meta.failed:
            return None
        taken, self._meta = self._meta, HMAWorkerMetadata()
        return taken

    def take_stats(self) -> HMAStats | None:
        """Counts since the last call, None when there are none."""
        if self.stats.is_empty():
            return None
        taken, self.stats = self.stats, HMAStats()
        return taken

    def shutdown(self) -> None:
        """Take the pool back from the server and end the engine's own server."""
        self._breaker.close()
        self._registration.close()
        self._client.close()

    def _store_submit(self, job: StoreJob, event: Any, end: float) -> Ticket[StoreReply]:
        return self._client.store_submit(
            self._registration.instance_id,
            self._registration.rank,
            job.start_chunk,
            job.digests,
            job.parent,
            self._registration.expand(job.block_ids),
            deadline_s=max(0.0, end - time.monotonic()),
            event=event,
        )

    def _take_store(self, job: StoreJob, reply: StoreReply | None, seconds: float) -> None:
        if reply is not None and not reply.code:
            self.stats.add("stores")
            self.stats.add("stored_objects", reply.stored)
            self.stats.add("stored_bytes", reply.nbytes)
            self._meta.stored[job.key] = 1
            self._audit_store(job)
            slow = seconds > self._settings.slow_store_s + reply.nbytes / SLOW_BYTES_PER_SECOND
            if self._breaker.succeeded(slow=slow):
                self._warn("slow", "the cache server is slow (%.2f s for a store)", seconds)
            return
        code = UNKNOWN if reply is None else reply.code
        if code == UNKNOWN:
            self._audit_store(job)
        self.stats.add("failed_stores")
        self.stats.add_reason("failures", code)
        self._meta.failed[job.request_id] = job.start_chunk
        if code in AWAY:
            self._breaker.failed()
        message = "" if reply is None else reply.message
        self._warn(code, "a store failed with %r: %s; the engine goes on without it", code, message)

    def _audit_store(self, job: StoreJob) -> None:
        if self._audit is not None:
            first = job.start_chunk * self._registration.chunk_tokens
            self._audit.record("store", job.request_id, job.digests, job.block_ids, first)

    def _loaded(self, loading: _Loading, reply: RetrieveReply) -> None:
        self.stats.add("loads")
        self.stats.add("loaded_bytes", reply.nbytes)
        self.stats.add("load_seconds", time.monotonic() - loading.started)
        if self._audit is not None:
            job = loading.job
            self._audit.record(
                "load", job.request_id, job.digests, job.block_ids, 0, job.skip_tokens
            )

    def _load_failed(self, request_id: str, reply: RetrieveReply | None) -> None:
        code = "unavailable" if reply is None else reply.code or "error"
        message = "" if reply is None else reply.message
        self.stats.add_reason("failures", code)
        self._warn(code, "the load of request %s failed with %r: %s", request_id, code, message)

    def _probe(self) -> bool:
        """Whether the server answers and knows the pool; from the breaker's thread."""
        if not self._registration.registered and not self._registration.retry():
            return False
        return self._registration.is_reachable(self._settings.lookup_timeout_s)
