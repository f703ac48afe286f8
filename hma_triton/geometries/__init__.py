"""Cache geometries of real models under vLLM 0.32, and pools that have them.

The files beside this module were read off vLLM's own code: it built each model without weights
and said which tensors it would register (``how`` in a file says whether an engine also ran). A
model has variants: ``main`` (H100, one GPU), ``cpu``, ``cuda100``, other layouts and sizes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from hma_triton.errors import ConfigError
from hma_triton.geometries import stand_ins
from hma_triton.group_view import EngineGroupInfo
from hma_triton.integration.vllm.kv_cache_groups import register_from_vllm
from hma_triton.layout_hints import LayoutHints

__all__ = [
    "Geometry",
    "GroupGeometry",
    "build_cache_config",
    "build_pool",
    "build_raw_caches",
    "list_geometries",
    "list_variants",
    "load_geometry",
    "read_geometry",
]


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """Layers of one engine group that look alike.

    ``page`` is the registered shape without its first axis; a block is ``kernel_pages`` rows of
    that axis. A size given as ``(number, per_block)`` grows with the pool when ``per_block``.
    """

    engine_group_id: int
    spec_class: str
    layer_names: tuple[str, ...]
    registered_indices: tuple[int, ...]
    tokens_per_block: int
    slots_per_block: int
    kernel_pages: int
    dtype: torch.dtype
    page: tuple[int, ...]
    stride_elems: tuple[tuple[int, bool], ...]
    page_bytes: int
    live_bytes: int
    first_layer: tuple[int, bool]
    layer_step: tuple[int, bool]
    window_tokens: int | None
    mamba_cache_mode: str | None


@dataclass(frozen=True, slots=True)
class Geometry:
    """One model on one platform; ``shared_layers`` use the cache of another layer (by index)."""

    model: str
    variant: str
    platform: str
    kv_cache_layout: str
    cache_dtype: str
    tensor_parallel: int
    hit_alignment_tokens: int
    bytes_per_block: int
    groups: tuple[GroupGeometry, ...]
    shared_layers: Mapping[int, int]
    num_registered: int


def list_geometries() -> list[str]:
    """Names of all models, ascending."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json"))


def list_variants(name: str) -> list[str]:
    """Variants of a model, ``main`` first.

    Raises:
        ConfigError: no such model.
    """
    return list(_document(_file_name(name))["variants"])


def load_geometry(name: str, variant: str = "main") -> Geometry:
    """A model's geometry; ``name`` may leave out the publisher and part of the name's end.

    Raises:
        ConfigError: no such model or variant, or a name that fits several models.
    """
    return read_geometry(_document(_file_name(name)), variant)


@cache
def _document(file_name: str) -> dict[str, Any]:
    text = resources.files(__name__).joinpath(f"{file_name}.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def _file_name(name: str) -> str:
    known = list_geometries()
    wanted = name.split("/")[-1].lower().replace("_", "-")
    fitting = [wanted] if wanted in known else [file for file in known if file.startswith(wanted)]
    if len(fitting) != 1:
        raise ConfigError(
            f"model {name!r} fits {fitting or 'no geometry'}; there are {', '.join(known)}"
        )
    return fitting[0]


def read_geometry(document: Mapping[str, Any], variant: str = "main") -> Geometry:
    """A geometry from a parsed file.

    Raises:
        ConfigError: no such variant.
    """
    variants = document["variants"]
    if variant not in variants:
        raise ConfigError(
            f"{document['model']} has no variant {variant!r}; it has {', '.join(variants)}"
        )
    fields = variants[variant]
    return Geometry(
        model=document["model"],
        variant=variant,
        platform=fields["platform"],
        kv_cache_layout=fields["kv_cache_layout"],
        cache_dtype=fields["cache_dtype"],
        tensor_parallel=fields["tensor_parallel"],
        hit_alignment_tokens=fields["hit_alignment_tokens"],
        bytes_per_block=fields["bytes_per_block"],
        groups=tuple(_read_group(group) for group in fields["groups"]),
        shared_layers={int(k): v for k, v in document["shared_layers"].items()},
        num_registered=fields["num_registered"],
    )


def _read_group(fields: Mapping[str, Any]) -> GroupGeometry:
    return GroupGeometry(
        engine_group_id=fields["engine_group"],
        spec_class=fields["spec"],
        layer_names=_layer_names(fields),
        registered_indices=_indices(fields["registered"]),
        tokens_per_block=fields["tokens_per_block"],
        slots_per_block=fields["slots_per_block"],
        kernel_pages=fields["kernel_pages"],
        dtype=getattr(torch, fields["dtype"]),
        page=tuple(fields["page"]),
        stride_elems=tuple(_size(stride) for stride in fields["strides"]),
        page_bytes=fields["page_bytes"],
        live_bytes=fields["live_bytes"],
        first_layer=_size(fields["first_layer"]),
        layer_step=_size(fields["layer_step"]),
        window_tokens=fields.get("window"),
        mamba_cache_mode=fields.get("mamba_cache_mode"),
    )


def _layer_names(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Names one by one, or a pattern and the numbers in it."""
    if "layer_names" in fields:
        return tuple(fields["layer_names"])
    return tuple(fields["names"].format(i=i) for i in _indices(fields["layers"]))


def _indices(value: Any) -> tuple[int, ...]:
    """A list, or a run given by its ends and step."""
    if isinstance(value, Mapping):
        return tuple(range(value["from"], value["to"] + 1, value["step"]))
    return tuple(value)


def _size(value: Any) -> tuple[int, bool]:
    """A number, or a list of one number that is multiplied by the pool's blocks."""
    return (value[0], True) if isinstance(value, list) else (value, False)


def build_cache_config(geometry: Geometry, num_blocks: int) -> stand_ins.KVCacheConfig:
    """The engine's cache config for this geometry, as stand-ins that need no vLLM."""
    by_group: dict[int, list[GroupGeometry]] = {}
    for group in geometry.groups:
        by_group.setdefault(group.engine_group_id, []).append(group)
    specs = [_group_spec(parts) for _, parts in sorted(by_group.items())]
    return stand_ins.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_groups=specs, kv_cache_layout=geometry.kv_cache_layout
    )


def _group_spec(parts: list[GroupGeometry]) -> stand_ins.KVCacheGroupSpec:
    names = [name for part in parts for name in part.layer_names]
    if len(parts) == 1:
        return stand_ins.KVCacheGroupSpec(layer_names=names, kv_cache_spec=_spec(parts[0]))
    uniform = stand_ins.UniformTypeKVCacheSpecs(
        block_size=parts[0].tokens_per_block,
        kv_cache_specs={name: _spec(part) for part in parts for name in part.layer_names},
    )
    return stand_ins.KVCacheGroupSpec(layer_names=names, kv_cache_spec=uniform)


def _spec(group: GroupGeometry) -> Any:
    if group.mamba_cache_mode is not None:
        return stand_ins.MambaSpec(
            block_size=group.tokens_per_block,
            shapes=((group.live_bytes,),),
            dtypes=(torch.int8,),
            page_size_bytes=group.page_bytes,
            mamba_cache_mode=group.mamba_cache_mode,
        )
    extra: dict[str, Any] = {}
    if group.window_tokens is not None:
        chunked = group.spec_class == "ChunkedLocalAttentionSpec"
        extra["attention_chunk_size" if chunked else "sliding_window"] = group.window_tokens
    return getattr(stand_ins, group.spec_class)(
        block_size=group.tokens_per_block,
        num_kv_heads=group.page[0],
        head_size=group.page[-1],
        dtype=group.dtype,
        num_states=group.slots_per_block,
        unpadded_page_size_bytes=group.live_bytes,
        page_size_bytes=group.page_bytes,
        **extra,
    )


def build_raw_caches(
    geometry: Geometry, num_blocks: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """The tensors that vLLM registers, by layer name and in its order, over one storage of zeros.

    All groups lie over each other in the storage, as vLLM has them: a block id belongs to one
    group at a time.
    """
    storage = torch.zeros(geometry.bytes_per_block * num_blocks, dtype=torch.int8, device=device)
    placed: dict[int, tuple[str, torch.Tensor]] = {}
    for group in geometry.groups:
        for position, name in enumerate(group.layer_names):
            offset = _resolved(group.first_layer, num_blocks)
            offset += position * _resolved(group.layer_step, num_blocks)
            view = storage.view(group.dtype) if group.dtype != torch.int8 else storage
            cache_view = view.as_strided(
                (num_blocks * group.kernel_pages, *group.page),
                tuple(_resolved(stride, num_blocks) for stride in group.stride_elems),
                offset // group.dtype.itemsize,
            )
            placed[group.registered_indices[position]] = (name, cache_view)
    caches = {name: tensor for _, (name, tensor) in sorted(placed.items())}
    names = list(caches)
    for layer, owner in sorted(geometry.shared_layers.items()):
        # names differ in the layer's number only
        owner_name = next(n for n in names if f".{owner}." in f".{n}.")
        caches[owner_name.replace(f".{owner}.", f".{layer}.")] = caches[owner_name]
    return caches


def _resolved(size: tuple[int, bool], num_blocks: int) -> int:
    return size[0] * num_blocks if size[1] else size[0]


def build_pool(
    geometry: Geometry, num_blocks: int, device: torch.device | str = "cpu"
) -> tuple[dict[str, torch.Tensor], tuple[EngineGroupInfo, ...], LayoutHints]:
    """Zeroed caches of this geometry as a worker registers them: (caches, infos, hints).

    Raises:
        GeometryError: a variant that cannot be served, with the reason.
    """
    registration = register_from_vllm(
        build_cache_config(geometry, num_blocks), build_raw_caches(geometry, num_blocks, device)
    )
    return registration.kv_caches, registration.infos, registration.layout_hints
