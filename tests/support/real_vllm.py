"""Recorded geometries as vLLM's own spec and config objects."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1 import kv_cache_interface as vllm_specs

from hma_triton.geometries import (
    Geometry,
    GroupGeometry,
    list_geometries,
    list_variants,
)

BLOCKS = 3
_REFUSED = ("LHBNC", "BHLNC", "noprefix")
SERVED = [
    (name, variant)
    for name in list_geometries()
    for variant in list_variants(name)
    if not variant.endswith(_REFUSED)
]


def _resolved(size: tuple[int, bool]) -> int:
    return size[0] * BLOCKS if size[1] else size[0]


def real_spec(group: GroupGeometry) -> Any:
    """The spec that vLLM has for these layers."""
    heads, _, content = group.page
    if group.mamba_cache_mode is not None:
        return vllm_specs.MambaSpec(
            block_size=group.tokens_per_block,
            shapes=((group.live_bytes,),),
            dtypes=(torch.int8,),
            page_size_padded=group.page_bytes,
            mamba_cache_mode=group.mamba_cache_mode,
        )
    cell = content * group.dtype.itemsize
    fields: dict[str, Any] = {
        "block_size": group.tokens_per_block,
        "num_kv_heads": heads,
        "head_size": content,
        "head_size_v": 0,
        "dtype": group.dtype,
        "state_content_bytes": cell,
        "tokens_per_state": group.tokens_per_block // group.slots_per_block,
    }
    if group.page_bytes != group.live_bytes:
        fields["page_size_padded"] = group.page_bytes
    if group.spec_class == "ChunkedLocalAttentionSpec":
        fields["attention_chunk_size"] = group.window_tokens
    elif group.window_tokens is not None:
        fields["sliding_window"] = group.window_tokens
    return getattr(vllm_specs, group.spec_class)(**fields)


def real_config(geometry: Geometry) -> tuple[Any, list[int]]:
    """vLLM's config and the kernel block of each group."""
    by_group: dict[int, list[GroupGeometry]] = {}
    for group in geometry.groups:
        by_group.setdefault(group.engine_group_id, []).append(group)
    groups, kernel_blocks = [], []
    for _, parts in sorted(by_group.items()):
        spec = real_spec(parts[0])
        if len(parts) > 1:
            spec = vllm_specs.UniformTypeKVCacheSpecs(
                block_size=parts[0].tokens_per_block,
                kv_cache_specs={n: real_spec(p) for p in parts for n in p.layer_names},
            )
        names = [name for part in parts for name in part.layer_names]
        groups.append(vllm_specs.KVCacheGroupSpec(names, spec))
        kernel_blocks.append(parts[0].tokens_per_block // parts[0].kernel_pages)
    size = geometry.bytes_per_block * BLOCKS
    # the order of registration is that of these tensors
    ordered = sorted(geometry.groups, key=lambda group: group.registered_indices[0])
    tensors = [
        vllm_specs.KVCacheTensor(
            size=size,
            layers=list(group.layer_names),
            layer_stride=_resolved(group.layer_step),
            block_stride=_resolved(group.stride_elems[0])
            * group.dtype.itemsize
            * group.kernel_pages,
            offset=_resolved(group.first_layer),
        )
        for group in ordered
    ]
    config = vllm_specs.KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=tensors,
        kv_cache_groups=groups,
        kv_cache_layout=geometry.kv_cache_layout,
    )
    return config, kernel_blocks
