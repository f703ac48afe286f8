"""Field cases of kind K3: block ids counted in the wrong unit or taken from the wrong group."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from support.round_trips import POISON, RoundTrip, as_bytes, byte_storage, fill_with_noise

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.errors import AlignmentError, BlockIdError, GroupMismatchError
from hma_triton.geometries import stand_ins
from hma_triton.group_view import (
    EXCLUDED_ENGINE_GROUP,
    EngineGroupInfo,
    get_engine_group_indices,
    slice_block_ids_per_group,
)
from hma_triton.integration.vllm.kv_cache_group_edits import apply_kv_cache_group_edits
from hma_triton.integration.vllm.kv_cache_groups import (
    create_engine_group_infos_from_vllm,
    get_tokens_per_block,
    register_from_vllm,
)
from hma_triton.keys import EngineFacts, KeyFields, fingerprint
from hma_triton.kv_layer_groups import KVLayerGroupsManager
from hma_triton.plan import check_chunk_tokens, choose_chunk_tokens


def attention(block: int, heads: int, content: int, **more: Any) -> stand_ins.FullAttentionSpec:
    page = block * heads * content * 2
    return stand_ins.FullAttentionSpec(
        block_size=block,
        num_kv_heads=heads,
        head_size=content,
        dtype=torch.bfloat16,
        num_states=block,
        unpadded_page_size_bytes=page,
        page_size_bytes=page,
        **more,
    )


def mamba(block: int, state_bytes: int) -> stand_ins.MambaSpec:
    return stand_ins.MambaSpec(
        block_size=block,
        shapes=((state_bytes,),),
        dtypes=(torch.int8,),
        page_size_bytes=state_bytes,
        mamba_cache_mode="align",
    )


def config_of(*groups: tuple[list[str], Any], blocks: int = 0) -> stand_ins.KVCacheConfig:
    return stand_ins.KVCacheConfig(
        num_blocks=blocks,
        kv_cache_groups=[
            stand_ins.KVCacheGroupSpec(layer_names=names, kv_cache_spec=spec)
            for names, spec in groups
        ],
    )


def test_case_31_groups_smaller_than_the_base_block() -> None:
    tables = {0: [100], 1: list(range(64)), 2: list(range(32))}
    sliced = slice_block_ids_per_group(tables, [256, 4, 8], 0, 256)
    assert [len(ids) for ids in sliced] == [1, 64, 32]
    assert sliced == [[100], list(range(64)), list(range(32))]
    later = slice_block_ids_per_group({0: list(range(32)), 1: list(range(16))}, [16, 32], 256, 512)
    assert later == [list(range(16, 32)), list(range(8, 16))]


def test_case_32_attention_blocks_span_the_ranks_that_share_them() -> None:
    spans = [get_tokens_per_block(spec, 32) for spec in (attention(16, 1, 1), mamba(2048, 1))]
    assert spans == [512, 2048]
    tables = {0: list(range(10, 18)), 1: [3, 4]}
    assert slice_block_ids_per_group(tables, spans, 0, 4096) == [list(range(10, 18)), [3, 4]]
    with pytest.raises(BlockIdError, match="group 0: 2 block ids of 512 tokens each") as short:
        slice_block_ids_per_group({0: [10, 11], 1: [3, 4]}, spans, 0, 4096)
    assert "4096 are needed" in str(short.value)
    with pytest.raises(AlignmentError, match=r"\[100, 4096\) in engine group 0"):
        slice_block_ids_per_group(tables, spans, 100, 4096)
    caches = {"a": torch.zeros(9, 1, 16, 2, dtype=torch.bfloat16), "m": torch.zeros(9, 1, 1, 4)}
    caches["m"] = caches["m"].to(torch.int8)
    config = config_of((["a"], attention(16, 1, 2)), (["m"], mamba(2048, 4)), blocks=9)
    registered = register_from_vllm(config, caches, kv_layout="HND", dcp_size=32)
    assert [info.tokens_per_block for info in registered.infos] == [512, 2048]
    trip = RoundTrip(
        registered.kv_caches,
        registered.infos,
        layout_hints=registered.layout_hints,
        chunk_tokens=2048,
    )
    manager = trip.engine.manager
    assert [manager.calculate_num_blocks(i, 2048) for i in (0, 1)] == [4, 1]


def test_a_cache_that_is_not_sharded_does_not_grow_with_the_ranks() -> None:
    replicated = attention(16, 1, 1, dcp_sharded=False)
    assert get_tokens_per_block(replicated, 4) == 16
    assert get_tokens_per_block(attention(16, 1, 1), 1) == 16
    scratch = attention(4, 1, 1, prefix_cacheable=False)
    assert get_tokens_per_block(scratch, 4) == 0


def test_case_34_the_chunk_is_the_lcm_of_resolved_spans_and_interleave_is_in_the_key() -> None:
    spans = [get_tokens_per_block(spec, 4) for spec in (attention(2304, 1, 1), mamba(2304, 1))]
    assert spans == [9216, 2304]
    assert choose_chunk_tokens(spans, any_recurrent=True) == 9216
    with pytest.raises(GroupMismatchError, match="nearest valid chunk is 9216"):
        check_chunk_tokens(2304, spans)
    keys = {
        fingerprint(key_fields(EngineFacts(dcp_size=size, dcp_interleave=interleave)))
        for size, interleave in ((4, 1), (4, 2), (2, 1), (2, 2))
    }
    assert len(keys) == 4


def key_fields(facts: EngineFacts) -> KeyFields:
    return KeyFields(
        model_name="model",
        facts=facts,
        world_size=4,
        engine_type="vllm",
        layout_hints={},
        layer_names=("a",),
        kernel_groups=(),
        object_groups=((0,),),
        replicated_object_groups=(),
        object_nbytes=(64,),
        object_layout="opaque",
        chunk_tokens=9216,
    )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_case_35_one_id_is_as_many_kernel_pages_as_the_block_has(layout: str) -> None:
    # ratio 1: ids 5, 6 are pages 5, 6; ratio 2: ids 10, 11 are pages 20 to 23
    whole = torch.zeros(12, 2, 8, 4, dtype=torch.bfloat16)
    paged = torch.zeros(24, 2, 4, 4, dtype=torch.bfloat16)
    if layout == "NHD":
        whole = torch.zeros(12, 8, 2, 4, dtype=torch.bfloat16).transpose(1, 2)
        paged = torch.zeros(24, 4, 2, 4, dtype=torch.bfloat16).transpose(1, 2)
    config = config_of((["whole"], attention(8, 2, 4)), (["paged"], attention(8, 2, 4)), blocks=12)
    caches = {"whole": whole, "paged": paged}
    registered = register_from_vllm(config, caches, kv_layout=layout)
    trip = RoundTrip(
        registered.kv_caches,
        registered.infos,
        layout_hints=registered.layout_hints,
        chunk_tokens=8,
    )
    page = 8 * 2 * 4 * 2
    for spec, block, pages in zip(trip.engine.copy_specs, (6, 11), ((6,), (22, 23)), strict=True):
        pool = (whole, paged)[spec.kernel_group_index]
        at = spec.row_addresses[0] + block * spec.block_stride_bytes
        assert at == pool[pages[0]].data_ptr()
        assert spec.block_bytes == page
        assert at + page == pool[pages[-1]].data_ptr() + page // len(pages)


def test_case_35_a_kernel_page_larger_than_the_block_has_no_ratio() -> None:
    config = config_of((["a"], attention(8, 2, 4)))
    cache = torch.zeros(4, 2, 16, 4, dtype=torch.bfloat16)
    with pytest.raises(GroupMismatchError, match="16 slots do not tile blocks of 8 slots"):
        apply_kv_cache_group_edits(config, {"a": cache}, "HND")


def test_case_35_an_old_payload_counts_slots() -> None:
    old = msgspec.msgpack.encode({"engine_group_id": 0, "layer_indices": [0]})
    info = msgspec.msgpack.decode(old, type=EngineGroupInfo)
    assert info == EngineGroupInfo(0, (0,))
    caches, formats = normalize_and_discover_per_layer_formats([torch.zeros(4, 8, 3)], [], "vllm")
    assert KVLayerGroupsManager(caches, formats, [info], 8).kernel_groups[0].tokens_per_block == 8


def test_case_37_a_chunk_finer_than_a_block_is_refused_with_the_nearest_valid_one() -> None:
    blocks = [12288, 1536]
    with pytest.raises(GroupMismatchError, match="nearest valid chunk is 12288"):
        check_chunk_tokens(1536, blocks)
    check_chunk_tokens(12288, blocks)
    tables = {0: [10, 11, 12, 13], 1: list(range(32))}
    with pytest.raises(AlignmentError, match=r"engine group 0: 36864|\[36864, 43008\)"):
        slice_block_ids_per_group(tables, blocks, 36864, 43008)
    # the aligned range around it
    assert slice_block_ids_per_group(tables, blocks, 36864, 49152) == [[13], list(range(24, 32))]
    with pytest.raises(BlockIdError, match="group 0: 3 block ids"):
        slice_block_ids_per_group({0: [10, 11, 12], 1: tables[1]}, blocks, 36864, 49152)
    with pytest.raises(GroupMismatchError, match="multiples of 960000"):
        check_chunk_tokens(10000, [1536, 10000])


def test_case_38_a_chunk_counts_the_same_tokens_in_every_group() -> None:
    small, large = torch.zeros(6, 1, 4, 10), torch.zeros(6, 1, 8, 6)
    infos = [EngineGroupInfo(0, (0,), 4), EngineGroupInfo(1, (1,), 8)]
    chunk = 2 * 8
    trip = RoundTrip([small, large], infos, layout_hints="HND", chunk_tokens=chunk)
    manager = trip.engine.manager
    assert [manager.calculate_num_blocks(i, chunk) for i in (0, 1)] == [4, 2]
    assert [g.calculate_slots(chunk) for g in manager.kernel_groups] == [16, 16]
    stored = sum(trip.engine.object_nbytes(g) for g in range(manager.num_object_groups))
    assert stored == chunk * (10 + 6) * 4
    fill_with_noise(small, 1)
    fill_with_noise(large, 2)
    before = small.clone(), large.clone()
    trip.store([5, 0, 3, 1], [2, 4])
    byte_storage(small).fill_(POISON)
    byte_storage(large).fill_(POISON)
    trip.retrieve([1, 2, 3, 4], [0, 1])
    assert torch.equal(as_bytes(small[1:5]), as_bytes(before[0][[5, 0, 3, 1]]))
    assert torch.equal(as_bytes(large[0:2]), as_bytes(before[1][[2, 4]]))


@pytest.mark.parametrize(
    ("blocks", "chunk"), [([640, 0, 640], 640), ([400], 400), ([544], 544), ([16, 32], 256)]
)
def test_case_40_the_chunk_rounds_up_to_the_cacheable_groups(blocks: list[int], chunk: int) -> None:
    assert choose_chunk_tokens(blocks, any_recurrent=False) == chunk
    check_chunk_tokens(chunk, blocks)


def test_case_40_no_cacheable_group_is_a_clear_error() -> None:
    with pytest.raises(GroupMismatchError, match=r"no cacheable group.*\[0\]"):
        choose_chunk_tokens([0], any_recurrent=False)


def test_case_41_shared_blocks_below_the_local_hit_keep_their_bytes() -> None:
    pool = torch.zeros(8, 16, 6)
    fill_with_noise(pool)
    trip = RoundTrip([pool], chunk_tokens=64)
    wanted = as_bytes(pool[7])
    trip.store([4, 5, 6, 7])
    byte_storage(pool).fill_(POISON)
    trip.retrieve([0, 1, 2, 3], skip_tokens=48)
    assert torch.equal(as_bytes(pool[3]), wanted)
    assert bool((as_bytes(pool[:3]) == POISON).all())


def test_case_43_the_engines_global_block_size_is_never_read() -> None:
    blocks = (256, 64, 8, 4)
    caches = {f"l{i}": torch.zeros(3, 1, b, 2, dtype=torch.bfloat16) for i, b in enumerate(blocks)}
    specs = [([f"l{i}"], attention(b, 1, 2)) for i, b in enumerate(blocks)]

    def register(global_block: int) -> list[EngineGroupInfo]:
        config = config_of(*specs)
        object.__setattr__(config, "block_size", global_block)
        return create_engine_group_infos_from_vllm(config, caches, "HND")

    assert register(4) == register(256)
    assert [info.tokens_per_block for info in register(4)] == list(blocks)


def test_case_44_a_layer_without_a_cache_of_its_own_is_left_out_and_counted_once() -> None:
    infos = [EngineGroupInfo(0, (0,), 8), EngineGroupInfo(1, (1,), 8)]
    assert get_engine_group_indices(infos, 3) == [0, 1, EXCLUDED_ENGINE_GROUP]
    with pytest.raises(GroupMismatchError, match="names layer 5; 3 layers are registered"):
        get_engine_group_indices([EngineGroupInfo(0, (5,))], 3)
    owner, other = torch.zeros(3, 1, 8, 2), torch.zeros(3, 1, 8, 2)
    own, shared = attention(8, 1, 4), attention(8, 1, 4)
    config = config_of((["owner"], own), (["other"], shared))
    caches = {"owner": owner, "other": other, "alias": owner}
    found = create_engine_group_infos_from_vllm(config, caches, "HND")
    assert [info.layer_indices for info in found] == [(0,), (1,)]
    trip = RoundTrip(caches, found, layout_hints="HND", chunk_tokens=8)
    total = sum(trip.engine.object_nbytes(g) for g in range(len(trip.objects)))
    assert total == 2 * 8 * 2 * 4
    with pytest.raises(GroupMismatchError, match="group 0 names layer gone"):
        create_engine_group_infos_from_vllm(config_of((["gone"], own)), caches, "HND")


def test_the_documented_example_of_expansion() -> None:
    infos = [EngineGroupInfo(0, (0, 2)), EngineGroupInfo(1, (1, 3)), EngineGroupInfo(0, (4,))]
    pools = [torch.full((22, 1, 2, 1), float(i)) for i in range(5)]
    for i, pool in enumerate(pools):
        pool.add_(torch.arange(22).view(22, 1, 1, 1) * 10)
        if i == 4:
            pools[4] = torch.cat([pool, pool], dim=3)
    trip = RoundTrip(pools, infos, layout_hints="HND", chunk_tokens=4, object_layout="token_major")
    ids = trip.engine.expand([[10, 11], [20, 21]])
    assert ids == [[10, 11], [20, 21], [10, 11]]
    trip.engine.store(ids, trip.objects)
    regions = trip.objects[0][0]
    first = regions[: 2 * 4 * 4].view(torch.float32).view(2, 4)
    assert first.tolist() == [[100, 100, 110, 110], [102, 102, 112, 112]]
    second = regions[64 : 64 + 2 * 4 * 4].view(torch.float32).view(2, 4)
    assert second.tolist() == [[201, 201, 211, 211], [203, 203, 213, 213]]
    third = regions[128 : 128 + 4 * 8].view(torch.float32)
    assert third.tolist() == [104.0] * 4 + [114.0] * 4
