"""vLLM's cache config and registered tensors as infos, hints and edited caches.

The only readers of vLLM's fields are this module, ``kv_cache_specs`` and
``kv_cache_group_edits``; all are importable without vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.errors import GroupMismatchError
from hma_triton.group_view import EXCLUDED_ENGINE_GROUP, EngineGroupInfo
from hma_triton.integration.vllm.kv_cache_group_edits import (
    edit_caches,
    validate_kv_cache_groups,
)
from hma_triton.integration.vllm.kv_cache_specs import (
    declared_slots,
    get_tokens_per_block,
    groups_of,
    is_cacheable_group,
    is_recurrent,
    layer_spec,
    leaf_specs,
    live_page_bytes,
    window_tokens,
)
from hma_triton.kv_format import EngineKVFormat, FormattedCaches
from hma_triton.kv_layer_groups import group_layers_by_identity
from hma_triton.layout_hints import LayoutHints, as_layout_hints

__all__ = [
    "VllmGroup",
    "VllmRegistration",
    "create_engine_group_infos_from_vllm",
    "describe_groups",
    "get_tokens_per_block",
    "layout_of",
    "register_from_vllm",
]

# vLLM's block pool takes its first block as the null block of every group
VLLM_NULL_BLOCK_ID = 0


@dataclass(frozen=True, slots=True)
class VllmGroup:
    """One engine group as vLLM declares it, known without tensors (the scheduler's view).

    ``tokens_per_block`` is 0 for a group that keeps nothing; ``window_tokens`` None is full
    attention.
    """

    engine_group_id: int
    layer_names: tuple[str, ...]
    tokens_per_block: int
    window_tokens: int | None
    is_recurrent: bool
    is_cacheable: bool
    is_draft: bool
    null_block_id: int | None = VLLM_NULL_BLOCK_ID


@dataclass(frozen=True, slots=True)
class VllmRegistration:
    """All that a worker registers: edited caches by name, infos, hints, and the groups."""

    kv_caches: dict[str, Any]
    infos: tuple[EngineGroupInfo, ...]
    layout_hints: LayoutHints
    groups: tuple[VllmGroup, ...]


@dataclass(frozen=True, slots=True)
class _LayerFacts:
    """What a spec says of one registered layer."""

    engine_group_id: int
    slots: int
    window_tokens: int
    is_recurrent: bool


def layout_of(kv_cache_config: Any) -> str | None:
    """The memory layout that the engine resolved, None when it names none."""
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    return None if layout is None else str(getattr(layout, "name", layout))


def describe_groups(kv_cache_config: Any, dcp_size: int = 1) -> tuple[VllmGroup, ...]:
    """Every engine group of the config, cacheable or not, in engine-group order.

    Raises:
        UnsupportedLayoutError: a group that cannot be served.
        GroupMismatchError: a group whose layers differ in window or recurrence.
    """
    validate_kv_cache_groups(kv_cache_config)
    return tuple(
        _describe_group(index, group, dcp_size)
        for index, group in enumerate(groups_of(kv_cache_config))
    )


def _describe_group(index: int, group: Any, dcp_size: int) -> VllmGroup:
    cacheable = is_cacheable_group(group)
    leaves = leaf_specs(group.kv_cache_spec) if cacheable else []
    windows = {window_tokens(leaf) for leaf in leaves}
    recurrence = {is_recurrent(leaf) for leaf in leaves}
    if len(windows) > 1 or len(recurrence) > 1:
        raise GroupMismatchError(
            f"group {index}: its layers differ in window {sorted(windows)} or recurrence "
            f"{sorted(recurrence)}, so one block of it has no single rule"
        )
    window = windows.pop() if windows else -1
    return VllmGroup(
        engine_group_id=index,
        layer_names=tuple(group.layer_names),
        tokens_per_block=get_tokens_per_block(group.kv_cache_spec, dcp_size) if cacheable else 0,
        window_tokens=window if window > 0 else None,
        is_recurrent=recurrence == {True},
        is_cacheable=cacheable,
        is_draft=bool(getattr(group, "is_eagle_group", False)),
    )


def register_from_vllm(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    *,
    kv_layout: str | None = None,
    dcp_size: int = 1,
) -> VllmRegistration:
    """Edits, infos and hints of one worker, in that order.

    ``kv_layout`` is for engines whose config names no layout.

    Raises:
        GeometryError: anything that cannot be served, named with its group or layer.
    """
    hints = LayoutHints(kv_layout=layout_of(kv_cache_config) or kv_layout)
    edited, labels = edit_caches(kv_cache_config, kv_caches, hints)
    hints = _with_declared_slots(kv_cache_config, edited, hints)
    hints = msgspec.structs.replace(hints, edits=tuple(labels.values()))
    infos = create_engine_group_infos_from_vllm(kv_cache_config, edited, hints, dcp_size)
    _check_num_blocks(kv_cache_config, edited)
    groups = describe_groups(kv_cache_config, dcp_size)
    return VllmRegistration(edited, tuple(infos), hints, groups)


def create_engine_group_infos_from_vllm(
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    layout_hints: LayoutHints | Mapping[str, Any] | str | None = None,
    dcp_size: int = 1,
) -> list[EngineGroupInfo]:
    """One info per kernel group, ordered by first layer; the order requests will use.

    Args:
        kv_cache_config: vLLM's ``KVCacheConfig``; None or no groups is a single engine group.
        kv_caches: edited caches by layer name, in registration order. Layers in no group share
            another layer's cache and are left out, as are groups that keep nothing.
        layout_hints: names the memory order.
        dcp_size: ranks that share the tokens of a block under decode-context parallelism.

    Raises:
        UnsupportedLayoutError: a group or layout that cannot be served.
        GroupMismatchError: a named layer without a cache, fewer slots than the spec declares, or
            layers of one info that differ in window or recurrence.
        AmbiguousLayoutError: a cache that reads in two ways.
    """
    validate_kv_cache_groups(kv_cache_config)
    groups = groups_of(kv_cache_config)
    facts = _layer_facts(groups, kv_caches)
    hints = _with_declared_slots(kv_cache_config, kv_caches, as_layout_hints(layout_hints))
    members: dict[int, list[int]] = {}
    for layer, fact in facts.items():
        members.setdefault(fact.engine_group_id, []).append(layer)
    caches, formats = normalize_and_discover_per_layer_formats(
        kv_caches, list(members.values()), "vllm", hints
    )
    if not groups:
        parts = group_layers_by_identity(caches, formats)
        return [EngineGroupInfo(0, tuple(layers)) for _, layers in parts]
    _check_page_bytes(groups, kv_caches, caches, formats)
    group_ids = [
        facts[layer].engine_group_id if layer in facts else EXCLUDED_ENGINE_GROUP
        for layer in range(len(formats))
    ]
    return [
        _info(identity.engine_group_idx, layers, groups, facts, dcp_size)
        for identity, layers in group_layers_by_identity(caches, formats, group_ids)
    ]


def _info(
    group_id: int,
    layers: Sequence[int],
    groups: Sequence[Any],
    facts: Mapping[int, _LayerFacts],
    dcp_size: int,
) -> EngineGroupInfo:
    """One info with the rule that its layers share."""
    rules = {(facts[layer].window_tokens, facts[layer].is_recurrent) for layer in layers}
    if len(rules) > 1:
        raise GroupMismatchError(
            f"layers {list(layers)} of group {group_id} are of one kind but differ in (window, "
            f"recurrent): {sorted(rules)}"
        )
    window, recurrent = rules.pop()
    return EngineGroupInfo(
        engine_group_id=group_id,
        layer_indices=tuple(layers),
        tokens_per_block=get_tokens_per_block(groups[group_id].kv_cache_spec, dcp_size),
        sw_size_tokens=window,
        recurrent_state=recurrent,
    )


def _layer_facts(groups: Sequence[Any], kv_caches: Mapping[str, Any]) -> dict[int, _LayerFacts]:
    """Facts of every registered layer of a cacheable group, by layer index.

    Raises:
        GroupMismatchError: a named layer without a cache, or one named by two groups.
    """
    index_of = {name: index for index, name in enumerate(kv_caches)}
    facts: dict[int, _LayerFacts] = {}
    for group_id, group in enumerate(groups):
        if not is_cacheable_group(group):
            continue
        for name in group.layer_names:
            if name not in index_of:
                raise GroupMismatchError(
                    f"group {group_id} names layer {name}: no registered cache has that name"
                )
            layer = index_of[name]
            if layer in facts:
                raise GroupMismatchError(
                    f"layer {name} is in groups {facts[layer].engine_group_id} and {group_id}"
                )
            spec = layer_spec(group.kv_cache_spec, name)
            facts[layer] = _LayerFacts(
                group_id, declared_slots(spec), window_tokens(spec), is_recurrent(spec)
            )
    return facts


def _with_declared_slots(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], hints: LayoutHints
) -> LayoutHints:
    """The hints with the slots that the specs declare; 0 for layers of no group."""
    facts = _layer_facts(groups_of(kv_cache_config), kv_caches)
    if not facts:
        return hints
    slots = tuple(facts[i].slots if i in facts else 0 for i in range(len(kv_caches)))
    return msgspec.structs.replace(hints, slots_per_block=slots)


def _check_page_bytes(
    groups: Sequence[Any],
    kv_caches: Mapping[str, Any],
    caches: Sequence[Any],
    formats: Sequence[EngineKVFormat],
) -> None:
    """Where a spec of vLLM 0.32 gives the live bytes of a page, the tensor must have them.

    This is what notices a packed layout that nobody declared.

    Raises:
        GroupMismatchError: names the layer and both numbers.
    """
    index_of = {name: index for index, name in enumerate(kv_caches)}
    for group_id, group in enumerate(groups):
        if not is_cacheable_group(group):
            continue
        for name in group.layer_names:
            spec, layer = layer_spec(group.kv_cache_spec, name), index_of[name]
            if not (hasattr(spec, "unpadded_page_size_bytes") or is_recurrent(spec)):
                continue
            expected = live_page_bytes(spec)
            found = _page_bytes(caches[layer], formats[layer])
            if expected is not None and found != expected:
                raise GroupMismatchError(
                    f"group {group_id}, layer {name}: a block of the tensor has {found} live "
                    f"bytes, the spec declares {expected}"
                )


def _page_bytes(cache: Any, fmt: EngineKVFormat) -> int:
    """Live bytes of one layer's block."""
    view = FormattedCaches([cache], fmt)
    return view.pages(0).page_bytes


def _check_num_blocks(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """Every edited tensor must have as many blocks as the engine hands out ids for.

    Raises:
        GroupMismatchError: a tensor with more or fewer blocks.
    """
    num_blocks = getattr(kv_cache_config, "num_blocks", None)
    if not isinstance(num_blocks, int):
        return
    for group_id, group in enumerate(groups_of(kv_cache_config)):
        if not is_cacheable_group(group):
            continue
        for name in group.layer_names:
            cache = kv_caches[name]
            if isinstance(cache, torch.Tensor) and num_blocks not in cache.shape[:2]:
                raise GroupMismatchError(
                    f"group {group_id}, layer {name}: shape {tuple(cache.shape)} has no axis of "
                    f"the engine's {num_blocks} blocks"
                )
