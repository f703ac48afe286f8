"""Kernel groups and object groups, computed from the real tensors.

A kernel group is the layers of one engine group that share a :class:`KernelGroupIdentity`: one
kernel launch moves them. An object group is the kernel groups whose bytes share one host object.
The manager computes both from the registered tensors and refuses infos that say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hma_triton.errors import GroupMismatchError
from hma_triton.group_view import (
    EXCLUDED_ENGINE_GROUP,
    EngineGroupInfo,
    get_engine_group_indices,
)
from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat, FormattedCaches, LayerPages
from hma_triton.plan import check_chunk_tokens, kept_blocks
from hma_triton.units import exact_div


class KernelGroupIdentity(NamedTuple):
    """What layers must share to be moved by one launch; ``block_size`` is slots per block."""

    kv_size: int
    num_heads: int
    head_size: int
    block_size: int
    engine_group_idx: int
    dtype: torch.dtype
    engine_kv_format: EngineKVFormat


@dataclass(frozen=True, slots=True)
class PageBufferShapeDesc:
    """Shape of a kernel group's pools; the field names are LMCache's.

    ``nl`` layers, ``nb`` blocks, ``bs`` slots per block, ``nh`` heads, ``hs`` elements per head,
    ``element_size`` bytes, ``block_stride_elems`` elements from block to block (0: not known).
    """

    kv_size: int
    nl: int
    nb: int
    bs: int
    nh: int
    hs: int
    element_size: int
    block_stride_elems: int = 0


@dataclass(frozen=True, slots=True)
class KernelGroupInfo:
    """One kernel group: which layers, what shape, how many tokens a block stands for.

    ``engine_kv_format`` is None only for groups that were parsed from a shape spec.
    ``sw_size_tokens`` is -1 for groups without a window.
    """

    layer_indices: tuple[int, ...]
    shape_desc: PageBufferShapeDesc
    dtype: torch.dtype
    engine_kv_format: EngineKVFormat | None = None
    tokens_per_block: int = 0
    engine_group_idx: int = 0
    sw_size_tokens: int = -1
    extra_object_group_tag: int = 0
    recurrent_state: bool = False

    @property
    def slots_per_block(self) -> int:
        """Physical slots of a block, read off the tensor."""
        return self.shape_desc.bs

    @property
    def num_layers(self) -> int:
        """Layers in the group."""
        return len(self.layer_indices)

    @property
    def hidden_dim_size(self) -> int:
        """Elements of one slot of one plane: heads times head size."""
        return self.shape_desc.nh * self.shape_desc.hs

    @property
    def window_tokens(self) -> int | None:
        """The sliding window, None for groups without one."""
        return self.sw_size_tokens if self.sw_size_tokens > 0 else None

    @property
    def layer_page_bytes(self) -> int:
        """Live bytes of one layer's page, all planes."""
        desc = self.shape_desc
        return desc.kv_size * desc.bs * desc.nh * desc.hs * desc.element_size

    @property
    def block_bytes(self) -> int:
        """Live bytes that one block id names in this group, all layers."""
        return self.layer_page_bytes * self.num_layers

    def calculate_slots(self, num_tokens: int) -> int:
        """Slots that hold ``num_tokens`` tokens.

        Raises:
            AlignmentError: the tokens do not end on a slot.
        """
        what = f"slots of {num_tokens} tokens ({self.tokens_per_block} tokens per block)"
        return exact_div(num_tokens * self.slots_per_block, self.tokens_per_block, what)


KVLayerGroupInfo = KernelGroupInfo


@dataclass(frozen=True, slots=True)
class ObjectGroupInfo:
    """Kernel groups whose bytes share one object, in the order of their regions."""

    kernel_group_indices: tuple[int, ...]
    window_tokens: int | None = None
    recurrent: bool = False
    tag: int = 0


def _layer_view(kv_caches: Any, fmt: EngineKVFormat, layer: int) -> tuple[FormattedCaches, int]:
    """``layer`` as formatted caches and its index there: whole structures stay whole."""
    if FORMAT_ROWS[fmt].is_layer_list:
        return FormattedCaches([kv_caches[layer]], fmt), 0
    return FormattedCaches(kv_caches, fmt), layer


def group_layers_by_identity(
    kv_caches: Any,
    engine_kv_formats: Sequence[EngineKVFormat],
    per_layer_engine_group_idx: Sequence[int] | None = None,
) -> list[tuple[KernelGroupIdentity, list[int]]]:
    """Partition the layers by identity, ordered by each part's first layer.

    Args:
        kv_caches: normalised caches, see ``detection``.
        engine_kv_formats: one format per layer.
        per_layer_engine_group_idx: engine group id per layer; None puts all in group 0, and
            ``EXCLUDED_ENGINE_GROUP`` leaves a layer out.

    Raises:
        GroupMismatchError: lists of different lengths.
    """
    num_layers = len(engine_kv_formats)
    group_ids = per_layer_engine_group_idx
    if group_ids is None:
        group_ids = [0] * num_layers
    if len(group_ids) != num_layers:
        raise GroupMismatchError(
            f"engine group ids for {len(group_ids)} layers, formats for {num_layers} layers"
        )
    parts: dict[KernelGroupIdentity, list[int]] = {}
    for layer, (fmt, group_id) in enumerate(zip(engine_kv_formats, group_ids, strict=True)):
        if group_id == EXCLUDED_ENGINE_GROUP:
            continue
        view, index = _layer_view(kv_caches, fmt, layer)
        identity = KernelGroupIdentity(
            kv_size=view.kv_size,
            num_heads=view.num_heads(index),
            head_size=view.head_size(index),
            block_size=view.block_size(index),
            engine_group_idx=group_id,
            dtype=view.dtype(index),
            engine_kv_format=fmt,
        )
        parts.setdefault(identity, []).append(layer)
    # a dict keeps the order of insertion, which is that of each part's first layer
    return list(parts.items())


class KVLayerGroupsManager:
    """The kernel and object groups of one registration; built whole or not at all.

    Args:
        kv_caches: normalised caches, see ``detection``.
        engine_kv_formats: one format per layer.
        engine_group_infos: one info per kernel group, in kernel-group order; empty for an engine
            with a single group.
        lmcache_tokens_per_chunk: tokens of one object; every group's block must divide it.
        separate_object_groups: one object group per (recurrence, window), tagged extras last;
            else one for all.

    Raises:
        GroupMismatchError: infos that differ from the tensors in count, layers or geometry; a
            block or chunk that does not divide (the nearest valid chunk is named).
        UnsupportedLayoutError: strides that cannot be served.
    """

    def __init__(
        self,
        kv_caches: Any,
        engine_kv_formats: Sequence[EngineKVFormat],
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        lmcache_tokens_per_chunk: int = 256,
        separate_object_groups: bool = False,
    ) -> None:
        infos = tuple(engine_group_infos)
        num_layers = len(engine_kv_formats)
        if num_layers == 0:
            raise GroupMismatchError("no caches are registered: there is nothing to group")
        parts = group_layers_by_identity(
            kv_caches, engine_kv_formats, get_engine_group_indices(infos, num_layers)
        )
        _check_infos(infos, parts)
        pages = [_pages_of(kv_caches, identity, layers) for identity, layers in parts]
        groups = [
            _kernel_group(index, identity, layers, pages[index], infos[index] if infos else None)
            for index, (identity, layers) in enumerate(parts)
        ]
        check_chunk_tokens(lmcache_tokens_per_chunk, [g.tokens_per_block for g in groups])
        self.chunk_tokens = lmcache_tokens_per_chunk
        self.kernel_groups: tuple[KernelGroupInfo, ...] = tuple(groups)
        self.object_groups = _object_groups(groups, separate_object_groups)
        self._pages = tuple(pages)

    @property
    def num_kernel_groups(self) -> int:
        """Kernel groups, and block-id lists of a request."""
        return len(self.kernel_groups)

    @property
    def num_object_groups(self) -> int:
        """Objects of one chunk on one rank."""
        return len(self.object_groups)

    def get_shape_desc(self, kernel_group_index: int) -> PageBufferShapeDesc:
        """Shape of a kernel group's pools."""
        return self.kernel_groups[kernel_group_index].shape_desc

    def layer_pages(self, kernel_group_index: int) -> tuple[LayerPages, ...]:
        """Where each layer's pages lie, in the order of ``layer_indices``."""
        return self._pages[kernel_group_index]

    def calculate_num_blocks(self, kernel_group_index: int, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens.

        Raises:
            AlignmentError: the tokens do not end on a block.
        """
        group = self.kernel_groups[kernel_group_index]
        what = f"blocks of kernel group {kernel_group_index}"
        return exact_div(num_tokens, group.tokens_per_block, what)

    def get_slots_per_chunk_in_sw(self, kernel_group_index: int) -> int:
        """Slots of one chunk that its object keeps: those of the blocks a later hit can need."""
        group = self.kernel_groups[kernel_group_index]
        blocks = kept_blocks(
            group.tokens_per_block, group.window_tokens, group.recurrent_state, self.chunk_tokens
        )
        return blocks * group.slots_per_block


def _check_infos(
    infos: Sequence[EngineGroupInfo], parts: Sequence[tuple[KernelGroupIdentity, list[int]]]
) -> None:
    """Infos must be the parts, one by one and in order."""
    if not infos:
        return
    if len(infos) != len(parts):
        found = [(identity.engine_group_idx, layers) for identity, layers in parts]
        raise GroupMismatchError(
            f"{len(infos)} infos for {len(parts)} kernel groups: the tensors group as "
            f"(engine group, layers) {found}"
        )
    for index, (info, (identity, layers)) in enumerate(zip(infos, parts, strict=True)):
        if tuple(info.layer_indices) != tuple(layers):
            raise GroupMismatchError(
                f"info {index} (engine group {info.engine_group_id}) names layers "
                f"{list(info.layer_indices)}, but the tensors make kernel group {index} of layers "
                f"{layers} ({_describe(identity)})"
            )


def _describe(identity: KernelGroupIdentity) -> str:
    return (
        f"{identity.engine_kv_format.name}, {identity.kv_size} planes, {identity.num_heads} heads "
        f"of {identity.head_size} {str(identity.dtype).removeprefix('torch.')}, "
        f"{identity.block_size} slots per block"
    )


def _pages_of(
    kv_caches: Any, identity: KernelGroupIdentity, layers: Sequence[int]
) -> tuple[LayerPages, ...]:
    """Pages of one kernel group; its layers must agree in everything but their address."""
    pages: list[LayerPages] = []
    for layer in layers:
        view, index = _layer_view(kv_caches, identity.engine_kv_format, layer)
        pages.append(view.pages(index))
    first = _strides_of(pages[0])
    for layer, page in zip(layers, pages, strict=True):
        if _strides_of(page) != first:
            raise GroupMismatchError(
                f"layers {layers[0]} and {layer} of engine group {identity.engine_group_idx} are "
                f"of one kind ({_describe(identity)}) but lie differently: (blocks; block, slot, "
                f"head strides and content bytes per plane) {first} and {_strides_of(page)}"
            )
    return tuple(pages)


def _strides_of(page: LayerPages) -> tuple[int, tuple[tuple[int, int, int, int], ...]]:
    return page.num_blocks, tuple(
        (p.block_stride_bytes, p.slot_stride_bytes, p.head_stride_bytes, p.content_bytes)
        for p in page.planes
    )


def _kernel_group(
    index: int,
    identity: KernelGroupIdentity,
    layers: Sequence[int],
    pages: Sequence[LayerPages],
    info: EngineGroupInfo | None,
) -> KernelGroupInfo:
    """One kernel group, checked against its info."""
    slots = identity.block_size
    declared = info.tokens_per_block if info is not None else 0
    tokens_per_block = declared or slots
    if tokens_per_block < 0 or tokens_per_block % slots:
        raise GroupMismatchError(
            f"kernel group {index} (engine group {identity.engine_group_idx}, layer {layers[0]}): "
            f"{tokens_per_block} tokens per block are no whole multiple of the {slots} slots that "
            f"the tensors have ({_describe(identity)})"
        )
    element_size = identity.dtype.itemsize
    return KernelGroupInfo(
        layer_indices=tuple(layers),
        shape_desc=PageBufferShapeDesc(
            kv_size=identity.kv_size,
            nl=len(layers),
            nb=pages[0].num_blocks,
            bs=slots,
            nh=identity.num_heads,
            hs=identity.head_size,
            element_size=element_size,
            block_stride_elems=pages[0].planes[0].block_stride_bytes // element_size,
        ),
        dtype=identity.dtype,
        engine_kv_format=identity.engine_kv_format,
        tokens_per_block=tokens_per_block,
        engine_group_idx=identity.engine_group_idx,
        sw_size_tokens=info.sw_size_tokens if info is not None else -1,
        extra_object_group_tag=info.extra_object_group_tag if info is not None else 0,
        recurrent_state=info.recurrent_state if info is not None else False,
    )


def _object_groups(
    groups: Sequence[KernelGroupInfo], separate: bool
) -> tuple[ObjectGroupInfo, ...]:
    """Kernel groups by (recurrence, window), tagged extras by tag and after all others."""
    if not separate:
        everything = tuple(range(len(groups)))
        return (ObjectGroupInfo(everything, recurrent=all(g.recurrent_state for g in groups)),)
    members: dict[tuple[int, bool, int | None], list[int]] = {}
    for index, group in enumerate(groups):
        tag = group.extra_object_group_tag
        rule = (group.recurrent_state, group.window_tokens)
        members.setdefault((tag, *(rule if not tag else (False, None))), []).append(index)
    ordered = sorted(members.values(), key=lambda indices: _object_order(groups, indices))
    return tuple(_object_group(groups, indices) for indices in ordered)


def _object_order(groups: Sequence[KernelGroupInfo], indices: Sequence[int]) -> tuple[bool, int]:
    return groups[indices[0]].extra_object_group_tag != 0, indices[0]


def _object_group(groups: Sequence[KernelGroupInfo], indices: Sequence[int]) -> ObjectGroupInfo:
    """One object group; a tag's members may differ in rule, then the strictest holds."""
    windows = [groups[index].window_tokens for index in indices]
    widest = None if None in windows else max(w for w in windows if w is not None)
    return ObjectGroupInfo(
        kernel_group_indices=tuple(indices),
        window_tokens=widest,
        recurrent=all(groups[index].recurrent_state for index in indices),
        tag=groups[indices[0]].extra_object_group_tag,
    )
