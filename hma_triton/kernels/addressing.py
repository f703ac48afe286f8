"""Where every byte of a kernel group lies, in the pool and in an object.

A `CopySpec` describes one family of equal pages: base addresses of its rows (one row per layer
and plane), the step from block to block, and the pattern of contiguous runs inside a page on
both sides. Executors (reference, CPU, Triton, DMA) expand it and decide nothing.

For item i, row r, outer run a, inner run b:

    pool   = row_addresses[r] + block_ids[i] * block_stride_bytes
             + a * pool_stride0_bytes + b * pool_stride1_bytes
    object = object_addresses[i] + r * object_row_stride_bytes
             + a * object_stride0_bytes + b * object_stride1_bytes

`object_addresses[i]` holds the object's address, the region's offset and the kept block's place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from hma_triton.errors import UnsupportedLayoutError
from hma_triton.kv_format import LayerPages, PlanePages
from hma_triton.plan import Direction as Direction
from hma_triton.units import align_up

REGION_ALIGN_BYTES = 64

Int64Array = npt.NDArray[np.int64]


class ObjectLayout(str, Enum):
    """Order of the bytes of a region: as the pool has them, or LMCache's token rows."""

    OPAQUE = "opaque"
    TOKEN_MAJOR = "token_major"


@dataclass(frozen=True, slots=True)
class CopySpec:
    """One family of equal pages and their place in an object; all numbers are bytes or counts."""

    kernel_group_index: int
    # address of block 0 of each row, absolute
    row_addresses: tuple[int, ...]
    block_stride_bytes: int
    num_blocks: int
    region_offset_bytes: int
    object_row_stride_bytes: int
    object_block_stride_bytes: int
    blocks_per_object: int
    n0: int
    pool_stride0_bytes: int
    object_stride0_bytes: int
    n1: int
    pool_stride1_bytes: int
    object_stride1_bytes: int
    run_bytes: int

    @property
    def num_rows(self) -> int:
        """Pages that one block id names in this family."""
        return len(self.row_addresses)

    @property
    def page_bytes(self) -> int:
        """Live bytes of one row's page."""
        return self.n0 * self.n1 * self.run_bytes

    @property
    def block_bytes(self) -> int:
        """Live bytes that one block id moves."""
        return self.num_rows * self.page_bytes

    @property
    def pool_extent_bytes(self) -> int:
        """From a page's first byte to one past its last, in the pool."""
        return (
            (self.n0 - 1) * self.pool_stride0_bytes
            + (self.n1 - 1) * self.pool_stride1_bytes
            + self.run_bytes
        )

    @property
    def object_extent_bytes(self) -> int:
        """From `object_addresses[i]` to one past the last byte that one block touches there."""
        return (
            (self.num_rows - 1) * self.object_row_stride_bytes
            + (self.n0 - 1) * self.object_stride0_bytes
            + (self.n1 - 1) * self.object_stride1_bytes
            + self.run_bytes
        )

    @property
    def is_single_run(self) -> bool:
        """Whether a page is one contiguous run on both sides."""
        return self.n0 == 1 and self.n1 == 1

    @property
    def merges_blocks(self) -> bool:
        """Whether neighbouring ids in neighbouring places are one longer run."""
        return (
            self.is_single_run
            and self.block_stride_bytes == self.run_bytes
            and self.object_block_stride_bytes == self.run_bytes
        )


@dataclass(frozen=True, slots=True)
class RegionSpecs:
    """The copy specs of one kernel group and the length of its region in an object."""

    specs: tuple[CopySpec, ...]
    region_bytes: int


def merge_adjacent(
    spec: CopySpec, block_ids: Int64Array, object_addresses: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join neighbours: first ids [m], first addresses [m] and lengths in blocks [m].

    Item i + 1 continues item i where its id and its place both follow directly. Where pages have
    gaps (`not spec.merges_blocks`) every item stays alone.
    """
    count = block_ids.shape[0]
    if count <= 1 or not spec.merges_blocks:
        return block_ids, object_addresses, np.ones(count, dtype=np.int64)
    follows = (np.diff(block_ids) == 1) & (np.diff(object_addresses) == spec.run_bytes)
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    lengths = np.diff(np.append(starts, count))
    return block_ids[starts], object_addresses[starts], lengths


def _page_run_bytes(plane: PlanePages, layer: LayerPages, kernel_group_index: int) -> int:
    """Live bytes of a plane's page, which must be dense.

    Raises:
        UnsupportedLayoutError: a hole between slots or heads of one page.
    """
    axes = sorted(
        [
            (plane.slot_stride_bytes, layer.num_slots),
            (plane.head_stride_bytes, layer.num_heads),
        ]
    )
    expected = plane.content_bytes
    for stride, size in axes:
        if size == 1:
            continue
        if stride != expected:
            raise UnsupportedLayoutError(
                f"kernel group {kernel_group_index}: a page of {layer.num_slots} slots x "
                f"{layer.num_heads} heads x {plane.content_bytes} bytes has a stride of {stride} "
                f"bytes where {expected} would be dense; interior padding cannot be served"
            )
        expected *= size
    return expected


def _opaque_rows(
    pages: Sequence[LayerPages], plane_bytes: Sequence[int]
) -> list[tuple[list[int], int, int]]:
    """Streams of (row addresses, page bytes, block stride); planes that adjoin in a block merge."""
    first = pages[0]
    uniform = len(set(plane_bytes)) == 1 and (
        len({plane.block_stride_bytes for plane in first.planes}) == 1
    )
    if not uniform:
        return [
            (
                [layer.planes[index].address for layer in pages],
                plane_bytes[index],
                first.planes[index].block_stride_bytes,
            )
            for index in range(len(first.planes))
        ]
    run, stride, count = plane_bytes[0], first.planes[0].block_stride_bytes, len(first.planes)
    adjoining = count * run <= stride and all(
        layer.planes[i + 1].address - layer.planes[i].address == run
        for layer in pages
        for i in range(count - 1)
    )
    if adjoining:
        return [([layer.planes[0].address for layer in pages], run * count, stride)]
    return [([plane.address for layer in pages for plane in layer.planes], run, stride)]


def _opaque_specs(
    kernel_group_index: int, pages: Sequence[LayerPages], blocks: int
) -> tuple[list[CopySpec], int]:
    first = pages[0]
    plane_bytes = [_plane_page_bytes(plane, first, kernel_group_index) for plane in first.planes]
    specs: list[CopySpec] = []
    offset = 0
    for addresses, page, stride in _opaque_rows(pages, plane_bytes):
        rows = len(addresses)
        size = rows * blocks * page
        block_outermost = rows > 1 and max(addresses) - min(addresses) + page <= stride
        if block_outermost and all(
            following - address == page for address, following in pairwise(addresses)
        ):
            addresses, page, rows = addresses[:1], page * rows, 1
        specs.append(
            CopySpec(
                kernel_group_index=kernel_group_index,
                row_addresses=tuple(addresses),
                block_stride_bytes=stride,
                num_blocks=first.num_blocks,
                region_offset_bytes=offset,
                object_row_stride_bytes=page if block_outermost else blocks * page,
                object_block_stride_bytes=rows * page if block_outermost else page,
                blocks_per_object=blocks,
                n0=1,
                pool_stride0_bytes=page,
                object_stride0_bytes=page,
                n1=1,
                pool_stride1_bytes=page,
                object_stride1_bytes=page,
                run_bytes=page,
            )
        )
        offset += size
    return specs, offset


def _plane_page_bytes(plane: PlanePages, layer: LayerPages, kernel_group_index: int) -> int:
    if layer.planar_bytes:
        return layer.num_slots * sum(layer.planar_bytes)
    return _page_run_bytes(plane, layer, kernel_group_index)


def collapse_runs(spec: CopySpec) -> CopySpec:
    """Drop run axes of length one and join runs that are contiguous on both sides."""
    if spec.n1 > 1 and spec.pool_stride1_bytes == spec.object_stride1_bytes == spec.run_bytes:
        spec = replace(spec, n1=1, run_bytes=spec.n1 * spec.run_bytes)
    joins = spec.pool_stride0_bytes == spec.object_stride0_bytes == spec.run_bytes
    if spec.n1 == 1 and spec.n0 > 1 and joins:
        spec = replace(spec, n0=1, run_bytes=spec.n0 * spec.run_bytes)
    if spec.n1 == 1:
        spec = replace(spec, pool_stride1_bytes=spec.run_bytes, object_stride1_bytes=spec.run_bytes)
    if spec.n0 == 1:
        extent = spec.n1 * spec.run_bytes
        spec = replace(spec, pool_stride0_bytes=extent, object_stride0_bytes=extent)
    return spec


def _token_major_specs(
    kernel_group_index: int, pages: Sequence[LayerPages], blocks: int
) -> tuple[list[CopySpec], int]:
    """Token rows `[plane][layer][slot][heads * content]`, LMCache's order.

    Planes of one latent (latent, rope, indexer key) and planar fields (values, scales) stand side
    by side in a token's row; K and V are outermost.
    """
    first = pages[0]
    slots, heads, layers = first.num_slots, first.num_heads, len(pages)
    if first.planar_bytes:
        widths = list(first.planar_bytes)
        offsets = [slots * sum(widths[:i]) for i in range(len(widths))]
        streams = [
            ([layer.planes[0].address + offsets[i] for layer in pages], first.planes[0], width)
            for i, width in enumerate(widths)
        ]
    elif first.planes_share_rows:
        widths = [heads * plane.content_bytes for plane in first.planes]
        streams = [
            ([layer.planes[i].address for layer in pages], plane, plane.content_bytes)
            for i, plane in enumerate(first.planes)
        ]
    else:
        plane = first.planes[0]
        widths = [heads * plane.content_bytes]
        rows = [layer.planes[p].address for p in range(len(first.planes)) for layer in pages]
        streams = [(rows, plane, plane.content_bytes)]
        layers = len(rows)
    row_width = sum(widths)
    specs: list[CopySpec] = []
    for index, (addresses, plane, content) in enumerate(streams):
        if not first.planar_bytes:
            _page_run_bytes(plane, first, kernel_group_index)
        spec = CopySpec(
            kernel_group_index=kernel_group_index,
            row_addresses=tuple(addresses),
            block_stride_bytes=plane.block_stride_bytes,
            num_blocks=first.num_blocks,
            region_offset_bytes=sum(widths[:index]),
            object_row_stride_bytes=blocks * slots * row_width,
            object_block_stride_bytes=slots * row_width,
            blocks_per_object=blocks,
            n0=slots,
            pool_stride0_bytes=content if first.planar_bytes else plane.slot_stride_bytes,
            object_stride0_bytes=row_width,
            n1=heads,
            pool_stride1_bytes=plane.head_stride_bytes,
            object_stride1_bytes=content,
            run_bytes=content,
        )
        specs.append(collapse_runs(spec))
    return specs, layers * blocks * slots * row_width


def build_region(
    kernel_group_index: int,
    pages: Sequence[LayerPages],
    blocks_per_object: int,
    object_layout: ObjectLayout,
    region_offset_bytes: int = 0,
) -> RegionSpecs:
    """Copy specs of one kernel group whose layers lie at `pages` (registration order).

    Args:
        blocks_per_object: blocks of a chunk that an object keeps (`plan.kept_blocks`).
        region_offset_bytes: where the region starts in its object.

    Raises:
        UnsupportedLayoutError: pages with interior padding.
    """
    make = _opaque_specs if object_layout is ObjectLayout.OPAQUE else _token_major_specs
    specs, size = make(kernel_group_index, pages, blocks_per_object)
    return RegionSpecs(
        specs=tuple(
            replace(spec, region_offset_bytes=spec.region_offset_bytes + region_offset_bytes)
            for spec in specs
        ),
        region_bytes=size,
    )


def next_region_offset(offset_bytes: int) -> int:
    """Where the next kernel group's region may start in an object."""
    return align_up(offset_bytes, REGION_ALIGN_BYTES)
