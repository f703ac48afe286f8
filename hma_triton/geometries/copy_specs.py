"""The copy specs that known geometries need, without their pools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hma_triton.copy_layout import lay_out
from hma_triton.engine import group_caches
from hma_triton.errors import GeometryError
from hma_triton.geometries import build_pool, list_geometries, list_variants, load_geometry
from hma_triton.kernels.addressing import CopySpec, ObjectLayout
from hma_triton.plan import choose_chunk_tokens


@dataclass(frozen=True, slots=True)
class GeometrySpec:
    """One copy spec of one model; `row_addresses` are offsets from the start of its pool."""

    model: str
    variant: str
    object_layout: ObjectLayout
    spec: CopySpec
    # bytes of the whole pool that `spec` was read off
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A variant that cannot be served, and why."""

    model: str
    variant: str
    reason: str


def geometry_specs(
    model: str, variant: str, object_layout: ObjectLayout, num_blocks: int = 3
) -> tuple[GeometrySpec, ...]:
    """Copy specs of one variant over a pool of `num_blocks` blocks, chunk chosen as `auto` does.

    Raises:
        ConfigError: no such model or variant.
        GeometryError: a variant that cannot be served.
    """
    geometry = load_geometry(model, variant)
    # without memory: addresses are offsets from zero
    caches, infos, hints = build_pool(geometry, num_blocks, "meta")
    chunk_tokens = choose_chunk_tokens(
        [info.tokens_per_block for info in infos], any(info.recurrent_state for info in infos)
    )
    _, manager = group_caches(caches, infos, layout_hints=hints, chunk_tokens=chunk_tokens)
    return tuple(
        GeometrySpec(model, variant, object_layout, spec, geometry.bytes_per_block * num_blocks)
        for specs in lay_out(manager, object_layout, 0).specs
        for spec in specs
    )


def all_geometry_specs(
    models: tuple[str, ...] = (), object_layouts: tuple[ObjectLayout, ...] = tuple(ObjectLayout)
) -> Iterator[GeometrySpec | Refused]:
    """Specs of every variant of `models` (all when empty) in every object layout.

    Raises:
        ConfigError: no such model.
    """
    for model in models or list_geometries():
        for variant in list_variants(model):
            try:
                for object_layout in object_layouts:
                    yield from geometry_specs(model, variant, object_layout)
            except GeometryError as error:
                yield Refused(model, variant, str(error))
