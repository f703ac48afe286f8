"""vLLM's own spec objects and allocator: what it registers is what our geometries say.

Every recorded geometry is rebuilt from real `KVCacheSpec` objects, laid out by vLLM's allocator,
and must come out with the recorded tensors and the same infos as the stand-ins that need no vLLM.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.real_vllm import BLOCKS, SERVED, real_config
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.geometries import build_cache_config, build_raw_caches, load_geometry
from hma_triton.group_view import engine_group_layer_indices
from hma_triton.integration.vllm.kv_cache_groups import (
    create_engine_group_infos_from_vllm,
    describe_groups,
    get_tokens_per_block,
    register_from_vllm,
)
from hma_triton.integration.vllm.kv_cache_specs import (
    declared_slots,
    is_scratch_spec,
    live_page_bytes,
    spec_kind,
    window_tokens,
)
from hma_triton.kv_layer_groups import KVLayerGroupsManager


@pytest.mark.parametrize(("name", "variant"), SERVED)
def test_vllm_registers_what_the_geometry_says(name: str, variant: str) -> None:
    geometry = load_geometry(name, variant)
    config, kernel_blocks = real_config(geometry)
    meta = torch.device("meta")
    layout = KVCacheLayout[geometry.kv_cache_layout]
    real = allocate_kv_cache(config, meta, layout, kernel_blocks)
    recorded = build_raw_caches(geometry, BLOCKS, "meta")
    owned = dict(list(recorded.items())[: len(recorded) - len(geometry.shared_layers)])
    assert list(real) == list(owned)
    for layer, cache in real.items():
        wanted = owned[layer]
        assert (cache.shape, cache.dtype) == (wanted.shape, wanted.dtype), layer
        assert cache.storage_offset() == wanted.storage_offset(), layer
        strides = zip(cache.shape, cache.stride(), wanted.stride(), strict=True)
        assert all(ours == theirs for length, theirs, ours in strides if length > 1), layer
    # the same registration from real specs and from stand-ins
    ours = register_from_vllm(build_cache_config(geometry, BLOCKS), owned)
    theirs = register_from_vllm(config, real)
    assert theirs.infos == ours.infos
    assert theirs.layout_hints == ours.layout_hints
    assert theirs.groups == ours.groups
    for layer, cache in theirs.kv_caches.items():
        assert cache.shape == ours.kv_caches[layer].shape


def attention(cls: Any, **more: Any) -> Any:
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
    return cls(**{**fields, **more})


@pytest.mark.parametrize(
    ("spec", "kind", "window", "slots", "page_bytes"),
    [
        (attention(vllm_specs.FullAttentionSpec), "full_attention", -1, 16, 1024),
        # windows that the allocator ignores (hybrid allocation off) bind nothing
        (
            attention(vllm_specs.FullAttentionSpec, sliding_window=64),
            "full_attention",
            -1,
            16,
            1024,
        ),
        (
            attention(vllm_specs.SinkFullAttentionSpec, sink_len=4),
            "sink_full_attention",
            -1,
            16,
            1024,
        ),
        (attention(vllm_specs.RSWASpec, rswa_window=64), "full_attention", -1, 16, 1024),
        (
            attention(vllm_specs.SlidingWindowSpec, sliding_window=64),
            "sliding_window",
            64,
            16,
            1024,
        ),
        # tokens kept beyond the window, for speculative drafts
        (
            attention(vllm_specs.SlidingWindowSpec, sliding_window=64, extra_retained_tokens=3),
            "sliding_window",
            67,
            16,
            1024,
        ),
        (
            attention(vllm_specs.ChunkedLocalAttentionSpec, attention_chunk_size=128),
            "chunked_local_attention",
            128,
            16,
            1024,
        ),
        (
            attention(vllm_specs.MLAAttentionSpec, num_kv_heads=1, tokens_per_state=4),
            "mla_attention",
            -1,
            4,
            64,
        ),
        (
            attention(vllm_specs.SlidingWindowMLASpec, num_kv_heads=1, sliding_window=8),
            "sliding_window_mla",
            8,
            16,
            256,
        ),
        # padding is no part of a page
        (
            attention(vllm_specs.FullAttentionSpec, page_size_padded=4096),
            "full_attention",
            -1,
            16,
            1024,
        ),
        (
            vllm_specs.MambaSpec(
                block_size=48,
                shapes=((3, 4), (5,)),
                dtypes=(torch.bfloat16, torch.float32),
                page_size_padded=64,
                mamba_cache_mode="align",
            ),
            "mamba",
            48,
            1,
            44,
        ),
        (attention(vllm_specs.CrossAttentionSpec), "cross_attention", -1, 16, 1024),
        (attention(vllm_specs.EncoderOnlyAttentionSpec), "encoder_only_attention", -1, 16, 1024),
        (attention(vllm_specs.CircularBufferSpec), "circular_buffer", -1, 16, 1024),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, vllm_specs.KVCacheSpec) else None,
)
def test_real_specs_are_read_right(
    spec: Any, kind: str, window: int, slots: int, page_bytes: int
) -> None:
    assert spec_kind(spec) == kind
    assert window_tokens(spec) == window
    assert declared_slots(spec) == slots
    assert live_page_bytes(spec) == page_bytes


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (attention(vllm_specs.FullAttentionSpec), 64),
        (attention(vllm_specs.FullAttentionSpec, dcp_sharded=False), 16),
        (vllm_specs.MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.int8,)), 16),
        (attention(vllm_specs.CircularBufferSpec), 0),
        (
            attention(vllm_specs.SlidingWindowMLASpec, sliding_window=8, bounded_replay=True),
            0,
        ),
        (vllm_specs.HiSparseResidentSpec(block_size=16, page_size=64), 0),
        (
            vllm_specs.UniformTypeKVCacheSpecs(
                block_size=16, kv_cache_specs={"a": attention(vllm_specs.FullAttentionSpec)}
            ),
            64,
        ),
    ],
)
def test_tokens_per_block_under_context_parallelism(spec: Any, tokens: int) -> None:
    assert get_tokens_per_block(spec, 4) == tokens
    assert get_tokens_per_block(spec, 1) == (16 if tokens else 0)
    assert is_scratch_spec(spec) == (tokens == 0)


def test_scratch_host_and_closed_groups_are_left_out() -> None:
    full = attention(vllm_specs.FullAttentionSpec)
    ring = attention(vllm_specs.CircularBufferSpec, block_size=4)
    groups = [
        vllm_specs.KVCacheGroupSpec(["full"], full),
        vllm_specs.KVCacheGroupSpec(["ring"], ring),
        vllm_specs.KVCacheGroupSpec(["host"], full, host_resident=True),
        vllm_specs.KVCacheGroupSpec(["closed"], full, enable_kv_transfer=False),
        vllm_specs.KVCacheGroupSpec(["draft"], full, is_eagle_group=True),
    ]
    config = vllm_specs.KVCacheConfig(BLOCKS, [], groups)
    cache = torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.bfloat16)
    caches = {
        "full": cache,
        "ring": torch.zeros(7, dtype=torch.int8),
        "host": cache.clone(),
        "draft": cache.clone(),
    }
    infos = create_engine_group_infos_from_vllm(config, caches, "HND")
    assert [(i.engine_group_id, i.layer_indices) for i in infos] == [(0, (0,)), (4, (3,))]
    groups_seen = describe_groups(config)
    assert [g.is_cacheable for g in groups_seen] == [True, False, False, False, True]
    assert [g.tokens_per_block for g in groups_seen] == [16, 0, 0, 0, 16]
    assert [g.is_draft for g in groups_seen] == [False] * 4 + [True]
    assert {g.null_block_id for g in groups_seen} == {0}
    assert config.prefix_cacheable_group_ids == (0, 2, 4)
    registered = register_from_vllm(config, caches, kv_layout="HND")
    assert registered.layout_hints.slots_per_block == (16, 0, 0, 16)


def test_the_manager_takes_what_the_conversion_gives() -> None:
    geometry = load_geometry("gemma-4-e4b-it", "main")
    config, _ = real_config(geometry)
    caches = build_raw_caches(geometry, BLOCKS, "meta")
    registered = register_from_vllm(config, caches)
    assert len(registered.kv_caches) == 42
    assert sum(len(info.layer_indices) for info in registered.infos) == 24
    layers, formats = normalize_and_discover_per_layer_formats(
        registered.kv_caches,
        engine_group_layer_indices(registered.infos),
        "vllm",
        registered.layout_hints,
    )
    manager = KVLayerGroupsManager(
        layers, formats, registered.infos, 32, separate_object_groups=True
    )
    assert [g.window_tokens for g in manager.object_groups] == [512, None]
