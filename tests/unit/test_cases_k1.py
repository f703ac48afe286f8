"""Field cases of kind K1: a layout or format read wrongly. Numbers are those of the case list."""

from __future__ import annotations

import time

import pytest
import torch
from support.round_trips import POISON, RoundTrip, as_bytes, byte_storage, fill_with_noise

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.errors import AmbiguousLayoutError, GroupMismatchError, UnsupportedLayoutError
from hma_triton.geometries import stand_ins
from hma_triton.group_view import EngineGroupInfo
from hma_triton.integration.vllm.kv_cache_group_edits import apply_kv_cache_group_edits
from hma_triton.integration.vllm.kv_cache_groups import (
    create_engine_group_infos_from_vllm,
    register_from_vllm,
)
from hma_triton.kv_format import EngineKVFormat, FormattedCaches, layer_pages
from hma_triton.kv_layer_groups import KVLayerGroupsManager


def attention_spec(block: int, heads: int, page_bytes: int) -> stand_ins.FullAttentionSpec:
    return stand_ins.FullAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=1,
        dtype=torch.bfloat16,
        num_states=block,
        unpadded_page_size_bytes=page_bytes,
        page_size_bytes=page_bytes,
    )


def config_of(*groups: tuple[list[str], object], blocks: int = 0) -> stand_ins.KVCacheConfig:
    return stand_ins.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_groups=[
            stand_ins.KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)
            for names, spec in groups
        ],
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("heads", [1, 2, 32])
def test_case_1_kernel_pages_are_folded_into_the_managers_block(heads: int, layout: str) -> None:
    content, kernel, block = 6, 8, 32
    # memory order by the hint; the shape is always [pages, heads, slots, content]
    if layout == "NHD":
        pool = torch.zeros(12, kernel, heads, content, dtype=torch.bfloat16).transpose(1, 2)
    else:
        pool = torch.zeros(12, heads, kernel, content, dtype=torch.bfloat16)
    fill_with_noise(pool)
    page_bytes = block * heads * content * 2
    config = config_of((["a"], attention_spec(block, heads, page_bytes)), blocks=3)
    registered = register_from_vllm(config, {"a": pool}, kv_layout=layout)
    trip = RoundTrip(
        registered.kv_caches,
        registered.infos,
        layout_hints=registered.layout_hints,
        chunk_tokens=block,
    )
    group = trip.engine.manager.kernel_groups[0]
    assert (group.slots_per_block, group.tokens_per_block, group.shape_desc.nb) == (32, 32, 3)
    trip.store([1])
    # manager block 1 is kernel pages 4 to 7, whatever lies inside them
    stored = trip.objects[0][0]
    assert torch.equal(stored, byte_storage(pool)[page_bytes : 2 * page_bytes])
    wanted = as_bytes(pool[4:8])
    byte_storage(pool).fill_(POISON)
    trip.retrieve([2])
    assert torch.equal(as_bytes(pool[8:12]), wanted)
    assert bool((byte_storage(pool)[: 2 * page_bytes] == POISON).all())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_case_2_fused_content_is_one_row_of_heads_times_content(layout: str) -> None:
    blocks, heads, block, head = 6, 4, 16, 8
    inner = (block, heads) if layout == "NHD" else (heads, block)
    pool = torch.zeros(blocks, *inner, 2 * head, dtype=torch.uint8)
    by_token = pool if layout == "NHD" else pool.transpose(1, 2)
    fill_with_noise(pool)
    keys, values = by_token[..., :head].clone(), by_token[..., head:].clone()
    trip = RoundTrip([pool], layout_hints=layout, chunk_tokens=32)
    assert trip.engine.manager.kernel_groups[0].hidden_dim_size == heads * 2 * head
    trip.store([3, 1])
    byte_storage(pool).fill_(POISON)
    trip.retrieve([5, 0])
    for source, target in ((3, 5), (1, 0)):
        assert torch.equal(by_token[target, ..., :head], keys[source])
        assert torch.equal(by_token[target, ..., head:], values[source])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("shape", [(5, 1, 128, 256), (5, 128, 1, 256)])
def test_case_4_a_single_head_is_never_taken_for_the_block(
    shape: tuple[int, ...], layout: str, transposed: bool
) -> None:
    pool = torch.zeros(shape, dtype=torch.bfloat16)
    if transposed:
        other = (shape[0], shape[2], shape[1], shape[3])
        pool = torch.zeros(other, dtype=torch.bfloat16).transpose(1, 2)
    for hints in ({"kv_layout": layout, "slots_per_block": 128}, {"slots_per_block": 128}):
        caches, formats = normalize_and_discover_per_layer_formats([pool], [], "vllm", hints)
        found = FormattedCaches(caches, formats[0])
        assert (found.num_blocks(), found.block_size(), found.num_heads()) == (5, 128, 1)
        assert caches[0].data_ptr() == pool.data_ptr()
    # without the declared block there are two readings; both are named
    with pytest.raises(AmbiguousLayoutError, match="128 slots of 1 heads") as refused:
        normalize_and_discover_per_layer_formats([pool], [], "vllm")
    assert "1 slots of 128 heads" in str(refused.value)


def test_case_5_two_ranks_in_one_registration() -> None:
    caches = {
        f"layers.{i}": torch.zeros(5, 2, 8, 8) if i % 2 == 0 else torch.zeros(5, 8, 4)
        for i in range(5)
    }
    started = time.monotonic()
    layers, formats = normalize_and_discover_per_layer_formats(
        caches, [], "vllm", {"kv_layout": "HND"}
    )
    manager = KVLayerGroupsManager(layers, formats, (), 8)
    assert time.monotonic() - started < 1
    assert [g.layer_indices for g in manager.kernel_groups] == [(0, 2, 4), (1, 3)]
    assert [g.shape_desc.hs for g in manager.kernel_groups] == [8, 4]


def test_case_7_an_explicit_hint_wins_on_the_cpu_too() -> None:
    pool = torch.zeros(4, 16, 1, 24)
    fill_with_noise(pool)
    trip = RoundTrip([pool], layout_hints="NHD", chunk_tokens=32)
    group = trip.engine.manager.kernel_groups[0]
    assert (group.slots_per_block, group.shape_desc.nh) == (16, 1)
    before = pool.clone()
    trip.store([2, 0])
    byte_storage(pool).fill_(POISON)
    trip.retrieve([1, 3])
    assert torch.equal(as_bytes(pool[1]), as_bytes(before[2]))
    assert torch.equal(as_bytes(pool[3]), as_bytes(before[0]))
    with pytest.raises(AmbiguousLayoutError):
        normalize_and_discover_per_layer_formats([pool], [], "vllm")


@pytest.mark.parametrize("stated", ["NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_BS_NH_HS"])
def test_case_8_keys_first_and_blocks_first_are_never_told_by_a_length(stated: str) -> None:
    keys_first = stated.startswith("NL_X_TWO")
    four = torch.zeros((2, 4, 8, 2, 4) if keys_first else (4, 2, 8, 2, 4))
    _, formats = normalize_and_discover_per_layer_formats([four], [], "vllm", "NHD")
    assert formats == [EngineKVFormat[stated]]
    two = torch.zeros(2, 2, 8, 2, 4)
    fill_with_noise(two)
    trip = RoundTrip([two], layout_hints={"kv_layout": "NHD", "formats": stated}, chunk_tokens=8)
    before = two.clone()
    trip.store([1])
    byte_storage(two).fill_(POISON)
    trip.retrieve([0])
    for plane in (0, 1):
        at = (plane, 0) if keys_first else (0, plane)
        was = (plane, 1) if keys_first else (1, plane)
        assert torch.equal(as_bytes(two[at]), as_bytes(before[was]))
        other = (plane, 1) if keys_first else (1, plane)
        assert bool((as_bytes(two[other]) == POISON).all())
    with pytest.raises(AmbiguousLayoutError, match=r"\[2, NB=2, ...\] and \[NB=2, 2, ...\]"):
        normalize_and_discover_per_layer_formats([two], [], "vllm", "NHD")


def test_case_10_a_list_of_keys_then_values_stays_whole() -> None:
    flat = [torch.zeros(21, 2, 4) for _ in range(10)]
    hints = {"kv_list_layout": "k_v", "tokens_per_block": 3}
    caches, formats = normalize_and_discover_per_layer_formats(flat, [], "sglang", hints)
    assert [len(part) for part in caches] == [5, 5]
    assert {tuple(t.shape) for part in caches for t in part} == {(7, 3, 2, 4)}
    assert formats == [EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS] * 5
    pages = layer_pages(formats[0], caches)
    assert [p.address for p in pages[3].planes] == [flat[3].data_ptr(), flat[8].data_ptr()]
    manager = KVLayerGroupsManager(caches, formats, (), 3)
    assert [g.layer_indices for g in manager.kernel_groups] == [(0, 1, 2, 3, 4)]


def test_case_11_one_engine_group_of_two_layouts() -> None:
    main = {f"main.{i}": torch.zeros(2, 32, 16, 8, 64, dtype=torch.bfloat16) for i in (0, 1)}
    index = {f"idx.{i}": torch.zeros(32, 16, 128, dtype=torch.bfloat16) for i in (0, 1)}
    specs = {name: OldSpec(block_size=128, compress_ratio=8) for name in (*main, *index)}
    uniform = stand_ins.UniformTypeKVCacheSpecs(block_size=128, kv_cache_specs=specs)
    infos = create_engine_group_infos_from_vllm(
        config_of((list(specs), uniform)), {**main, **index}, "NHD"
    )
    assert [info.layer_indices for info in infos] == [(0, 1), (2, 3)]
    assert [info.engine_group_id for info in infos] == [0, 0]
    assert [info.tokens_per_block for info in infos] == [128, 128]
    caches, formats = normalize_and_discover_per_layer_formats(
        {**main, **index}, [[0, 1, 2, 3]], "vllm", "NHD"
    )
    manager = KVLayerGroupsManager(caches, formats, infos, 128)
    assert [g.shape_desc.kv_size for g in manager.kernel_groups] == [2, 1]
    assert [g.shape_desc.nh for g in manager.kernel_groups] == [8, 1]
    assert [g.slots_per_block for g in manager.kernel_groups] == [16, 16]


class FullAttentionSpec:
    """An older vLLM's spec: a class of this name with the fields given."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


OldSpec = FullAttentionSpec


@pytest.mark.parametrize("layout", ["NHD", "LBNHC", "HND", "LBHNC", "BLNHC", "BLHNC"])
def test_case_13_both_spellings_of_every_served_layout(layout: str) -> None:
    heads_outside = layout in ("HND", "LBHNC", "BLHNC")
    pool = torch.zeros(3, 2, 4, 6) if heads_outside else torch.zeros(3, 4, 2, 6).transpose(1, 2)
    caches, formats = normalize_and_discover_per_layer_formats([pool], [], "vllm", layout)
    found = FormattedCaches(caches, formats[0])
    assert (found.block_size(), found.num_heads()) == (4, 2)
    wanted = "NL_X_NB_NH_BS_CS" if heads_outside else "NL_X_NB_BS_NH_CS"
    assert formats == [EngineKVFormat[wanted]]


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("LHBNC", "LHBNC is refused: heads lie outside the blocks"),
        ("BHLNC", "BHLNC is refused: layers lie inside the heads"),
        ("nhd", "'nhd' is none of .* did you mean 'NHD'"),
        ("lbhnc", "did you mean 'LBHNC'"),
        ("none", "'none' is none of"),
    ],
)
def test_case_13_what_is_refused_is_refused_by_name(layout: str, why: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=why):
        normalize_and_discover_per_layer_formats([torch.zeros(3, 2, 4, 6)], [], "vllm", layout)


def test_case_13_no_hint_is_decided_once_by_strides_and_the_declared_block() -> None:
    pool = torch.zeros(3, 2, 4, 6)
    caches, formats = normalize_and_discover_per_layer_formats(
        [pool], [], "vllm", {"slots_per_block": 4}
    )
    assert formats == [EngineKVFormat.NL_X_NB_NH_BS_CS]
    assert FormattedCaches(caches, formats[0]).num_heads() == 2
    with pytest.raises(AmbiguousLayoutError, match="2 slots of 4 heads and as 4 slots of 2 heads"):
        normalize_and_discover_per_layer_formats([pool], [], "vllm")


def test_case_14_slots_per_block_keep_layers_apart() -> None:
    caches = [torch.zeros(8, 64, 132, dtype=torch.uint8), torch.zeros(8, 2, 132, dtype=torch.uint8)]
    infos = [EngineGroupInfo(0, (0,), 256), EngineGroupInfo(0, (1,), 256)]
    layers, formats = normalize_and_discover_per_layer_formats(caches, [[0, 1]], "vllm")
    manager = KVLayerGroupsManager(layers, formats, infos, 256)
    assert [g.calculate_slots(256) for g in manager.kernel_groups] == [64, 2]
    with pytest.raises(GroupMismatchError, match="1 infos for 2 kernel groups"):
        KVLayerGroupsManager(layers, formats, [EngineGroupInfo(0, (0, 1), 256)], 256)


def test_a_missed_edit_looks_like_compression_and_is_refused() -> None:
    # the same tensor after the edit passes, before it does not
    pool = torch.zeros(12, 2, 8, 6, dtype=torch.bfloat16)
    config = config_of((["a"], attention_spec(32, 2, 32 * 2 * 6 * 2)))
    with pytest.raises(GroupMismatchError, match="8 slots per block, the engine declares 32"):
        create_engine_group_infos_from_vllm(config, {"a": pool}, "HND")
    edited = apply_kv_cache_group_edits(config, {"a": pool}, "HND")
    assert create_engine_group_infos_from_vllm(config, edited, "HND")[0].tokens_per_block == 32
