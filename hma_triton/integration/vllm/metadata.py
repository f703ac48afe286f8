"""What the connector's halves tell each other, once a step: jobs down, results up."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

GroupIds = dict[int, list[int]]
"""Block ids by engine group id, groups that are cacheable only."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Chunks `[start_chunk, start_chunk + n)` of a request, complete after this step.

    `digests` is one digest per chunk, `parent` that of the chunk before (empty for chunk 0).
    `block_ids[g]` covers exactly the tokens of these chunks in engine group g.
    """

    request_id: str
    start_chunk: int
    digests: tuple[bytes, ...]
    parent: bytes
    block_ids: GroupIds

    @property
    def key(self) -> tuple[str, int, int]:
        """The request and the range of chunks, as results name them."""
        return self.request_id, self.start_chunk, self.start_chunk + len(self.digests)


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Chunks `[0, n)` to be written, without the first `skip_tokens` tokens: the engine has them.

    `block_ids[g]` covers exactly these chunks. Empty `digests`: the load is to be reported as
    failed.
    """

    request_id: str
    digests: tuple[bytes, ...]
    skip_tokens: int
    block_ids: GroupIds


@dataclass(slots=True)
class HMAConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The scheduler half's orders for one step."""

    stores: list[StoreJob] = field(default_factory=list)
    loads: list[LoadJob] = field(default_factory=list)


@dataclass(slots=True)
class HMAWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """One rank's results of one step.

    `stored` counts the ranks that committed, by (request, start chunk, end chunk);
    `failed` holds the first chunk of every store that committed nothing.
    """

    stored: dict[tuple[str, int, int], int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: HMAWorkerMetadata) -> HMAWorkerMetadata:
        """Both ranks' results; a store that failed anywhere failed."""
        stored = dict(self.stored)
        for job, ranks in other.stored.items():
            stored[job] = stored.get(job, 0) + ranks
        failed = dict(self.failed)
        for request, chunk in other.failed.items():
            failed[request] = min(chunk, failed.get(request, chunk))
        return HMAWorkerMetadata(stored, failed)
