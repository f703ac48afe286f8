"""Digests of chunks and the fingerprint of a registration."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.hybrid_request import CHUNK_TOKENS, INFOS, NUM_CHUNKS, NUM_TOKENS
from hma_triton.keys import (
    EngineFacts,
    KernelGroupKey,
    KeyFields,
    chunk_digests,
    fingerprint,
    pack_digests,
)
from hma_triton.messages import DIGEST_BYTES

_TOKENS = np.random.default_rng(0).integers(0, 200_000, NUM_TOKENS)


def test_chunk_digests(benchmark: Any) -> None:
    digests = benchmark(chunk_digests, _TOKENS, CHUNK_TOKENS)
    assert len(digests) == NUM_CHUNKS * DIGEST_BYTES


def test_digests_that_the_engine_brings(benchmark: Any) -> None:
    digests = [bytes([i % 256]) * 32 for i in range(NUM_CHUNKS)]
    packed = benchmark(pack_digests, digests)
    assert len(packed) == NUM_CHUNKS * DIGEST_BYTES


def test_fingerprint(benchmark: Any) -> None:
    groups = tuple(
        KernelGroupKey(
            layer_names=tuple(f"model.layers.{layer}" for layer in info.layer_indices),
            kv_size=1,
            num_heads=8,
            head_size=256,
            slots_per_block=info.tokens_per_block,
            engine_group_idx=info.engine_group_id,
            dtype="bfloat16",
            engine_kv_format="NL_X_NB_NH_BS_CS",
            tokens_per_block=info.tokens_per_block,
            window_tokens=None,
            recurrent=info.recurrent_state,
            page_bytes=65536,
            page_strides=((256, 4096),),
            object_runs=((0, len(info.layer_indices), 65536, 16, 65536, 1, 1, 1, 1, 65536),),
        )
        for info in INFOS
    )
    fields = KeyFields(
        model_name="a/hybrid",
        facts=EngineFacts(),
        world_size=1,
        engine_type="vllm",
        layout_hints={"kv_layout": "LBHNC"},
        layer_names=tuple(name for group in groups for name in group.layer_names),
        kernel_groups=groups,
        object_groups=((0,), (1, 2), (3, 4)),
        replicated_object_groups=(),
        object_nbytes=(1 << 25, 1 << 24, 1 << 20),
        object_layout="opaque",
        chunk_tokens=CHUNK_TOKENS,
    )
    assert len(benchmark(fingerprint, fields)) == 32
