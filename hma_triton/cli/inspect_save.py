"""A geometry file of what the installed vLLM would register, for a look on another machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hma_triton.cli.inspect_subject import Subject
from hma_triton.errors import ConfigError
from hma_triton.integration.vllm.kv_cache_specs import (
    declared_slots,
    get_tokens_per_block,
    groups_of,
    is_recurrent,
    layer_spec,
    live_page_bytes,
    window_tokens,
)
from hma_triton.units import lcm


def save_geometry(subject: Subject, file: Path) -> None:
    """Write ``subject`` in the form that ``hma_triton.geometries`` reads; one variant, ``main``.

    Raises:
        ConfigError: a subject without vLLM's placement of its tensors: it is saved already.
    """
    config = subject.kv_cache_config
    tensors = getattr(config, "kv_cache_tensors", None)
    if not tensors:
        raise ConfigError(f"{subject.title}: only a model folder can be saved")
    group_of = {
        name: index for index, group in enumerate(groups_of(config)) for name in group.layer_names
    }
    groups = [_group(subject, tensor, group_of[tensor.layers[0]]) for tensor in tensors]
    blocks = [group["tokens_per_block"] for group in groups]
    variant = {
        "platform": subject.platform,
        "tensor_parallel": 1,
        "kv_cache_layout": subject.layout,
        "cache_dtype": "auto",
        "prefix_caching": True,
        "hit_alignment_tokens": lcm(*(tokens for tokens in blocks if tokens)),
        "bytes_per_block": subject.pool_bytes // subject.num_blocks,
        "num_registered": len(subject.raw_caches),
        "groups": groups,
    }
    document = {
        "model": subject.title,
        "how": "built by vLLM without weights, saved by hma-triton inspect",
        "notes": "",
        "shared_layers": {},
        "variants": {"main": variant},
    }
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _group(subject: Subject, tensor: Any, group_id: int) -> dict[str, Any]:
    """One set of layers that vLLM places together."""
    group = groups_of(subject.kv_cache_config)[group_id]
    first = tensor.layers[0]
    spec, cache = layer_spec(group.kv_cache_spec, first), subject.raw_caches[first]
    order = list(subject.raw_caches)
    # with layers outside blocks, a layer's place moves with the number of blocks
    grows = tensor.layer_stride >= tensor.block_stride * subject.num_blocks

    def placed(nbytes: int) -> Any:
        return [nbytes // subject.num_blocks] if grows else nbytes

    strides: list[Any] = [int(stride) for stride in cache.stride()]
    if subject.layout == "LHBNC":
        strides[1] = [strides[1] // subject.num_blocks]
    fields: dict[str, Any] = {
        "engine_group": group_id,
        "spec": type(spec).__name__,
        "layer_names": list(tensor.layers),
        "tokens_per_block": get_tokens_per_block(spec, 1) or int(spec.block_size),
        "slots_per_block": declared_slots(spec),
        "kernel_pages": int(cache.shape[0]) // subject.num_blocks,
        "dtype": str(cache.dtype).removeprefix("torch."),
        "page": [int(length) for length in cache.shape[1:]],
        "strides": strides,
        "page_bytes": int(spec.page_size_bytes),
        "live_bytes": live_page_bytes(spec),
        "first_layer": placed(tensor.offset),
        "layer_step": placed(tensor.layer_stride),
        "registered": [order.index(name) for name in tensor.layers],
    }
    if is_recurrent(spec):
        fields["mamba_cache_mode"] = spec.mamba_cache_mode
    elif window_tokens(spec) > 0:
        fields["window"] = window_tokens(spec)
    return fields
