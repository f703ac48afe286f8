"""Every cache layout we know, one table row each, and the addresses that follow from a row.

The members and their meanings are those of LMCache 0.5.6's enum of the same name (checked in
``tests/lmcache``). A row says how the registered structure nests (lists outside, one tensor's
axes inside); every accessor and :func:`layer_pages` derive from it. The caches passed here are
*normalised*: the tensor's axes stand in the row's order (``detection`` sees to it), whatever
their strides are.

Axis names: ``NB`` blocks, ``NL`` layers, ``TWO`` keys and values, ``BS`` slots of a block, ``NH``
heads, ``HS`` elements of a head, ``CS`` content of a head with K and V packed, ``ONE`` length 1,
``NBBS`` blocks and slots folded into one axis. List levels: ``NL``, ``TWO``, and ``NP`` planes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from hma_triton.errors import GeometryError, UnsupportedLayoutError
from hma_triton.kv_strides import check_plane_strides


class EngineKVFormat(IntEnum):
    """Memory layouts of engine caches; names and values of LMCache 0.5.6."""

    NB_NL_TWO_BS_NH_HS = 0
    NL_X_TWO_NB_BS_NH_HS = 1
    NL_X_NB_TWO_BS_NH_HS = 2
    NL_X_NB_BS_HS = 3
    TWO_X_NL_X_NBBS_NH_HS = 4
    NL_X_NBBS_ONE_HS = 5
    NL_X_TWO_NB_NH_BS_HS = 6
    NL_X_NB_TWO_NH_BS_HS = 7
    NB_NL_TWO_NH_BS_HS = 8
    TWO_X_NL_X_NB_BS_NH_HS = 9
    NL_X_NB_NH_BS_TWO_HS = 10
    NL_X_NB_BS_NH_TWO_HS = 11
    NL_X_NB_NH_BS_CS = 12
    NL_X_NB_BS_NH_CS = 13
    NL_X_NB_BSV_BSS = 14
    NL_X_TWO_NB_NH_ONE_BS_HS = 15
    NL_X_TWO_X_NB_BS_NH_HS = 16
    NL_X_NP_X_NB_BS_ONE_HS = 17
    NL_X_NB_BS_NH_HS = 18


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One layout: list levels outside in, then the tensor's axes in order.

    ``planar_bytes``: bytes per slot of each planar field, where a page holds all slots of the
    first field, then all slots of the second; empty where a slot's bytes lie together.
    """

    lists: tuple[str, ...]
    axes: tuple[str, ...]
    planar_bytes: tuple[int, ...] = ()

    @property
    def is_cross_layer(self) -> bool:
        """Whether one tensor holds all layers."""
        return "NL" in self.axes

    @property
    def is_kv_list(self) -> bool:
        """Whether the structure is ``[keys per layer, values per layer]``."""
        return self.lists[:1] == ("TWO",)

    @property
    def is_layer_list(self) -> bool:
        """Whether the structure has one entry per layer."""
        return self.lists[:1] == ("NL",)

    @property
    def is_plane_tuple(self) -> bool:
        """Whether a layer's entry is a tuple of tensors, one per plane."""
        return self.is_layer_list and len(self.lists) == 2

    @property
    def is_folded(self) -> bool:
        """Whether blocks and slots are one axis, so that neither count is known."""
        return "NBBS" in self.axes

    @property
    def is_single_latent(self) -> bool:
        """Whether a slot holds one vector: no heads axis (MLA latents, indexer rows)."""
        return "NH" not in self.axes

    @property
    def heads_first(self) -> bool:
        """Whether the heads of a block lie outside its slots (HND)."""
        return not self.is_single_latent and "BS" in self.axes and self._at("NH") < self._at("BS")

    @property
    def is_packed(self) -> bool:
        """Whether K and V share a head's contiguous content, so that they are one plane."""
        return "CS" in self.axes or self.axes[-2] == "TWO"

    @property
    def kv_axis(self) -> int | None:
        """Tensor axis that separates K and V planes, None when there is none."""
        return self._at("TWO") if "TWO" in self.axes and not self.is_packed else None

    @property
    def kv_size(self) -> int:
        """Planes in an object: 2 when K and V lie apart, else 1 (a tuple of latents is one)."""
        return 2 if "TWO" in self.lists or self.kv_axis is not None else 1

    @property
    def content_axes(self) -> tuple[int, ...]:
        """Tensor axes that make up one head's contiguous content."""
        last = len(self.axes) - 1
        return (last - 1, last) if self.axes[-2] == "TWO" else (last,)

    def _at(self, axis: str) -> int:
        return self.axes.index(axis)


def _row(lists: str, axes: str, planar_bytes: tuple[int, ...] = ()) -> FormatRow:
    return FormatRow(tuple(lists.split()), tuple(axes.split()), planar_bytes)


FORMAT_ROWS: dict[EngineKVFormat, FormatRow] = {
    EngineKVFormat.NB_NL_TWO_BS_NH_HS: _row("", "NB NL TWO BS NH HS"),
    EngineKVFormat.NL_X_TWO_NB_BS_NH_HS: _row("NL", "TWO NB BS NH HS"),
    EngineKVFormat.NL_X_NB_TWO_BS_NH_HS: _row("NL", "NB TWO BS NH HS"),
    EngineKVFormat.NL_X_NB_BS_HS: _row("NL", "NB BS HS"),
    EngineKVFormat.TWO_X_NL_X_NBBS_NH_HS: _row("TWO NL", "NBBS NH HS"),
    EngineKVFormat.NL_X_NBBS_ONE_HS: _row("NL", "NBBS ONE HS"),
    EngineKVFormat.NL_X_TWO_NB_NH_BS_HS: _row("NL", "TWO NB NH BS HS"),
    EngineKVFormat.NL_X_NB_TWO_NH_BS_HS: _row("NL", "NB TWO NH BS HS"),
    EngineKVFormat.NB_NL_TWO_NH_BS_HS: _row("", "NB NL TWO NH BS HS"),
    EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS: _row("TWO NL", "NB BS NH HS"),
    EngineKVFormat.NL_X_NB_NH_BS_TWO_HS: _row("NL", "NB NH BS TWO HS"),
    EngineKVFormat.NL_X_NB_BS_NH_TWO_HS: _row("NL", "NB BS NH TWO HS"),
    EngineKVFormat.NL_X_NB_NH_BS_CS: _row("NL", "NB NH BS CS"),
    EngineKVFormat.NL_X_NB_BS_NH_CS: _row("NL", "NB BS NH CS"),
    # 128 fp8 values per slot, then one fp32 scale per slot, each field for the whole page
    EngineKVFormat.NL_X_NB_BSV_BSS: _row("NL", "NB BS HS", (128, 4)),
    EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS: _row("NL", "TWO NB NH ONE BS HS"),
    EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS: _row("NL TWO", "NB BS NH HS"),
    EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS: _row("NL NP", "NB BS ONE HS"),
    EngineKVFormat.NL_X_NB_BS_NH_HS: _row("NL", "NB BS NH HS"),
}


_INDEXER_ROW_BYTES = sum(FORMAT_ROWS[EngineKVFormat.NL_X_NB_BSV_BSS].planar_bytes)


def is_indexer_page(tensor: torch.Tensor) -> bool:
    """Whether a one-head cache is a sparse-attention indexer's, whose pages are planar."""
    return tensor.dtype == torch.uint8 and tensor.shape[-1] == _INDEXER_ROW_BYTES


@dataclass(frozen=True, slots=True)
class PlanePages:
    """One plane of one layer. ``address`` is that of block 0, slot 0, head 0 (absolute).

    ``content_bytes`` are the contiguous live bytes of one (slot, head).
    """

    address: int
    block_stride_bytes: int
    slot_stride_bytes: int
    head_stride_bytes: int
    content_bytes: int


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Where one layer's pages lie: planes (2 where K and V lie apart), blocks, slots, heads.

    ``planes_share_rows``: the planes are parts of one latent, side by side in a token's row.
    ``planar_bytes``: see :class:`FormatRow`; such a page is ``num_slots * sum`` dense bytes.
    """

    planes: tuple[PlanePages, ...]
    num_blocks: int
    num_slots: int
    num_heads: int
    planar_bytes: tuple[int, ...] = ()
    planes_share_rows: bool = False

    @property
    def page_bytes(self) -> int:
        """Live bytes of one block over all planes."""
        return sum(plane.content_bytes for plane in self.planes) * self.num_slots * self.num_heads


@dataclass(frozen=True)
class FormattedCaches:
    """Normalised caches and the one format that all their layers share.

    ``caches`` is a list of layers, ``[keys, values]``, or one cross-layer tensor, as the row says.
    """

    caches: Any
    engine_kv_format: EngineKVFormat

    @property
    def row(self) -> FormatRow:
        """The format's table row."""
        return FORMAT_ROWS[self.engine_kv_format]

    @property
    def num_layers(self) -> int:
        """Layers in the structure."""
        if self.row.is_cross_layer:
            return int(self.caches.shape[self.row.axes.index("NL")])
        return len(self.caches[0] if self.row.is_kv_list else self.caches)

    @property
    def kv_size(self) -> int:
        """Planes of a layer in an object."""
        return self.row.kv_size

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors that hold ``layer``: one, or one per plane."""
        if self.row.is_cross_layer:
            return (self.caches,)
        if self.row.is_kv_list:
            return (self.caches[0][layer], self.caches[1][layer])
        entry = self.caches[layer]
        return tuple(entry) if self.row.is_plane_tuple else (entry,)

    def num_blocks(self, layer: int = 0) -> int:
        """Blocks in the pool.

        Raises:
            GeometryError: blocks and slots are folded into one axis.
        """
        return self._length("NB", layer)

    def block_size(self, layer: int = 0) -> int:
        """Slots of a block.

        Raises:
            GeometryError: blocks and slots are folded into one axis.
        """
        return self._length("BS", layer)

    def num_slots(self, layer: int = 0) -> int:
        """Slots of the whole pool, folded or not."""
        if self.row.is_folded:
            return self._length("NBBS", layer)
        return self.num_blocks(layer) * self.block_size(layer)

    def num_heads(self, layer: int = 0) -> int:
        """Heads of ``layer``; 1 for latents."""
        return 1 if self.row.is_single_latent else self._length("NH", layer)

    def head_size(self, layer: int = 0) -> int:
        """Elements of one head's content; over all planes for tuples of latents."""
        tensors = self.tensors(layer)
        if self.row.lists[-1:] == ("NP",):
            nbytes = sum(t.shape[-1] * t.element_size() for t in tensors)
            elements, rest = divmod(nbytes, tensors[0].element_size())
            if rest:
                raise GeometryError(
                    f"layer {layer}: planes of {nbytes} bytes per slot are no whole number of "
                    f"{tensors[0].dtype} elements"
                )
            return elements
        return math.prod(tensors[0].shape[axis] for axis in self.row.content_axes)

    def hidden_dim(self, layer: int = 0) -> int:
        """``num_heads * head_size``."""
        return self.num_heads(layer) * self.head_size(layer)

    def dtype(self, layer: int = 0) -> torch.dtype:
        """Element type of ``layer`` (of its first plane)."""
        return self.tensors(layer)[0].dtype

    def block_stride_elems(self, layer: int = 0) -> int:
        """Elements from one block to the next, in the first plane."""
        if self.row.is_folded:
            self._length("NB", layer)
        return int(self.tensors(layer)[0].stride(self.row.axes.index("NB")))

    def data_ptrs(self, layers: Sequence[int]) -> list[int]:
        """Addresses in the order LMCache's operations take them.

        One per layer; all keys then all values for ``[keys, values]``; the planes of a layer
        together for tuples; one base address for a cross-layer tensor.
        """
        if self.row.is_cross_layer:
            return [self.caches.data_ptr()]
        if self.row.is_kv_list:
            return [self.caches[plane][layer].data_ptr() for plane in (0, 1) for layer in layers]
        return [t.data_ptr() for layer in layers for t in self.tensors(layer)]

    def pages(self, layer: int) -> LayerPages:
        """Where the pages of ``layer`` lie.

        Raises:
            UnsupportedLayoutError: overlapping or negative strides, or padding inside a page.
        """
        num_blocks = self.num_blocks(layer)
        planes: list[PlanePages] = []
        for tensor in self.tensors(layer):
            planes.extend(self._planes_of(tensor, layer))
        return LayerPages(
            planes=tuple(planes),
            num_blocks=num_blocks,
            num_slots=self.block_size(layer),
            num_heads=self.num_heads(layer),
            planar_bytes=self.row.planar_bytes,
            planes_share_rows=self.row.lists[-1:] == ("NP",),
        )

    def _planes_of(self, tensor: torch.Tensor, layer: int) -> list[PlanePages]:
        row, axes = self.row, self.row.axes
        check_plane_strides(tensor, axes, row.content_axes, f"layer {layer}")
        width = tensor.element_size()
        address = tensor.data_ptr()
        if row.is_cross_layer:
            address += layer * tensor.stride(axes.index("NL")) * width
        step = 0 if row.kv_axis is None else tensor.stride(row.kv_axis) * width
        content = math.prod(tensor.shape[axis] for axis in row.content_axes) * width
        heads = "NH" if "NH" in axes else None
        return [
            PlanePages(
                address=address + plane * step,
                block_stride_bytes=tensor.stride(axes.index("NB")) * width,
                slot_stride_bytes=tensor.stride(axes.index("BS")) * width,
                head_stride_bytes=tensor.stride(axes.index(heads)) * width if heads else content,
                content_bytes=content,
            )
            for plane in range(1 if row.kv_axis is None else 2)
        ]

    def _length(self, axis: str, layer: int) -> int:
        if axis not in self.row.axes:
            raise GeometryError(
                f"{self.engine_kv_format.name} folds blocks and slots into one axis, so "
                f"'{axis}' of layer {layer} is unknown: register with the engine's tokens_per_block"
            )
        return int(self.tensors(layer)[0].shape[self.row.axes.index(axis)])


def layer_pages(fmt: EngineKVFormat, kv_caches: Any) -> list[LayerPages]:
    """Where the pages of every layer of ``kv_caches`` lie, in registration order.

    ``kv_caches`` is normalised and all of one format, see :class:`FormattedCaches`.

    Raises:
        UnsupportedLayoutError: strides that cannot be served, named with the layer.
        GeometryError: a folded format, whose blocks are unknown.
    """
    formatted = FormattedCaches(kv_caches, fmt)
    for layer in range(formatted.num_layers):
        for tensor in formatted.tensors(layer):
            if tensor.ndim != len(formatted.row.axes):
                raise UnsupportedLayoutError(
                    f"layer {layer}: {fmt.name} has {len(formatted.row.axes)} axes, the tensor "
                    f"has shape {tuple(tensor.shape)}"
                )
    return [formatted.pages(layer) for layer in range(formatted.num_layers)]
