"""Every recorded model and variant: conversion, edits, manager, and its bytes there and back."""

from __future__ import annotations

import pytest
import torch

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.engine import TransferEngine
from hma_triton.errors import ConfigError, UnsupportedLayoutError
from hma_triton.geometries import (
    Geometry,
    GroupGeometry,
    build_cache_config,
    build_pool,
    build_raw_caches,
    list_geometries,
    list_variants,
    load_geometry,
)
from hma_triton.group_view import engine_group_layer_indices
from hma_triton.integration.vllm.kv_cache_groups import register_from_vllm
from hma_triton.kv_layer_groups import KernelGroupInfo, KVLayerGroupsManager
from hma_triton.plan import kept_blocks
from hma_triton.units import lcm

ALL = [(name, variant) for name in list_geometries() for variant in list_variants(name)]
# heads outside the blocks, layers inside the heads, state without snapshots
REFUSED = ("LHBNC", "BHLNC", "noprefix")
SERVED = [case for case in ALL if not case[1].endswith(REFUSED)]
# what the backends of Blackwell and one fp8 model page at a smaller kernel block
KERNEL_PAGED = {
    ("gemma-4-31b-it-nvfp4", "main"): "kernel pages of 64 as rows",
    ("granite-4.0-h-small", "cuda100"): "kernel pages of 16 as bytes",
    ("kimi-linear-48b-a3b-instruct", "cuda100"): "kernel pages of 64 as rows",
    ("qwen3-next-80b-a3b-instruct", "cuda100"): "kernel pages of 32 as bytes",
    ("qwen3.5-0.8b", "cuda100"): "kernel pages of 32 as bytes",
    ("qwen3.5-35b-a3b", "cuda100"): "kernel pages of 32 as bytes",
}


def test_all_recorded_models_are_here() -> None:
    assert len(list_geometries()) == 36
    assert len(ALL) == 105
    assert len(SERVED) == 98


def owner_of(geometry: Geometry) -> dict[str, GroupGeometry]:
    return {name: group for group in geometry.groups for name in group.layer_names}


def managed(geometry: Geometry, num_blocks: int) -> tuple[list[str], KVLayerGroupsManager]:
    """Layer names and the manager, over tensors without storage."""
    caches, infos, hints = build_pool(geometry, num_blocks, "meta")
    layers, formats = normalize_and_discover_per_layer_formats(
        caches, engine_group_layer_indices(infos), "vllm", hints
    )
    chunk = lcm(*(group.tokens_per_block for group in geometry.groups))
    return list(caches), KVLayerGroupsManager(layers, formats, infos, chunk, True)


@pytest.mark.parametrize(("name", "variant"), SERVED)
def test_groups_and_live_bytes_are_the_recorded_ones(name: str, variant: str) -> None:
    geometry = load_geometry(name, variant)
    names, manager = managed(geometry, num_blocks=3)
    owners = owner_of(geometry)
    covered: list[str] = []
    for group in manager.kernel_groups:
        members = [names[layer] for layer in group.layer_indices]
        covered += members
        for member in members:
            check_layer(group, owners[member])
    # every layer that owns a cache, once; layers that share one are left out
    assert sorted(covered) == sorted(owners)
    assert len(names) == geometry.num_registered == len(owners) + len(geometry.shared_layers)
    assert {g.engine_group_idx for g in manager.kernel_groups} == {
        g.engine_group_id for g in geometry.groups
    }
    found = {g.window_tokens for g in manager.object_groups if not g.recurrent}
    assert found == {g.window_tokens for g in geometry.groups if g.mamba_cache_mode is None}
    assert sum(g.recurrent for g in manager.object_groups) <= 1


def check_layer(group: KernelGroupInfo, recorded: GroupGeometry) -> None:
    assert group.engine_group_idx == recorded.engine_group_id
    assert group.tokens_per_block == recorded.tokens_per_block
    assert group.slots_per_block == recorded.slots_per_block
    assert group.layer_page_bytes == recorded.live_bytes
    assert group.shape_desc.nb == 3
    assert group.recurrent_state == (recorded.mamba_cache_mode is not None)
    if not group.recurrent_state:
        assert group.window_tokens == recorded.window_tokens


@pytest.mark.parametrize(("name", "variant"), sorted(set(ALL) - set(SERVED)))
def test_what_cannot_be_served_is_refused_by_name(name: str, variant: str) -> None:
    geometry = load_geometry(name, variant)
    why = {
        "LHBNC": "LHBNC is refused: heads lie outside the blocks",
        "BHLNC": "BHLNC is refused: layers lie inside the heads",
        "noprefix": "mamba_cache_mode 'none'",
    }[next(end for end in REFUSED if variant.endswith(end))]
    with pytest.raises(UnsupportedLayoutError, match=why):
        build_pool(geometry, 3, "meta")


@pytest.mark.parametrize(("name", "variant"), SERVED)
def test_kernel_paged_caches_go_through_the_edits_and_no_others(name: str, variant: str) -> None:
    geometry = load_geometry(name, variant)
    raw = build_raw_caches(geometry, 3, "meta")
    registered = register_from_vllm(build_cache_config(geometry, 3), raw)
    edits = set(registered.layout_hints.edits) - {""}
    assert edits == {KERNEL_PAGED[name, variant]} if (name, variant) in KERNEL_PAGED else not edits
    owners = owner_of(geometry)
    for layer, edit in zip(raw, registered.layout_hints.edits, strict=True):
        is_paged = layer in owners and owners[layer].kernel_pages > 1
        assert (registered.kv_caches[layer] is not raw[layer]) == is_paged == bool(edit)


POISON = 0xEE
POISON_WORD = int.from_bytes(bytes([POISON] * 8), "little", signed=True)


def block_of(cache: torch.Tensor, group: GroupGeometry, block_id: int) -> torch.Tensor:
    """A block's live bytes by the registered tensor's own axes."""
    first = block_id * group.kernel_pages
    return cache[first : first + group.kernel_pages]


@pytest.mark.parametrize(("name", "variant"), SERVED)
def test_the_bytes_of_every_group_come_back_and_no_others_change(name: str, variant: str) -> None:
    geometry = load_geometry(name, variant)
    chunk = lcm(*(group.tokens_per_block for group in geometry.groups))
    kept = {
        group.engine_group_id: kept_blocks(
            group.tokens_per_block,
            group.window_tokens,
            group.mamba_cache_mode is not None,
            chunk,
        )
        for group in geometry.groups
    }
    most = max(kept.values())
    num_blocks = 1 + 2 * most
    raw = build_raw_caches(geometry, num_blocks)
    words = torch.empty(0, dtype=torch.int64).set_(next(iter(raw.values())).untyped_storage())
    registered = register_from_vllm(build_cache_config(geometry, num_blocks), raw)
    engine = TransferEngine(
        registered.kv_caches,
        registered.infos,
        layout_hints=registered.layout_hints,
        chunk_tokens=chunk,
        backend="reference",
    )
    # bytes that differ from place to place
    torch.arange(words.numel(), out=words).mul_(-7046029254386353131)
    sources = ids_per_info(engine, kept, first=1)
    objects = [
        [torch.empty(engine.object_nbytes(group), dtype=torch.uint8)]
        for group in range(engine.manager.num_object_groups)
    ]
    result = engine.store(sources, objects)
    owners = owner_of(geometry)
    assert result.nbytes == sum(g.live_bytes * kept[g.engine_group_id] for g in owners.values())
    wanted = {
        layer: [block_of(raw[layer], g, 1 + i).clone() for i in range(kept[g.engine_group_id])]
        for layer, g in owners.items()
    }
    words.fill_(POISON_WORD)
    targets = ids_per_info(engine, kept, first=1 + most)
    for engine_group in sorted(kept):
        # groups lie over each other, so one at a time
        ids = [
            own if info.engine_group_id == engine_group else [0] * len(own)
            for info, own in zip(registered.infos, targets, strict=True)
        ]
        engine.retrieve(ids, objects)
        for layer, group in owners.items():
            if group.engine_group_id == engine_group:
                for i, page in enumerate(wanted[layer]):
                    there = block_of(raw[layer], group, 1 + most + i)
                    assert torch.equal(there.view(torch.uint8), page.view(torch.uint8)), (layer, i)
        for layer, group in owners.items():
            if group.engine_group_id == engine_group:
                for i in range(len(wanted[layer])):
                    block_of(raw[layer], group, 1 + most + i).view(torch.uint8).fill_(POISON)
    assert bool(words.eq(POISON_WORD).all())
    engine.close()


def ids_per_info(engine: TransferEngine, kept: dict[int, int], first: int) -> list[list[int]]:
    """One chunk's ids per info: nulls, then the blocks that are kept."""
    tables = []
    for info in engine.engine_group_infos:
        own = kept[info.engine_group_id]
        blocks = engine.chunk_tokens // info.tokens_per_block
        tables.append([0] * (blocks - own) + list(range(first, first + own)))
    return tables


def test_names_may_be_short_and_must_be_clear() -> None:
    assert load_geometry("google/gemma-3-27b-it").model == "google/gemma-3-27b-it"
    assert load_geometry("gemma-3-27b").model == "google/gemma-3-27b-it"
    assert load_geometry("Qwen3.5-0.8B", "cuda100").platform.startswith("CUDA SM100")
    with pytest.raises(ConfigError, match="gemma-3-27b-it"):
        load_geometry("gemma-3")
    with pytest.raises(ConfigError, match="no geometry"):
        load_geometry("no-such-model")
    with pytest.raises(ConfigError, match="cuda90_BLNHC"):
        load_geometry("gemma-3-27b", "cuda1000")
