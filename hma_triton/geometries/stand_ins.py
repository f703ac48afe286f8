"""Cache specs with the class names and fields of vLLM 0.32, for use without vLLM.

They carry what ``integration.vllm`` reads and nothing else. The names are vLLM's on purpose:
specs are told apart by class name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Pages of tokens; ``num_states`` slots hold ``block_size`` tokens."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    num_states: int
    unpadded_page_size_bytes: int
    page_size_bytes: int
    prefix_cacheable: bool = True
    dcp_sharded: bool = True


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token is read by every later one."""


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """One latent per token."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """The last ``sliding_window`` tokens are read, the current one among them."""

    sliding_window: int


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """One latent per token, under a window."""


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """Tokens of the current chunk of ``attention_chunk_size`` are read."""

    attention_chunk_size: int


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    """State snapshots, one per block."""

    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    page_size_bytes: int
    mamba_cache_mode: str
    prefix_cacheable: bool = True
    dcp_sharded: bool = False


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs:
    """One engine group whose layers have specs of their own."""

    block_size: int
    kv_cache_specs: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False


@dataclass(frozen=True, kw_only=True)
class KVCacheConfig:
    """The groups of a pool of ``num_blocks`` blocks."""

    num_blocks: int
    kv_cache_groups: list[KVCacheGroupSpec]
    kv_cache_layout: str | None = None
    kv_cache_tensors: list[Any] = field(default_factory=list)
