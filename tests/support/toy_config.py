"""Small cache configs of any mix of groups, as vLLM would declare and register them."""

from __future__ import annotations

import torch

from hma_triton.geometries import stand_ins

HEAD_SIZE = 8
STATE_BYTES = 96
STATE_PAGE_BYTES = 128


def full(tokens: int) -> stand_ins.FullAttentionSpec:
    """Full attention with blocks of `tokens`."""
    return stand_ins.FullAttentionSpec(**_attention(tokens))


def window(tokens: int, width: int) -> stand_ins.SlidingWindowSpec:
    """A sliding window of `width` tokens."""
    return stand_ins.SlidingWindowSpec(**_attention(tokens), sliding_window=width)


def local(tokens: int, chunk: int) -> stand_ins.ChunkedLocalAttentionSpec:
    """Chunked local attention."""
    return stand_ins.ChunkedLocalAttentionSpec(**_attention(tokens), attention_chunk_size=chunk)


def state(tokens: int, mode: str = "align") -> stand_ins.MambaSpec:
    """Recurrent state, one snapshot per `tokens`."""
    return stand_ins.MambaSpec(
        block_size=tokens,
        shapes=((STATE_BYTES,),),
        dtypes=(torch.int8,),
        page_size_bytes=STATE_PAGE_BYTES,
        mamba_cache_mode=mode,
    )


def toy(
    *specs: object, num_blocks: int = 64, layers_per_group: int = 2
) -> tuple[stand_ins.KVCacheConfig, dict[str, torch.Tensor]]:
    """A config with one group per spec, and the tensors of its layers."""
    groups, caches = [], {}
    for index, spec in enumerate(specs):
        names = [f"model.layers.{index}.{layer}.attn" for layer in range(layers_per_group)]
        groups.append(stand_ins.KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec))
        caches |= {name: _cache(spec, num_blocks) for name in names}
    config = stand_ins.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_groups=groups, kv_cache_layout="LBHNC"
    )
    return config, caches


def _attention(tokens: int) -> dict[str, object]:
    page = tokens * 2 * HEAD_SIZE * 2
    return {
        "block_size": tokens,
        "num_kv_heads": 2,
        "head_size": HEAD_SIZE,
        "dtype": torch.bfloat16,
        "num_states": tokens,
        "unpadded_page_size_bytes": page,
        "page_size_bytes": page,
    }


def _cache(spec: object, num_blocks: int) -> torch.Tensor:
    if isinstance(spec, stand_ins.MambaSpec):
        whole = torch.zeros(num_blocks * STATE_PAGE_BYTES, dtype=torch.int8)
        shape = (num_blocks, 1, 1, STATE_BYTES)
        return whole.as_strided(shape, (STATE_PAGE_BYTES, STATE_BYTES, STATE_BYTES, 1))
    assert isinstance(spec, stand_ins.AttentionSpec)
    return torch.zeros(num_blocks, 2, spec.block_size, HEAD_SIZE, dtype=torch.bfloat16)
