"""KV events: what the cache took, told to whoever routes requests by prefix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from hma_triton.integration.vllm.engine_shape import EngineShape


class StoredEvents:
    """Collects one `BlockStored` per stored range, in the engine's own hash blocks.

    The server's evictions are not reported: a router that trusts these events must let them age.
    """

    def __init__(self) -> None:
        self._events: list[Any] = []

    def stored(self, request: Any, start_chunk: int, end_chunk: int, shape: EngineShape) -> None:
        """Chunks `[start_chunk, end_chunk)` of `request` were committed by every rank."""
        step = shape.hashes_per_chunk
        first, last = start_chunk * step, end_chunk * step
        hashes = [maybe_convert_block_hash(one) for one in request.block_hashes[first:last]]
        parent = maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=parent,
                token_ids=list(
                    request.all_token_ids[first * shape.hash_tokens : last * shape.hash_tokens]
                ),
                block_size=shape.hash_tokens,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_CPU,
                lora_name=lora.name if lora else None,
            )
        )

    def cleared(self) -> None:
        """All keys of the engine were forgotten."""
        self._events.append(AllBlocksCleared())

    def take(self) -> Iterable[Any]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken
