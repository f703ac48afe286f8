"""Copy specs of LMCache's transfer operation: where its pages and its objects' rows lie.

An LMCache object is `[planes][layers][slots][heads * content]`; our `token_major`. What differs
from a chunk of ours: the object may be longer than what one call fills, planes of unequal width
(tuples of latents) stand side by side in a slot's row, and layers or planes may differ in strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hma_triton.errors import BlockIdError, UnsupportedLayoutError
from hma_triton.kernels.addressing import CopySpec, Int64Array, collapse_runs
from hma_triton.kv_format import LayerPages, PlanePages


@dataclass(frozen=True, slots=True)
class TransferGeometry:
    """Everything about a transfer but its block ids and objects. Bytes and counts.

    An object's base address plus `spec.region_offset_bytes` plus the block's position in the
    object times `object_block_stride_bytes` is what executors take as an object address.
    """

    specs: tuple[CopySpec, ...]
    num_blocks: int
    blocks_per_object: int
    object_block_stride_bytes: int
    object_bytes: int

    def block_addresses(self, object_addresses: Int64Array, start: int, stop: int) -> Int64Array:
        """Address of each of the blocks `start..stop` [stop - start], without a region offset.

        Args:
            object_addresses: [num_objects] base addresses.
            start, stop: positions in the flat sequence of all objects' blocks.
        """
        positions = np.arange(start, stop, dtype=np.int64)
        which, inside = np.divmod(positions, self.blocks_per_object)
        addresses: Int64Array = object_addresses[which] + inside * self.object_block_stride_bytes
        return addresses

    def check_ids(self, block_ids: Int64Array, what: str) -> None:
        """Refuse ids outside the pool.

        Raises:
            BlockIdError: names the first such id, its position and the limit.
        """
        if block_ids.size == 0:
            return
        low, high = int(block_ids.min()), int(block_ids.max())
        if low >= 0 and high < self.num_blocks:
            return
        outside = (block_ids < 0) | (block_ids >= self.num_blocks)
        position = int(np.flatnonzero(outside)[0])
        raise BlockIdError(
            f"{what}: block id {int(block_ids[position])} at position {position} is outside the "
            f"pool of {self.num_blocks} blocks; nothing was copied"
        )


@dataclass(frozen=True, slots=True)
class _Page:
    """One plane of one layer: where its page lies, and where its block 0 lies in an object."""

    place: PlanePages
    object_offset_bytes: int

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """What pages of one copy spec share."""
        place = self.place
        return (
            place.block_stride_bytes,
            place.slot_stride_bytes,
            place.head_stride_bytes,
            place.content_bytes,
        )


def object_row_bytes(pages: Sequence[LayerPages], side_by_side: bool) -> tuple[int, int]:
    """Planes of an object, and bytes of one slot's row in one plane."""
    first = pages[0]
    if first.planar_bytes:
        return 1, sum(first.planar_bytes)
    widths = [first.num_heads * plane.content_bytes for plane in first.planes]
    return (1, sum(widths)) if side_by_side else (len(widths), widths[0])


def _fields(layer: LayerPages, planar_rows: bool) -> list[PlanePages]:
    """What of a layer is copied with one pattern: its planes, or its planar fields."""
    if not layer.planar_bytes:
        return list(layer.planes)
    place, width = layer.planes[0], sum(layer.planar_bytes)
    if not planar_rows:
        # the page as it lies, over the bytes of its slots' rows
        return [PlanePages(place.address, place.block_stride_bytes, width, width, width)]
    fields, start = [], 0
    for field in layer.planar_bytes:
        fields.append(
            PlanePages(
                place.address + layer.num_slots * start,
                place.block_stride_bytes,
                field,
                field,
                field,
            )
        )
        start += field
    return fields


def _pages_of(
    pages: Sequence[LayerPages], object_slots: int, side_by_side: bool, planar_rows: bool
) -> Iterator[_Page]:
    planes, width = object_row_bytes(pages, side_by_side)
    layer_bytes = object_slots * width
    offset = 0
    for index, _ in enumerate(_fields(pages[0], planar_rows)):
        for number, layer in enumerate(pages):
            place = _fields(layer, planar_rows)[index]
            yield _Page(place, offset + number * layer_bytes)
        if planes > 1:
            offset += len(pages) * layer_bytes
        else:
            offset += _fields(pages[0], planar_rows)[index].content_bytes


def _families(pages: Sequence[_Page]) -> Iterator[list[_Page]]:
    """Runs of pages with equal strides whose places in an object are equally far apart."""
    family: list[_Page] = []
    for page in pages:
        fits = not family or page.steps == family[0].steps
        if fits and len(family) > 1:
            step = family[1].object_offset_bytes - family[0].object_offset_bytes
            fits = page.object_offset_bytes - family[-1].object_offset_bytes == step
        if not fits:
            yield family
            family = []
        family.append(page)
    yield family


def _check_alike(pages: Sequence[LayerPages], side_by_side: bool) -> None:
    first = pages[0]
    for number, layer in enumerate(pages):
        same = (
            layer.num_slots == first.num_slots
            and layer.num_heads == first.num_heads
            and layer.num_blocks == first.num_blocks
            and len(layer.planes) == len(first.planes)
            and [p.content_bytes for p in layer.planes] == [p.content_bytes for p in first.planes]
        )
        if not same:
            raise UnsupportedLayoutError(f"layer {number} differs in shape from layer 0")
    widths = {plane.content_bytes for plane in first.planes}
    if len(widths) > 1 and not side_by_side:
        raise UnsupportedLayoutError(f"planes of different widths {sorted(widths)}")


def build_geometry(
    pages: Sequence[LayerPages],
    *,
    object_slots: int,
    blocks_per_object: int,
    side_by_side: bool = False,
    planar_rows: bool = True,
) -> TransferGeometry:
    """Copy specs for objects of `object_slots` slots, of which one call fills the first blocks.

    Args:
        pages: one entry per layer, in the object's order.
        blocks_per_object: blocks of one object, from its start on.
        side_by_side: planes share a slot's row instead of being the object's outermost axis.
        planar_rows: planar pages become slot rows (as LMCache's compiled kernels do); else each
            page is copied as it lies (as its torch operations do).

    Raises:
        UnsupportedLayoutError: layers of different shapes.
    """
    _check_alike(pages, side_by_side)
    first = pages[0]
    planes, width = object_row_bytes(pages, side_by_side)
    specs = []
    for family in _families(list(_pages_of(pages, object_slots, side_by_side, planar_rows))):
        place = family[0].place
        row_step = object_slots * width
        if len(family) > 1:
            row_step = family[1].object_offset_bytes - family[0].object_offset_bytes
        spec = CopySpec(
            kernel_group_index=0,
            row_addresses=tuple(page.place.address for page in family),
            block_stride_bytes=place.block_stride_bytes,
            num_blocks=first.num_blocks,
            region_offset_bytes=family[0].object_offset_bytes,
            object_row_stride_bytes=row_step,
            object_block_stride_bytes=first.num_slots * width,
            blocks_per_object=blocks_per_object,
            n0=first.num_slots,
            pool_stride0_bytes=place.slot_stride_bytes,
            object_stride0_bytes=width,
            n1=first.num_heads,
            pool_stride1_bytes=place.head_stride_bytes,
            object_stride1_bytes=place.content_bytes,
            run_bytes=place.content_bytes,
        )
        specs.append(collapse_runs(spec))
    return TransferGeometry(
        specs=tuple(specs),
        num_blocks=first.num_blocks,
        blocks_per_object=blocks_per_object,
        object_block_stride_bytes=first.num_slots * width,
        object_bytes=planes * len(pages) * object_slots * width,
    )
