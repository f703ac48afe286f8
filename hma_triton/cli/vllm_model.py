"""The caches that the installed vLLM would register for a model, without loading a weight.

vLLM builds the model's modules without storage (torch's ``meta`` device), collects what each
layer declares, and resolves layout, groups and tensors with its own code. What comes out is the
layout of the platform that this vLLM runs on: a CPU build does not show a GPU's.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hma_triton.errors import ConfigError
from hma_triton.integration.vllm.kv_cache_specs import layer_spec

# enough for any request that the model allows; nothing of it is allocated
_POOL_BYTES = 1 << 44
# how vLLM and transformers say that they do not know a model or what its config means
_UNBUILDABLE = (
    ValueError,
    RuntimeError,
    OSError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
)


@dataclass(frozen=True, slots=True)
class ModelCaches:
    """vLLM's cache config, the caches by layer name on the ``meta`` device, and the platform."""

    kv_cache_config: Any
    kv_caches: dict[str, torch.Tensor]
    platform: str


def read_vllm_model(folder: Path, num_blocks: int) -> ModelCaches:
    """Caches of ``num_blocks`` blocks for the model in ``folder`` (a ``config.json`` will do).

    Raises:
        ConfigError: no ``config.json``, or a model that this vLLM cannot build; with its reason.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: no config.json; a model folder in vLLM's form has one")
    # a look at a layout needs no telemetry, no hub, and no log of an engine that never starts
    for name, value in (
        ("VLLM_LOGGING_LEVEL", "ERROR"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("TRANSFORMERS_OFFLINE", "1"),
    ):
        os.environ.setdefault(name, value)
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    try:
        config = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",
            enforce_eager=True,
        ).create_engine_config()
        with set_current_vllm_config(config), tempfile.TemporaryDirectory() as scratch:
            _join_world_of_one(Path(scratch) / "rendezvous")
            return ModelCaches(*_resolve(config, num_blocks), _platform_name(current_platform))
    except _UNBUILDABLE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{folder}: vLLM cannot build this model: {reason}") from error


def _join_world_of_one(rendezvous: Path) -> None:
    """Parallel layers ask for their group, so there is one of this process alone."""
    from vllm.distributed import (
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"file://{rendezvous}",
        backend="gloo",
    )
    ensure_model_parallel_initialized(1, 1)


def _resolve(config: Any, num_blocks: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Specs, layout, groups and tensors, in the order of vLLM's own start-up."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import (
        get_supported_kv_cache_layouts,
        resolve_kv_cache_layout,
    )
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

    with torch.device("meta"):
        initialize_model(config)
    current_platform.update_block_size_for_backend(config)
    layers = get_layers_from_vllm_config(config, AttentionLayerBase)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    specs = {name: spec for name, spec in specs.items() if spec is not None}
    names = [
        each.name for each in get_supported_kv_cache_layouts(get_current_attn_backends(config))
    ]
    layout = resolve_kv_cache_layout(config, [names], list(specs.values()))
    roomy = get_kv_cache_configs(config, [specs], [_POOL_BYTES])[0]
    kv_cache_config = _shrink(roomy, num_blocks)
    kv_cache_config.kv_cache_layout = layout.name
    kernel_blocks = prepare_kernel_block_sizes(kv_cache_config, _backends(kv_cache_config, layers))
    meta = torch.device("meta")
    return kv_cache_config, allocate_kv_cache(kv_cache_config, meta, layout, kernel_blocks)


def _backends(kv_cache_config: Any, layers: Any) -> list[list[SimpleNamespace]]:
    """Per group, what chooses its kernel block: each layer's backend and spec."""
    return [
        [
            SimpleNamespace(
                backend=layers[name].get_attn_backend(),
                kv_cache_spec=layer_spec(group.kv_cache_spec, name),
            )
            for name in group.layer_names
        ]
        for group in kv_cache_config.kv_cache_groups
    ]


def _shrink(config: Any, num_blocks: int) -> Any:
    """The config with ``num_blocks`` blocks instead of as many as fit into the memory.

    Where layers lie outside blocks, the step between layers and a set's start grow with the
    blocks; where blocks lie outside layers, neither does.
    """
    tensors = []
    for tensor in config.kv_cache_tensors:
        grows = tensor.layer_stride >= tensor.block_stride * config.num_blocks
        step, start = tensor.layer_stride, tensor.offset
        if grows:
            step = step // config.num_blocks * num_blocks
            start = start // config.num_blocks * num_blocks
        size = tensor.size // config.num_blocks * num_blocks
        tensors.append(replace(tensor, size=size, layer_stride=step, offset=start))
    return replace(config, num_blocks=num_blocks, kv_cache_tensors=tensors)


def _platform_name(platform: Any) -> str:
    from vllm import __version__ as vllm_version

    return f"vLLM {vllm_version} on {platform.device_name or platform.device_type}"
