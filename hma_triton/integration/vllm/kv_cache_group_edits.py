"""Registered vLLM caches re-viewed at the grain of the engine's block ids.

Two kinds of caches do not show what a block id names. Recurrent state comes as ``[conv, ssm]``
lists or as padded rows. Attention caches whose backend pages at a smaller kernel block come with
more, smaller pages than there are ids. Both are re-viewed over the same storage; the choice rests
on the layer's spec and its tensor alone. Where several kernel pages cannot be one page of token
rows (heads outside slots, K and V apart inside a page, planar pages) the block becomes opaque
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hma_triton.axis_order import Evidence, order_axes
from hma_triton.errors import AmbiguousLayoutError, GroupMismatchError, UnsupportedLayoutError
from hma_triton.integration.vllm.kv_cache_specs import (
    SNAPSHOT_MODES,
    UNSERVED_KINDS,
    declared_slots,
    declares_packed_slots,
    groups_of,
    is_cacheable_group,
    is_recurrent,
    layer_spec,
    leaf_specs,
    live_page_bytes,
    spec_kind,
)
from hma_triton.integration.vllm.page_views import (
    check_same_bytes,
    merged_bytes,
    merged_rows,
    state_page,
)
from hma_triton.kv_format import is_indexer_page
from hma_triton.layout_hints import LayoutHints, as_layout_hints, memory_order


def validate_kv_cache_groups(kv_cache_config: Any) -> None:
    """Check that every group of the config can be served; None passes.

    Raises:
        UnsupportedLayoutError: one error that names every group that cannot, and why.
    """
    problems: list[str] = []
    groups = groups_of(kv_cache_config)
    for index, group in enumerate(groups):
        if not is_cacheable_group(group):
            continue
        reasons = {_why_unserved(spec) for spec in leaf_specs(group.kv_cache_spec)} - {""}
        problems.extend(f"group {index}: {reason}" for reason in sorted(reasons))
    if groups and not any(is_cacheable_group(group) for group in groups):
        problems.append(f"none of the {len(groups)} groups is prefix-cacheable")
    if problems:
        raise UnsupportedLayoutError("these cache groups cannot be served: " + "; ".join(problems))


def _why_unserved(spec: Any) -> str:
    """Why a layer's spec cannot be served; "" when it can."""
    kind, name = spec_kind(spec), type(spec).__name__
    if kind in UNSERVED_KINDS:
        return f"{name} ({kind.replace('_', ' ')}) has no pages of a prefix"
    if kind == "mamba":
        mode = getattr(spec, "mamba_cache_mode", "none")
        if mode not in SNAPSHOT_MODES:
            return (
                f"{name} keeps no state snapshots (mamba_cache_mode {mode!r}, one of "
                f"{', '.join(SNAPSHOT_MODES)} is needed): enable prefix caching"
            )
    elif 0 < getattr(spec, "tokens_per_state", 1) < 1:
        return f"{name} stores several states per token (tokens_per_state {spec.tokens_per_state})"
    return ""


def apply_kv_cache_group_edits(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    layout_hints: LayoutHints | Mapping[str, Any] | str | None = None,
) -> dict[str, Any]:
    """A new dict with the edited views; caches that need no edit are passed through as they are.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``, or None (nothing is edited).
        kv_caches: registered caches by layer name, in registration order.
        layout_hints: names the memory order of the caches.

    Raises:
        UnsupportedLayoutError: a group that cannot be served, or pages that do not lie together.
        GroupMismatchError: kernel pages that do not tile the engine's block exactly.
        AmbiguousLayoutError: a kernel-paged cache that reads in two ways.
    """
    edited, _ = edit_caches(kv_cache_config, kv_caches, layout_hints)
    return edited


def edit_caches(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    layout_hints: LayoutHints | Mapping[str, Any] | str | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Edited caches as :func:`apply_kv_cache_group_edits`, and what was done to each layer."""
    validate_kv_cache_groups(kv_cache_config)
    order = memory_order(as_layout_hints(layout_hints).kv_layout)
    edited, labels = dict(kv_caches), dict.fromkeys(kv_caches, "")
    for index, group in enumerate(groups_of(kv_cache_config)):
        if not is_cacheable_group(group):
            continue
        for name in group.layer_names:
            if name not in kv_caches:
                raise GroupMismatchError(
                    f"group {index} names layer {name}: no cache has that name"
                )
            spec = layer_spec(group.kv_cache_spec, name)
            edited[name], labels[name] = _edit(spec, kv_caches[name], order, f"layer {name}")
    return edited, labels


def _edit(spec: Any, cache: Any, order: str | None, label: str) -> tuple[Any, str]:
    """One layer's cache and what was done to it ("" for nothing)."""
    if is_recurrent(spec):
        return _edit_state(spec, cache, label)
    if not isinstance(cache, torch.Tensor) or declares_packed_slots(spec):
        return cache, ""
    slots = declared_slots(spec)
    if cache.ndim not in (3, 4, 5) or slots == 0:
        return cache, ""
    return _edit_kernel_pages(spec, cache, slots, order, label)


def _edit_state(spec: Any, cache: Any, label: str) -> tuple[torch.Tensor, str]:
    """Recurrent state as one opaque page per block: a list of states, or a row that is one."""
    if isinstance(cache, (list, tuple)):
        page = state_page(cache, getattr(spec, "page_size_bytes", None), label)
        return check_same_bytes(cache[0], page, label), "state list as bytes"
    if not isinstance(cache, torch.Tensor) or cache.ndim != 4 or cache.shape[1:3] != (1, 1):
        shape = tuple(cache.shape) if isinstance(cache, torch.Tensor) else type(cache).__name__
        raise UnsupportedLayoutError(
            f"{label}: recurrent state is [NB, 1, 1, row] or a list of states, not {shape}"
        )
    page_bytes = getattr(spec, "page_size_bytes", None)
    row_bytes = cache.shape[3] * cache.element_size()
    if isinstance(page_bytes, int) and row_bytes > page_bytes:
        raise GroupMismatchError(
            f"{label}: a state row of {row_bytes} bytes in a page of {page_bytes} bytes"
        )
    if cache.dtype == torch.uint8:
        return check_same_bytes(cache, cache.view(torch.int8), label), "state row as bytes"
    return cache, ""


def _edit_kernel_pages(
    spec: Any, cache: torch.Tensor, slots: int, order: str | None, label: str
) -> tuple[torch.Tensor, str]:
    """Kernel pages as blocks of ``slots``; the cache itself when its pages are the blocks."""
    block_axis, kv_axis = _leading_axes(cache, label)
    page_bytes = cache.select(block_axis, 0).numel() * cache.element_size()
    block_bytes = live_page_bytes(spec)
    if block_bytes == page_bytes:
        return cache, ""
    declared = _kernel_slots(slots, page_bytes, block_bytes)
    slot_axis, head_axis, heads_outside = _middle_axes(cache, order, declared, slots, label)
    kernel_slots = cache.shape[slot_axis]
    if kernel_slots == slots:
        return cache, ""
    ratio = _tiles(cache, block_axis, kernel_slots, slots, page_bytes, block_bytes, label)
    apart = kv_axis is not None and cache.stride(kv_axis) > cache.stride(block_axis)
    _check_back_to_back(cache, block_axis, kv_axis if apart else None, label)
    one_head = head_axis is None or cache.shape[head_axis] == 1
    is_planar = one_head and is_indexer_page(cache)
    if (kv_axis is None or apart) and not heads_outside and not is_planar:
        view = merged_rows(cache, block_axis, slot_axis, ratio)
        return check_same_bytes(cache, view, label), f"kernel pages of {kernel_slots} as rows"
    view = merged_bytes(cache, block_axis, slots, ratio, kv_axis if apart else None)
    return check_same_bytes(cache, view, label), f"kernel pages of {kernel_slots} as bytes"


def _kernel_slots(slots: int, page_bytes: int, block_bytes: int | None) -> int:
    """Slots of a kernel page by the bytes of a block, 0 where they do not tell."""
    ratio, rest = divmod(block_bytes or 0, page_bytes)
    return slots // ratio if ratio and not rest and slots % ratio == 0 else 0


def _leading_axes(cache: torch.Tensor, label: str) -> tuple[int, int | None]:
    """``(block axis, K/V axis)`` of a rank 3, 4 or 5 cache."""
    if cache.ndim < 5:
        return 0, None
    pairs = [axis for axis in (0, 1) if cache.shape[axis] == 2]
    if not pairs:
        raise UnsupportedLayoutError(
            f"{label}: shape {tuple(cache.shape)} has no K/V axis in front"
        )
    if len(pairs) == 2:
        raise AmbiguousLayoutError(
            f"{label}: shape {tuple(cache.shape)} is both [2, pages, ...] and [pages, 2, ...]"
        )
    return 1 - pairs[0], pairs[0]


def _middle_axes(
    cache: torch.Tensor, order: str | None, kernel_slots: int, block_slots: int, label: str
) -> tuple[int, int | None, bool]:
    """``(slots axis, heads axis, heads lie outside)``; rank 3 has no heads."""
    if cache.ndim == 3:
        return 1, None, False
    evidence = Evidence(order=order, slots=kernel_slots, tokens=block_slots, label=label)
    slot_axis, head_axis, outside = order_axes(cache, cache.ndim - 3, cache.ndim - 2, evidence)
    return slot_axis, head_axis, outside and cache.shape[head_axis] > 1


def _tiles(
    cache: torch.Tensor,
    block_axis: int,
    kernel_slots: int,
    slots: int,
    page_bytes: int,
    block_bytes: int | None,
    label: str,
) -> int:
    """Kernel pages per block.

    Raises:
        GroupMismatchError: they do not tile the block in slots, bytes and number.
    """
    ratio, rest = divmod(slots, kernel_slots)
    pages = cache.shape[block_axis]
    if rest or ratio < 1 or pages % ratio:
        raise GroupMismatchError(
            f"{label}: {pages} kernel pages of {kernel_slots} slots do not tile blocks of {slots} "
            f"slots (shape {tuple(cache.shape)})"
        )
    if block_bytes is not None and ratio * page_bytes != block_bytes:
        raise GroupMismatchError(
            f"{label}: {ratio} kernel pages of {page_bytes} bytes are {ratio * page_bytes} bytes, "
            f"the spec declares {block_bytes} bytes per block: a packed layout nobody declared"
        )
    return ratio


def _check_back_to_back(
    cache: torch.Tensor, block_axis: int, outer_axis: int | None, label: str
) -> None:
    """Kernel pages must lie without holes, or a block is no single extent."""
    inside = [axis for axis in range(cache.ndim) if axis not in (block_axis, outer_axis)]
    expected = 1
    for axis in sorted(inside, key=lambda a: cache.stride(a)):
        if cache.shape[axis] > 1 and cache.stride(axis) != expected:
            expected = -1
            break
        expected *= cache.shape[axis]
    if cache.stride(block_axis) != expected:
        raise UnsupportedLayoutError(
            f"{label}: kernel pages do not lie back to back (shape {tuple(cache.shape)}, strides "
            f"{tuple(cache.stride())}), so a block of several is no single extent"
        )
