"""Every page shape of the real models, through reference and CPU copy, in both object layouts.

Pools have few blocks but pages of full size; of many equal layers the first and the last are
copied. Shapes that several models share are copied once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from support.guarded_memory import GuardedBuffer
from support.prepared import Prepared

from hma_triton.engine import TransferEngine
from hma_triton.errors import UnsupportedLayoutError
from hma_triton.geometries import (
    Geometry,
    build_pool,
    list_geometries,
    list_variants,
    load_geometry,
)
from hma_triton.kernels.addressing import REGION_ALIGN_BYTES, CopySpec, Direction
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kernels.reference import ReferenceCopier
from hma_triton.plan import choose_chunk_tokens
from hma_triton.units import align_up

NUM_BLOCKS = 3
BLOCK_IDS = np.array([2, 0], dtype=np.int64)
MARGIN = 256
Bytes = npt.NDArray[np.uint8]
# layouts in which a block is one piece per head
FRAGMENTED = ("LHBNC", "BHLNC")


@dataclass(frozen=True)
class Shape:
    """A copy spec without its place: row addresses are relative to the first."""

    spec: CopySpec
    seen_in: str


def _few_rows(spec: CopySpec) -> CopySpec:
    """First and last row, relative to the lower."""
    rows = (spec.row_addresses[0], spec.row_addresses[-1])[: spec.num_rows]
    base = min(rows)
    return replace(
        spec,
        kernel_group_index=0,
        row_addresses=tuple(row - base for row in rows),
        region_offset_bytes=0,
        num_blocks=NUM_BLOCKS,
        object_row_stride_bytes=spec.object_row_stride_bytes if len(rows) > 1 else 0,
    )


def _refusal(geometry: Geometry) -> str:
    """What the refusal of a variant says; empty for those that are served."""
    if geometry.kv_cache_layout in FRAGMENTED:
        return geometry.kv_cache_layout
    if any(group.mamba_cache_mode == "none" for group in geometry.groups):
        return "keeps no state snapshots"
    return ""


@cache
def shapes_of(model: str) -> tuple[Shape, ...]:
    """Distinct copy specs over all variants that can be served."""
    found: dict[CopySpec, str] = {}
    for variant in list_variants(model):
        geometry = load_geometry(model, variant)
        refused = _refusal(geometry)
        if refused:
            with pytest.raises(UnsupportedLayoutError, match=refused):
                build_pool(geometry, NUM_BLOCKS)
            continue
        caches, infos, hints = build_pool(geometry, NUM_BLOCKS)
        chunk = choose_chunk_tokens(
            [info.tokens_per_block for info in infos], any(i.recurrent_state for i in infos)
        )
        for object_layout in ("opaque", "token_major"):
            engine = TransferEngine(
                caches,
                infos,
                layout_hints=hints,
                chunk_tokens=chunk,
                object_layout=object_layout,
                backend="reference",
            )
            for spec in engine.copy_specs:
                found.setdefault(_few_rows(spec), f"{model}/{variant}, {object_layout}")
    return tuple(Shape(spec, seen) for spec, seen in found.items())


class Pages:
    """The pages of a shape, wherever they are, with what surrounds them."""

    def __init__(self, spec: CopySpec) -> None:
        self.spec = spec
        last = max(spec.row_addresses) + (NUM_BLOCKS - 1) * spec.block_stride_bytes
        self.buffer = GuardedBuffer(last + spec.pool_extent_bytes)
        self.placed = replace(
            spec, row_addresses=tuple(row + self.buffer.address for row in spec.row_addresses)
        )

    def windows(self) -> Iterator[Bytes]:
        """Each page with a margin, as memory."""
        live = self.buffer.live
        for row in self.spec.row_addresses:
            for block in range(NUM_BLOCKS):
                start = row + block * self.spec.block_stride_bytes
                end = start + self.spec.pool_extent_bytes + MARGIN
                yield live[max(0, start - MARGIN) : end]

    def write(self, seed: int) -> None:
        noise = np.random.default_rng(seed).integers(0, 256, 1 << 16, dtype=np.uint8)
        for window in self.windows():
            window[:] = np.resize(noise, window.shape)

    def close(self) -> None:
        self.buffer.close()


def object_step(spec: CopySpec) -> int:
    """Each block has an object of its own: of a chunk with one block, the next place is none."""
    return align_up(spec.object_extent_bytes, REGION_ALIGN_BYTES)


@pytest.mark.parametrize("model", list_geometries())
def test_every_page_of_a_model(model: str) -> None:
    copier = CpuCopier(threads=2)
    shapes = shapes_of(model)
    assert shapes
    for shape in shapes:
        _check_shape(copier, shape)
    copier.close()


def _check_shape(copier: CpuCopier, shape: Shape) -> None:
    spec = shape.spec
    pages, twin = Pages(spec), Pages(spec)
    held = [GuardedBuffer(len(BLOCK_IDS) * object_step(spec), at_end=True) for _ in range(2)]
    steps = np.arange(len(BLOCK_IDS), dtype=np.int64) * object_step(spec)
    executors = (Prepared(copier), ReferenceCopier())
    try:
        for side in (pages, twin):
            side.write(seed=1)
        for executor, side, buffer in zip(executors, (pages, twin), held, strict=True):
            buffer.live[:] = 0xEE
            executor.copy_blocks(side.placed, Direction.STORE, BLOCK_IDS, buffer.address + steps)
        assert np.array_equal(held[0].live, held[1].live), f"store: {shape}"
        for buffer in held:
            buffer.live[:] = np.resize(np.arange(251, dtype=np.uint8), buffer.nbytes)
        for executor, side, buffer in zip(executors, (pages, twin), held, strict=True):
            executor.copy_blocks(side.placed, Direction.RETRIEVE, BLOCK_IDS, buffer.address + steps)
        for found, expected in zip(pages.windows(), twin.windows(), strict=True):
            assert np.array_equal(found, expected), f"retrieve: {shape}"
    finally:
        for memory in (pages, twin, *held):
            memory.close()
