"""Who the engine is for the server: its instance, and everything that changes its cached bytes."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm

from hma_triton.group_view import EngineGroupInfo
from hma_triton.integration.vllm.kv_cache_specs import groups_of, layer_spec, spec_kind
from hma_triton.keys import EngineFacts

UNREPEATABLE_HASHES = ("xxhash", "xxhash_cbor")
"""Block hashes that vLLM seeds at random in every process, unless PYTHONHASHSEED is set."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """`instance_id` names this very engine; `model_name` and `facts` go into the keys."""

    instance_id: str
    model_name: str
    facts: EngineFacts
    world_size: int
    dcp_size: int


def hashes_repeat(vllm_config: Any) -> bool:
    """Whether another process computes the same block hashes for the same tokens."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    return algorithm not in UNREPEATABLE_HASHES or os.environ.get("PYTHONHASHSEED") is not None


def instance_id(vllm_config: Any) -> str:
    """The same in all processes of one engine, and in no other engine."""
    engine = vllm_config.kv_transfer_config.engine_id
    return f"{engine}-{vllm_config.instance_id}"


def engine_identity(vllm_config: Any) -> EngineIdentity:
    """The identity of the engine with this config; equal engines differ in `instance_id` alone."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    dcp_size = int(parallel.decode_context_parallel_size)
    extra = {
        "vllm": str(vllm.__version__),
        "dtype": str(model.dtype),
        "config": _digest(model.hf_config.to_json_string()),
        "commit": str(getattr(model.hf_config, "_commit_hash", None)),
        "weights": _weights_digest(str(model.model)),
        "mamba_dtypes": f"{cache.mamba_cache_dtype}/{cache.mamba_ssm_cache_dtype}",
        "block_hash": _block_hash(vllm_config),
        "device": str(vllm_config.device_config.device_type),
    }
    facts = EngineFacts(
        model_revision=str(model.revision or ""),
        quantization=str(model.quantization or ""),
        kv_cache_dtype=str(cache.cache_dtype),
        overrides={"hf_overrides": _digest(repr(model.hf_overrides))},
        dcp_size=dcp_size,
        dcp_interleave=int(getattr(parallel, "cp_kv_cache_interleave_size", 1)),
        attention_backend=",".join(_attention_backends(vllm_config)),
        extra=extra,
    )
    return EngineIdentity(
        instance_id(vllm_config), str(model.model), facts, int(parallel.world_size), dcp_size
    )


def adapter_digest(lora_request: Any) -> bytes:
    """What tells an adapter from one that took its place; empty without one.

    The engine's block hashes hold its name and path, not what lies there: files replaced in place
    are another adapter, for engines that share a server and after a restart.
    """
    if lora_request is None:
        return b""
    return bytes.fromhex(_digest(_weights_digest(str(lora_request.lora_path))))


def replicated_infos(
    kv_cache_config: Any,
    layer_names: Sequence[str],
    infos: Sequence[EngineGroupInfo],
    world_size: int,
) -> tuple[int, ...]:
    """Positions of the infos whose bytes are the same on every tensor-parallel rank."""
    if world_size == 1:
        return ()
    everywhere = int(getattr(kv_cache_config, "kv_tp_replicas", 1)) == world_size
    groups = groups_of(kv_cache_config)
    found = []
    for position, info in enumerate(infos):
        specs = [
            layer_spec(groups[info.engine_group_id].kv_cache_spec, layer_names[index])
            for index in info.layer_indices
        ]
        if all(_is_replicated(spec, everywhere) for spec in specs):
            found.append(position)
    return tuple(found)


def _is_replicated(spec: Any, everywhere: bool) -> bool:
    kind = spec_kind(spec)
    if kind == "mamba":
        return bool(getattr(spec, "tp_replicated", False))
    return everywhere or kind in ("mla_attention", "sliding_window_mla")


def _block_hash(vllm_config: Any) -> str:
    """Names the engine's block hashes: equal names, equal hashes for equal tokens."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if not hashes_repeat(vllm_config):
        return f"{algorithm}/{instance_id(vllm_config)}"
    # The plain algorithms hash pickled values, whose bytes may differ between Python versions.
    version = "" if algorithm.endswith("cbor") else ".".join(platform.python_version_tuple()[:2])
    return f"{algorithm}/{seed}/{version}"


def _attention_backends(vllm_config: Any) -> list[str]:
    """Names of the attention backends that the model's layers took."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    backends: set[Any] = {getattr(layer, "attn_backend", None) for layer in layers}
    return sorted(str(backend.get_name()) for backend in backends - {None})


def _weights_digest(model: str) -> str:
    """Size and time of a local folder's files: weights replaced in place are another model."""
    folder = Path(model)
    if not folder.is_dir():
        return "remote"
    files = [
        f"{path.relative_to(folder)} {path.stat().st_size} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".safetensors", ".bin", ".pt", ".gguf", ".json")
    ]
    return _digest("\n".join(files))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
