"""What can be inspected: a model folder, a saved or packaged geometry, a shape spec."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hma_triton.cli.vllm_model import read_vllm_model
from hma_triton.errors import ConfigError
from hma_triton.geometries import (
    Geometry,
    build_cache_config,
    build_raw_caches,
    load_geometry,
    read_geometry,
)
from hma_triton.group_view import EngineGroupInfo
from hma_triton.integration.vllm.kv_cache_groups import register_from_vllm
from hma_triton.layout_hints import LayoutHints
from hma_triton.shape_spec import format_kvcache_shape_spec, parse_kvcache_shape_spec

# enough blocks to see how layers and blocks nest
PICTURE_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class Registered:
    """Caches as a worker would register them."""

    kv_caches: Mapping[str, torch.Tensor]
    infos: tuple[EngineGroupInfo, ...]
    layout_hints: LayoutHints


@dataclass(frozen=True, slots=True)
class Subject:
    """Caches to look at, on the ``meta`` device; ``kv_cache_config`` None for a shape spec."""

    title: str
    platform: str
    layout: str
    num_blocks: int
    pool_bytes: int
    kv_cache_config: Any
    raw_caches: Mapping[str, torch.Tensor]
    given: Registered | None = None

    def register(self) -> Registered:
        """What would be registered.

        Raises:
            GeometryError: caches that cannot be served, with the reason.
        """
        if self.given is not None:
            return self.given
        result = register_from_vllm(self.kv_cache_config, self.raw_caches)
        return Registered(result.kv_caches, result.infos, result.layout_hints)


def subject_of_target(target: str, variant: str) -> Subject:
    """A model folder, a geometry file, or the name of a packaged geometry.

    Raises:
        ConfigError: none of these, or one that cannot be read.
    """
    path = Path(target)
    if path.is_dir():
        return _of_folder(path)
    if path.is_file():
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return _of_geometry(read_geometry(document, variant))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{path} is no saved geometry: {error!r}") from error
    return _of_geometry(load_geometry(target, variant))


def _of_geometry(geometry: Geometry) -> Subject:
    parallel = geometry.tensor_parallel
    return Subject(
        title=f"{geometry.model} ({geometry.variant})",
        platform=geometry.platform + (f", tensor parallel {parallel}" if parallel > 1 else ""),
        layout=geometry.kv_cache_layout,
        num_blocks=PICTURE_BLOCKS,
        pool_bytes=geometry.bytes_per_block * PICTURE_BLOCKS,
        kv_cache_config=build_cache_config(geometry, PICTURE_BLOCKS),
        raw_caches=build_raw_caches(geometry, PICTURE_BLOCKS, "meta"),
    )


def _of_folder(folder: Path) -> Subject:
    model = read_vllm_model(folder, num_blocks=PICTURE_BLOCKS)
    tensors = list(model.kv_caches.values())
    if not tensors:
        raise ConfigError(f"{folder}: this model registers no cache")
    return Subject(
        title=str(folder),
        platform=model.platform,
        layout=str(model.kv_cache_config.kv_cache_layout),
        num_blocks=int(model.kv_cache_config.num_blocks),
        pool_bytes=tensors[0].untyped_storage().nbytes(),
        kv_cache_config=model.kv_cache_config,
        raw_caches=model.kv_caches,
    )


def subject_of_spec(spec: str) -> Subject:
    """Caches of a shape spec, one after the other, tokens outside heads.

    Raises:
        GeometryError: a spec that does not parse.
    """
    groups = parse_kvcache_shape_spec(spec)
    sizes = [group.layer_page_bytes * group.shape_desc.nb for group in groups]
    pool_bytes = sum(size * g.num_layers for size, g in zip(sizes, groups, strict=True))
    storage = torch.empty(pool_bytes, dtype=torch.int8, device="meta")
    caches: dict[str, torch.Tensor] = {}
    formats: list[str] = []
    start = 0
    for group, size in zip(groups, sizes, strict=True):
        desc = group.shape_desc
        planes = (2,) if desc.kv_size == 2 else ()
        shape = (desc.nb, *planes, desc.bs, desc.nh, desc.hs)
        for layer in group.layer_indices:
            view = storage[start : start + size].view(group.dtype).view(shape)
            caches[f"layer {layer}"] = view
            formats.append("NL_X_NB_TWO_BS_NH_HS" if planes else "NL_X_NB_BS_NH_HS")
            start += size
    infos = tuple(
        EngineGroupInfo(index, group.layer_indices, group.tokens_per_block)
        for index, group in enumerate(groups)
    )
    return Subject(
        title=format_kvcache_shape_spec(groups),
        platform="none: the shape spec says it all",
        layout="NHD",
        num_blocks=min(group.shape_desc.nb for group in groups),
        pool_bytes=pool_bytes,
        kv_cache_config=None,
        raw_caches=caches,
        given=Registered(caches, infos, LayoutHints(kv_layout="NHD", formats=tuple(formats))),
    )
