"""Where pages lie, from what LMCache hands its operation: raw pointers, or the tensors themselves.

The meaning of a pointer list, of every format's tensor shape and of `PageBufferShapeDesc` is that
of LMCache 0.5.6 (its format specs and torch operations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hma_triton.errors import UnsupportedLayoutError
from hma_triton.kv_format import (
    FORMAT_ROWS,
    EngineKVFormat,
    FormatRow,
    LayerPages,
    PlanePages,
    layer_pages,
)

_SPLIT_CONTENT = {
    EngineKVFormat.NL_X_NB_NH_BS_CS: EngineKVFormat.NL_X_NB_NH_BS_TWO_HS,
    EngineKVFormat.NL_X_NB_BS_NH_CS: EngineKVFormat.NL_X_NB_BS_NH_TWO_HS,
}
_PACKED_CONTENT = {split: packed for packed, split in _SPLIT_CONTENT.items()}


@dataclass(frozen=True, slots=True)
class PagedShape:
    """The integers of a `PageBufferShapeDesc`. `head_elements` counts packed K and V together.

    `block_stride_elems` is 0 where the descriptor leaves the step between blocks to the format.
    """

    num_layers: int
    num_blocks: int
    slots_per_block: int
    num_heads: int
    head_elements: int
    element_bytes: int
    block_stride_elems: int

    @classmethod
    def from_desc(cls, desc: Any) -> PagedShape:
        """Read LMCache's descriptor."""
        return cls(
            int(desc.nl),
            int(desc.nb),
            int(desc.bs),
            int(desc.nh),
            int(desc.hs),
            int(desc.element_size),
            int(desc.block_stride_elems or 0),
        )


def is_side_by_side(fmt: EngineKVFormat) -> bool:
    """Whether the planes of a layer share a slot's row in an object."""
    return FORMAT_ROWS[fmt].lists[-1:] == ("NP",)


def pointer_count(fmt: EngineKVFormat, num_layers: int) -> int:
    """Pointers that LMCache gives for `num_layers` layers.

    Raises:
        UnsupportedLayoutError: tuples of latents, whose number of planes no descriptor holds.
    """
    row = FORMAT_ROWS[fmt]
    if row.is_cross_layer:
        return 1
    if is_side_by_side(fmt):
        raise UnsupportedLayoutError("pointers do not say the widths of a tuple's planes")
    return num_layers * (2 if "TWO" in row.lists else 1)


def pages_from_pointers(
    fmt: EngineKVFormat, shape: PagedShape, pointers: Sequence[int]
) -> list[LayerPages]:
    """Pages of every layer of a group whose tensors start at `pointers`.

    Raises:
        UnsupportedLayoutError: a number of pointers that does not fit, a null pointer, or a
            block step that the format's pointers cannot have.
    """
    row = FORMAT_ROWS[fmt]
    expected = pointer_count(fmt, shape.num_layers)
    if len(pointers) != expected:
        raise UnsupportedLayoutError(
            f"{len(pointers)} pointers for {shape.num_layers} layers, where {expected} belong"
        )
    if 0 in pointers:
        raise UnsupportedLayoutError("a null pointer among the pools")
    steps = _dense_steps(row, shape)
    if shape.block_stride_elems:
        _widen_blocks(row, shape, steps)
    content = shape.head_elements * shape.element_bytes

    def plane(address: int) -> PlanePages:
        return PlanePages(
            address=address,
            block_stride_bytes=steps["NB"],
            slot_stride_bytes=steps["BS"],
            head_stride_bytes=steps.get("NH", content),
            content_bytes=content,
        )

    return [
        LayerPages(
            planes=tuple(plane(a) for a in _plane_addresses(row, steps, pointers, shape, layer)),
            num_blocks=shape.num_blocks,
            num_slots=shape.slots_per_block,
            num_heads=1 if row.is_single_latent else shape.num_heads,
            planar_bytes=row.planar_bytes,
        )
        for layer in range(shape.num_layers)
    ]


def _plane_addresses(
    row: FormatRow,
    steps: dict[str, int],
    pointers: Sequence[int],
    shape: PagedShape,
    layer: int,
) -> tuple[int, ...]:
    if row.is_kv_list:
        return pointers[layer], pointers[shape.num_layers + layer]
    if row.is_plane_tuple:
        return pointers[2 * layer], pointers[2 * layer + 1]
    base = pointers[0] + layer * steps["NL"] if row.is_cross_layer else pointers[layer]
    return (base,) if row.kv_axis is None else (base, base + steps["TWO"])


def _dense_steps(row: FormatRow, shape: PagedShape) -> dict[str, int]:
    """Bytes between neighbours of every axis of a tensor without padding."""
    lengths = {
        "NB": shape.num_blocks,
        "NL": shape.num_layers,
        "TWO": 2,
        "BS": shape.slots_per_block,
        "NH": shape.num_heads,
        "ONE": 1,
    }
    content_from = row.content_axes[0]
    axes = [
        part
        for axis in row.axes[:content_from]
        for part in (("NB", "BS") if axis == "NBBS" else (axis,))
    ]
    steps: dict[str, int] = {}
    step = shape.head_elements * shape.element_bytes
    for axis in reversed(axes):
        steps[axis] = step
        step *= lengths[axis]
    return steps


def _widen_blocks(row: FormatRow, shape: PagedShape, steps: dict[str, int]) -> None:
    """Take the descriptor's step between blocks, where the format's first axis is the block."""
    wanted = shape.block_stride_elems * shape.element_bytes
    dense = steps["NB"]
    if wanted == dense:
        return
    plain = row.axes[0] == "NB" and not row.is_cross_layer and row.kv_axis is None
    if not plain or wanted < dense or row.is_kv_list or row.is_plane_tuple:
        raise UnsupportedLayoutError(
            f"a step of {shape.block_stride_elems} elements between blocks, where this format's "
            f"pointers have {dense // shape.element_bytes}"
        )
    steps["NB"] = wanted


def pages_from_tensors(
    fmt: EngineKVFormat, slots_per_block: int, caches: Any
) -> tuple[list[LayerPages], torch.device, torch.dtype]:
    """Pages of every layer of `caches`, with their device and element type (of the first plane).

    `caches` has any form that LMCache's operation takes: one cross-layer tensor, a list of
    layers, `[keys, values]` or that list flattened, or a list of tuples.

    Raises:
        UnsupportedLayoutError: another form, a shape or strides that we cannot address, a block
            size other than the descriptor's, or tensors of several devices or types.
    """
    fmt, nested = _nest(fmt, slots_per_block, caches)
    tensors = _flatten(nested)
    if not tensors:
        raise UnsupportedLayoutError("no tensors")
    devices = {tensor.device for tensor in tensors}
    dtypes = {tensor.dtype for tensor in tensors}
    if len(devices) > 1 or (len(dtypes) > 1 and not is_side_by_side(fmt)):
        raise UnsupportedLayoutError(f"pools of several kinds: {devices}, {dtypes}")
    pages = layer_pages(fmt, nested)
    if pages[0].num_slots != slots_per_block:
        raise UnsupportedLayoutError(
            f"blocks of {pages[0].num_slots} slots, where the descriptor says {slots_per_block}"
        )
    return pages, tensors[0].device, tensors[0].dtype


def _nest(fmt: EngineKVFormat, slots: int, caches: Any) -> tuple[EngineKVFormat, Any]:
    """The caches in the nesting of one of our table's rows, folded axes apart."""
    row = FORMAT_ROWS[fmt]
    if row.is_cross_layer:
        if not isinstance(caches, torch.Tensor):
            raise UnsupportedLayoutError("cross-layer caches that are no tensor")
        return fmt, caches
    if not isinstance(caches, list):
        raise UnsupportedLayoutError(f"caches in a {type(caches).__name__}")
    if row.is_kv_list:
        return _nest_kv_list(row, slots, caches)
    if row.is_plane_tuple:
        if not all(isinstance(layer, list | tuple) for layer in caches):
            raise UnsupportedLayoutError("layers that are no tuples")
        return fmt, [tuple(layer) for layer in caches]
    if not all(isinstance(layer, torch.Tensor) for layer in caches):
        raise UnsupportedLayoutError("layers that are no tensors")
    if row.is_folded:
        return EngineKVFormat.NL_X_NB_BS_HS, [_unfold(layer, slots).squeeze(2) for layer in caches]
    rank = caches[0].dim() if caches else 0
    if fmt in _PACKED_CONTENT and rank == 4:
        fmt = _PACKED_CONTENT[fmt]
    elif fmt in _SPLIT_CONTENT and rank == 5:
        fmt = _SPLIT_CONTENT[fmt]
    elif fmt is EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS and rank == 5:
        fmt = EngineKVFormat.NL_X_TWO_NB_NH_BS_HS
    return fmt, caches


def _nest_kv_list(row: FormatRow, slots: int, caches: list[Any]) -> tuple[EngineKVFormat, Any]:
    if len(caches) == 2 and all(isinstance(part, list) for part in caches):
        keys, values = caches
    elif len(caches) % 2 == 0 and all(isinstance(part, torch.Tensor) for part in caches):
        half = len(caches) // 2
        keys, values = caches[:half], caches[half:]
    else:
        raise UnsupportedLayoutError("neither [keys, values] nor their flat list")
    if len(keys) != len(values):
        raise UnsupportedLayoutError(f"{len(keys)} layers of keys, {len(values)} of values")
    if row.is_folded:
        keys, values = ([_unfold(layer, slots) for layer in part] for part in (keys, values))
    return EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS, [keys, values]


def _unfold(tensor: torch.Tensor, slots: int) -> torch.Tensor:
    """`[blocks * slots, ...]` as `[blocks, slots, ...]`, without a last, partial block."""
    blocks = tensor.shape[0] // slots
    step = tensor.stride(0)
    return tensor.as_strided(
        (blocks, slots, *tensor.shape[1:]), (slots * step, step, *tensor.stride()[1:])
    )


def _flatten(nested: Any) -> list[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [tensor for part in nested for tensor in _flatten(part)]


def tensors_key(caches: Any) -> tuple[Any, ...]:
    """What identifies where tensors lie: address, shape, strides and type of each."""
    if isinstance(caches, torch.Tensor):
        return (caches.data_ptr(), caches.shape, caches.stride(), caches.dtype, caches.device)
    return tuple(tensors_key(part) for part in caches)


def is_pointer_tensor(value: Any) -> bool:
    """Whether LMCache takes `value` as a list of pointers."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 1
        and value.dtype in (torch.int64, torch.uint64)
    )
