"""Which format each registered cache has, decided once, with the tensor turned to match it.

The memory order comes from strides. A hint names the memory order and wins on every device. Axes
that strides and hint leave open (length 1, equal strides, no hint) are settled by the slots the
engine declares for a block; where two readings still fit, detection raises and names both. Each
layer is judged by its own tensor, never by another's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hma_triton.axis_order import Evidence, order_axes
from hma_triton.errors import AmbiguousLayoutError, GeometryError, UnsupportedLayoutError
from hma_triton.foreign_layouts import read_sglang, read_trtllm
from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat, is_indexer_page
from hma_triton.layout_hints import LayoutHints, as_layout_hints, memory_order, value_for_layer

__all__ = ["LayoutHints", "normalize_and_discover_per_layer_formats"]

_ENGINES = ("vllm", "atom", "sglang", "trtllm")


def normalize_and_discover_per_layer_formats(
    kv_caches: Mapping[str, Any] | Sequence[Any] | torch.Tensor,
    layer_index_groups: Sequence[Sequence[int]],
    engine_type: Any,
    layout_hints: LayoutHints | Mapping[str, Any] | None = None,
) -> tuple[Any, list[EngineKVFormat]]:
    """Caches whose axes stand in their format's order, and one format per layer. Views only.

    Args:
        kv_caches: caches by layer name or in registration order (a tensor, or a tuple of planes
            each), or one tensor of all layers.
        layer_index_groups: layers of each engine group; layers in none are not looked at (their
            owner's cache is moved, or their group keeps nothing). Empty: all layers are.
        engine_type: ``vllm``, ``atom``, ``sglang`` or ``trtllm``, or an enum of such a name.
        layout_hints: see :class:`LayoutHints`; a mapping with LMCache's keys will do.

    Raises:
        AmbiguousLayoutError: two readings of a tensor fit; names the layer and both.
        UnsupportedLayoutError: a structure, layout name or engine that is not served.
        GroupMismatchError: no reading has the slots that the engine declares.
    """
    hints = as_layout_hints(layout_hints)
    order = memory_order(hints.kv_layout)
    engine = str(getattr(engine_type, "value", engine_type)).lower().replace("-", "")
    if engine not in _ENGINES:
        raise UnsupportedLayoutError(
            f"engine {engine_type!r} is unknown; known are {', '.join(_ENGINES)}"
        )
    if engine == "trtllm":
        return read_trtllm(kv_caches, hints)
    if engine == "sglang":
        return read_sglang(kv_caches, hints)
    if isinstance(kv_caches, torch.Tensor):
        return _read_cross_layer(kv_caches, hints, order)
    names, entries = _named_entries(kv_caches)
    if not entries:
        raise GeometryError("no caches are registered")
    return _read_layers(names, entries, layer_index_groups, hints, order)


def _named_entries(
    kv_caches: Mapping[str, Any] | Sequence[Any],
) -> tuple[list[str], list[Any]]:
    """Labels for messages, and the caches in registration order."""
    if isinstance(kv_caches, Mapping):
        return [f"layer {i} ({name})" for i, name in enumerate(kv_caches)], list(kv_caches.values())
    return [f"layer {i}" for i in range(len(kv_caches))], list(kv_caches)


def _read_layers(
    names: Sequence[str],
    entries: Sequence[Any],
    layer_index_groups: Sequence[Sequence[int]],
    hints: LayoutHints,
    order: str | None,
) -> tuple[list[Any], list[EngineKVFormat]]:
    """Read every layer that belongs to a group; the others keep their tensor."""
    count = len(entries)
    wanted = (
        {layer for group in layer_index_groups for layer in group}
        if (layer_index_groups)
        else set(range(count))
    )
    outside = sorted(layer for layer in wanted if not 0 <= layer < count)
    if outside:
        raise GeometryError(f"groups name layers {outside}; {count} layers are registered")
    read: dict[int, tuple[Any, EngineKVFormat]] = {}
    for layer in sorted(wanted):
        evidence = Evidence(
            order=order,
            slots=value_for_layer(hints.slots_per_block, layer, count, "slots_per_block") or 0,
            tokens=value_for_layer(hints.tokens_per_block, layer, count, "tokens_per_block") or 0,
            label=names[layer],
        )
        stated = value_for_layer(hints.formats, layer, count, "formats")
        read[layer] = (
            _read_stated(entries[layer], stated, evidence)
            if stated
            else _read_entry(entries[layer], evidence)
        )
    if not read:
        raise GeometryError(f"no group names any of the {count} registered layers")
    # grouping leaves layers without a group out, so their format is never looked at
    unread = next(iter(read.values()))[1]
    caches = [read[i][0] if i in read else entries[i] for i in range(count)]
    return caches, [read[i][1] if i in read else unread for i in range(count)]


def _read_stated(entry: Any, name: str, evidence: Evidence) -> tuple[Any, EngineKVFormat]:
    """A layer whose format the hints state: its axes stand in that order already."""
    try:
        fmt = EngineKVFormat[name]
    except KeyError:
        raise GeometryError(f"{evidence.label}: stated format {name!r} does not exist") from None
    row = FORMAT_ROWS[fmt]
    if not row.is_layer_list:
        raise UnsupportedLayoutError(f"{evidence.label}: {name} is not a format of single layers")
    planes = entry if row.is_plane_tuple else (entry,)
    for plane in planes:
        fits = isinstance(plane, torch.Tensor) and plane.ndim == len(row.axes)
        if not fits or any(
            plane.shape[axis] != length
            for axis, length in enumerate({"TWO": 2, "ONE": 1}.get(a, -1) for a in row.axes)
            if length > 0
        ):
            raise UnsupportedLayoutError(f"{evidence.label}: {_shape_of(plane)} is not {name}")
    if not row.is_folded:
        evidence.check_slots(planes[0].shape[row.axes.index("BS")])
    return (tuple(planes) if row.is_plane_tuple else entry), fmt


def _read_entry(entry: Any, evidence: Evidence) -> tuple[Any, EngineKVFormat]:
    """Format of one layer's entry by its structure."""
    if isinstance(entry, (list, tuple)):
        return _read_planes(entry, evidence)
    if not isinstance(entry, torch.Tensor):
        raise UnsupportedLayoutError(f"{evidence.label}: a cache is a tensor, not {type(entry)}")
    readers = {3: _read_rank3, 4: _read_rank4, 5: _read_rank5, 6: _read_rank6}
    if entry.ndim not in readers:
        raise UnsupportedLayoutError(
            f"{evidence.label}: no layout has {entry.ndim} axes ({_shape_of(entry)})"
        )
    return readers[entry.ndim](entry, evidence)


def _read_rank3(tensor: torch.Tensor, evidence: Evidence) -> tuple[torch.Tensor, EngineKVFormat]:
    """``[NB, BS, HS]``: latents, or an indexer's planar pages."""
    evidence.check_slots(tensor.shape[1])
    if is_indexer_page(tensor):
        return tensor, EngineKVFormat.NL_X_NB_BSV_BSS
    return tensor, EngineKVFormat.NL_X_NB_BS_HS


def _read_rank4(tensor: torch.Tensor, evidence: Evidence) -> tuple[torch.Tensor, EngineKVFormat]:
    """Blocks, slots and heads in either order, packed content."""
    slots, heads, heads_first = order_axes(tensor, 1, 2, evidence)
    if tensor.shape[heads] == 1 and is_indexer_page(tensor):
        return tensor.select(heads, 0), EngineKVFormat.NL_X_NB_BSV_BSS
    if heads_first:
        return tensor.permute(0, heads, slots, 3), EngineKVFormat.NL_X_NB_NH_BS_CS
    return tensor.permute(0, slots, heads, 3), EngineKVFormat.NL_X_NB_BS_NH_CS


def _read_rank5(tensor: torch.Tensor, evidence: Evidence) -> tuple[torch.Tensor, EngineKVFormat]:
    """K and V apart: the K/V axis and the block axis lead, in either order."""
    pairs = [axis for axis in (0, 1) if tensor.shape[axis] == 2]
    if not pairs:
        raise UnsupportedLayoutError(
            f"{evidence.label}: {_shape_of(tensor)} has no K/V axis of length 2 in front"
        )
    if len(pairs) == 2:
        raise AmbiguousLayoutError(
            f"{evidence.label}: {_shape_of(tensor)} is both [2, NB=2, ...] and [NB=2, 2, ...]; "
            "state the format in the hint 'formats', for instance NL_X_TWO_NB_BS_NH_HS"
        )
    kv, blocks = pairs[0], 1 - pairs[0]
    slots, heads, heads_first = order_axes(tensor, 2, 3, evidence)
    kv_outside = _lies_outside(tensor, kv, blocks)
    front = (kv, blocks) if kv_outside else (blocks, kv)
    inner = (heads, slots) if heads_first else (slots, heads)
    formats = {
        (True, False): EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
        (True, True): EngineKVFormat.NL_X_TWO_NB_NH_BS_HS,
        (False, False): EngineKVFormat.NL_X_NB_TWO_BS_NH_HS,
        (False, True): EngineKVFormat.NL_X_NB_TWO_NH_BS_HS,
    }
    return tensor.permute(*front, *inner, 4), formats[kv_outside, heads_first]


def _lies_outside(tensor: torch.Tensor, axis: int, other: int) -> bool:
    """Whether ``axis`` steps further than ``other``; by position where one has length 1."""
    if tensor.shape[other] == 1 or tensor.stride(axis) == tensor.stride(other):
        return axis < other
    return tensor.stride(axis) > tensor.stride(other)


def _read_rank6(tensor: torch.Tensor, evidence: Evidence) -> tuple[torch.Tensor, EngineKVFormat]:
    """``[2, NB, NH, 1, BS, HS]``: heads first with a singleton that one backend wants."""
    if tensor.shape[0] != 2 or tensor.shape[3] != 1:
        raise UnsupportedLayoutError(
            f"{evidence.label}: {_shape_of(tensor)} is not [2, NB, NH, 1, BS, HS]"
        )
    evidence.check_slots(tensor.shape[4])
    return tensor, EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS


def _read_planes(entry: Sequence[Any], evidence: Evidence) -> tuple[Any, EngineKVFormat]:
    """A tuple of planes per layer: (K, V), or latents of one head (latent, rope, indexer)."""
    if not entry or any(not isinstance(p, torch.Tensor) or p.ndim != 4 for p in entry):
        raise UnsupportedLayoutError(
            f"{evidence.label}: a tuple of {[_shape_of(p) for p in entry]} is no cache; recurrent "
            "state ([conv, ssm]) must go through apply_kv_cache_group_edits first"
        )
    planes = []
    for plane in entry:
        slots, heads, _ = order_axes(plane, 1, 2, evidence)
        planes.append(plane.permute(0, slots, heads, 3))
    one_head = all(plane.shape[2] == 1 for plane in planes)
    widths = {plane.shape[3] for plane in planes}
    if one_head and (len(planes) in (1, 3) or len(widths) > 1):
        return tuple(planes), EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS
    if len(planes) == 2 and len(widths) == 1:
        return tuple(planes), EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS
    raise UnsupportedLayoutError(
        f"{evidence.label}: planes {[_shape_of(p) for p in entry]} are neither (K, V) nor latents"
    )


def _read_cross_layer(
    tensor: torch.Tensor, hints: LayoutHints, order: str | None
) -> tuple[torch.Tensor, list[EngineKVFormat]]:
    """``[NB, NL, 2, ...]``: one tensor of all layers, slots and heads in either order."""
    if tensor.ndim != 6 or tensor.shape[2] != 2:
        raise UnsupportedLayoutError(
            f"one tensor of all layers is [NB, NL, 2, BS, NH, HS], not {_shape_of(tensor)}"
        )
    evidence = Evidence(
        order=order,
        slots=value_for_layer(hints.slots_per_block[:1], 0, 1, "slots_per_block") or 0,
        tokens=value_for_layer(hints.tokens_per_block[:1], 0, 1, "tokens_per_block") or 0,
        label="cross-layer cache",
    )
    slots, heads, heads_first = order_axes(tensor, 3, 4, evidence)
    layers = tensor.shape[1]
    if heads_first:
        caches = tensor.permute(0, 1, 2, heads, slots, 5)
        return caches, [EngineKVFormat.NB_NL_TWO_NH_BS_HS] * layers
    caches = tensor.permute(0, 1, 2, slots, heads, 5)
    return caches, [EngineKVFormat.NB_NL_TWO_BS_NH_HS] * layers


def _shape_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"shape {tuple(value.shape)}, strides {tuple(value.stride())}"
    return type(value).__name__
