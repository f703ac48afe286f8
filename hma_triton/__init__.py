"""Transfer engine for the hybrid paged KV caches of serving engines.

The names below are importable from here and from the module that defines them. They load when
asked for, so that the command line starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hma_triton.detection import normalize_and_discover_per_layer_formats
    from hma_triton.engine import TransferEngine, TransferResult
    from hma_triton.errors import HmaError
    from hma_triton.group_view import (
        EXCLUDED_ENGINE_GROUP,
        EngineGroupInfo,
        engine_group_layer_indices,
        expand_engine_block_ids,
        get_engine_group_indices,
        num_engine_group_infos,
        num_engine_groups,
        slice_block_ids_per_group,
    )
    from hma_triton.kv_format import EngineKVFormat
    from hma_triton.kv_layer_groups import (
        KernelGroupIdentity,
        KernelGroupInfo,
        KVLayerGroupInfo,
        KVLayerGroupsManager,
        ObjectGroupInfo,
        PageBufferShapeDesc,
        group_layers_by_identity,
    )
    from hma_triton.layout_hints import LayoutHints
    from hma_triton.shape_spec import format_kvcache_shape_spec, parse_kvcache_shape_spec

_HOMES = {
    "detection": ("normalize_and_discover_per_layer_formats",),
    "engine": ("TransferEngine", "TransferResult"),
    "errors": ("HmaError",),
    "group_view": (
        "EXCLUDED_ENGINE_GROUP",
        "EngineGroupInfo",
        "engine_group_layer_indices",
        "expand_engine_block_ids",
        "get_engine_group_indices",
        "num_engine_group_infos",
        "num_engine_groups",
        "slice_block_ids_per_group",
    ),
    "kv_format": ("EngineKVFormat",),
    "kv_layer_groups": (
        "KVLayerGroupInfo",
        "KVLayerGroupsManager",
        "KernelGroupIdentity",
        "KernelGroupInfo",
        "ObjectGroupInfo",
        "PageBufferShapeDesc",
        "group_layers_by_identity",
    ),
    "layout_hints": ("LayoutHints",),
    "shape_spec": ("format_kvcache_shape_spec", "parse_kvcache_shape_spec"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "EXCLUDED_ENGINE_GROUP",
    "EngineGroupInfo",
    "EngineKVFormat",
    "HmaError",
    "KVLayerGroupInfo",
    "KVLayerGroupsManager",
    "KernelGroupIdentity",
    "KernelGroupInfo",
    "LayoutHints",
    "ObjectGroupInfo",
    "PageBufferShapeDesc",
    "TransferEngine",
    "TransferResult",
    "engine_group_layer_indices",
    "expand_engine_block_ids",
    "format_kvcache_shape_spec",
    "get_engine_group_indices",
    "group_layers_by_identity",
    "normalize_and_discover_per_layer_formats",
    "num_engine_group_infos",
    "num_engine_groups",
    "parse_kvcache_shape_spec",
    "slice_block_ids_per_group",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
