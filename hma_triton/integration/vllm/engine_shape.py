"""What the scheduler half needs of the engine's groups: block lengths and the chunk, in tokens.

Everything is read from `kv_cache_config`, never from `cache_config`: the engine core resets the
latter's block size on the CPU after the scheduler was built (vLLM 0.32, `v1/engine/core.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hma_triton.errors import AlignmentError
from hma_triton.integration.vllm.kv_cache_groups import describe_groups
from hma_triton.integration.vllm.kv_cache_specs import groups_of, leaf_specs, spec_kind
from hma_triton.plan import check_chunk_tokens, choose_chunk_tokens


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Token lengths of one engine; `tokens_per_block` and `recurrent` hold cacheable groups only.

    `hash_tokens` is what one of the engine's block hashes covers. `leave_tokens` of a prompt are
    never served from the cache: one with recurrent groups, whose state at the prompt's end is
    that of no earlier position; two for MLA on the CPU, whose one-token step computes otherwise
    than its prefill. `windows` holds (window, block) tokens of sliding-window groups,
    `local_chunks` the tokens of a chunk of chunked local attention.
    """

    chunk_tokens: int
    hash_tokens: int
    tokens_per_block: Mapping[int, int]
    recurrent: frozenset[int] = frozenset()
    leave_tokens: int = 0
    windows: frozenset[tuple[int, int]] = frozenset()
    local_chunks: frozenset[int] = frozenset()

    def servable_tokens(self, num_tokens: int) -> int:
        """Tokens of a request of `num_tokens` that a hit may cover.

        After a hit on all of them the engine computes the last one again, at a position that the
        blocks it asked for may not reach: they start at what the *next* token needs. That is one
        token later for a window, and another chunk for chunked local attention.
        """
        if self.leave_tokens:
            return num_tokens - self.leave_tokens
        for window, block in self.windows:
            if num_tokens >= window and (num_tokens - window + 1) % block == 0:
                return num_tokens - 1
        if any(num_tokens % chunk == 0 for chunk in self.local_chunks):
            return num_tokens - 1
        return num_tokens

    @property
    def hashes_per_chunk(self) -> int:
        """Block hashes of the engine in one chunk."""
        return self.chunk_tokens // self.hash_tokens


def engine_shape(
    kv_cache_config: Any, *, chunk_tokens: int = 0, dcp_size: int = 1, on_cpu: bool = False
) -> EngineShape:
    """The shape of an engine with this KV cache config; `chunk_tokens` 0 chooses the length.

    Raises:
        UnsupportedLayoutError: groups that cannot be served; names each.
        GroupMismatchError: no cacheable group, or a chunk that some group's block does not divide.
        AlignmentError: the engine's block hashes do not divide the chunk.
    """
    groups = describe_groups(kv_cache_config, dcp_size)
    recurrent = frozenset(group.engine_group_id for group in groups if group.is_recurrent)
    by_group = [group.tokens_per_block for group in groups]
    if chunk_tokens:
        check_chunk_tokens(chunk_tokens, by_group)
    else:
        chunk_tokens = choose_chunk_tokens(by_group, bool(recurrent))
    tokens = {group.engine_group_id: group.tokens_per_block for group in groups}
    tokens = {group: count for group, count in tokens.items() if count}
    declared = getattr(kv_cache_config, "hash_block_size", None)
    hash_tokens = int(declared or math.gcd(*tokens.values()))
    if chunk_tokens % hash_tokens:
        raise AlignmentError(
            f"a chunk of {chunk_tokens} tokens is no multiple of the {hash_tokens} tokens of the "
            f"engine's block hashes"
        )
    kinds = {
        index: {spec_kind(spec) for spec in leaf_specs(group.kv_cache_spec)}
        for index, group in enumerate(groups_of(kv_cache_config))
        if index in tokens
    }
    mla = any("mla_attention" in found for found in kinds.values())
    windows, local_chunks = set(), set()
    for group in groups:
        if group.window_tokens is None or group.engine_group_id not in tokens:
            continue
        if "chunked_local_attention" in kinds[group.engine_group_id]:
            local_chunks.add(group.window_tokens)
        else:
            windows.add((group.window_tokens, group.tokens_per_block))
    return EngineShape(
        chunk_tokens=chunk_tokens,
        hash_tokens=hash_tokens,
        tokens_per_block=tokens,
        recurrent=recurrent,
        leave_tokens=1 if recurrent else 2 if mla and on_cpu else 0,
        windows=frozenset(windows),
        local_chunks=frozenset(local_chunks),
    )
