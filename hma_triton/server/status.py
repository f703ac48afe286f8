"""The server's state as one JSON-ready object; `docs/protocol.md` describes its fields."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from hma_triton.messages import PROTOCOL_VERSION

if TYPE_CHECKING:
    from hma_triton.server.handlers import Handlers


def snapshot(handlers: Handlers, server_id: str, started_ns: int) -> dict[str, Any]:
    """Everything that one may want to know, at this moment."""
    store, config = handlers.store, handlers.config
    counters = store.counters
    return {
        "protocol_version": PROTOCOL_VERSION,
        "server_id": server_id,
        "pid": os.getpid(),
        "url": config.url,
        "uptime_s": (time.monotonic_ns() - started_ns) / 1e9,
        "verify": config.verify,
        "separate_object_groups": config.separate_object_groups,
        "arena": {
            "nbytes": store.arena.nbytes,
            "used_bytes": store.arena.used_bytes,
            "unit_bytes": store.arena.unit_bytes,
            "pinned": handlers.registrar.pinned_arena.is_pinned,
            "sizes": store.arena.usage(),
        },
        "pinned_bytes": store.pinned_bytes,
        "chunks": store.chunks,
        "bookkeeping_bytes": store.bookkeeping_nbytes,
        "namespaces": store.describe_namespaces(),
        "leases": len(handlers.leases),
        "expired_leases": handlers.leases.expired,
        "queued": handlers.desk.pool.queued,
        "running": handlers.desk.pool.running,
        "open_copies": handlers.desk.open_jobs,
        "overdue_calls": dict(zip(("now", "ever"), handlers.registrar.overdue, strict=True)),
        "counters": {
            "committed_objects": counters.committed_objects,
            "aborted_objects": counters.aborted_objects,
            "evicted_objects": counters.evicted_objects,
            "evicted_chunks": counters.evicted_chunks,
            "evicted_bytes": counters.evicted_bytes,
            "corrupt_objects": counters.corrupt_objects,
            "evictions_by_cause": dict(counters.evictions_by_cause),
        },
        "traffic": handlers.metrics.totals(),
        "registrations": [each.describe() for each in handlers.registrations.all()],
        "peers": [
            {
                "pid": peer.process.pid,
                "role": peer.role,
                "requests": peer.requests,
                "errors": peer.errors,
            }
            for peer in handlers.peers.all()
        ],
        "limits": {
            "max_registrations": config.max_registrations,
            "max_peers": config.max_peers,
            "queue_limit": config.queue_limit,
            "copy_threads": config.copy_threads,
            "lease_s": config.lease_s,
            "pin_share": config.pin_share,
        },
    }
