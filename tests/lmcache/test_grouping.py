"""LMCache's grouping of the same tensors beside ours, info by info, for every recorded geometry.

They agree except for what is listed here, each with its reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from lmcache import lmcache_native
from lmcache.integration.vllm.kv_cache_group_edits import (
    apply_kv_cache_group_edits as lmcache_edits,
)
from lmcache.integration.vllm.kv_cache_groups import (
    create_engine_group_infos_from_vllm as lmcache_infos,
)
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import (
    normalize_and_discover_per_layer_formats as lmcache_detection,
)
from lmcache.v1.kv_layer_groups import group_layers_by_identity as lmcache_groups
from lmcache.v1.multiprocess import group_view as lmcache_view
from support.real_vllm import BLOCKS, SERVED, real_config
from vllm.v1 import kv_cache_interface as vllm_specs

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.geometries import Geometry, build_raw_caches, load_geometry
from hma_triton.group_view import (
    EngineGroupInfo,
    engine_group_layer_indices,
    get_engine_group_indices,
)
from hma_triton.integration.vllm.kv_cache_groups import register_from_vllm
from hma_triton.kv_format import EngineKVFormat
from hma_triton.kv_layer_groups import group_layers_by_identity

# LMCache 0.5.6 knows two of vLLM's layer-outermost names by their old ones only
LMCACHE_LAYOUTS = {"LBNHC": "NHD", "LBHNC": "HND"}


class Shape(NamedTuple):
    """An identity without its engine group."""

    kv_size: int
    num_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    fmt: str


class Grouping(NamedTuple):
    infos: list[EngineGroupInfo]
    shapes: list[Shape]


def shape_of(identity: Any) -> Shape:
    return Shape(
        identity.kv_size,
        identity.num_heads,
        identity.head_size,
        identity.block_size,
        identity.dtype,
        identity.engine_kv_format.name,
    )


def ours(config: Any, raw: dict[str, torch.Tensor]) -> Grouping:
    registered = register_from_vllm(config, raw)
    caches, formats = normalize_and_discover_per_layer_formats(
        registered.kv_caches,
        engine_group_layer_indices(registered.infos),
        "vllm",
        registered.layout_hints,
    )
    parts = group_layers_by_identity(
        caches, formats, get_engine_group_indices(registered.infos, len(formats))
    )
    return Grouping(list(registered.infos), [shape_of(identity) for identity, _ in parts])


def theirs(config: Any, raw: dict[str, torch.Tensor], layout: str) -> Grouping:
    hints: Any = {"kv_layout": LMCACHE_LAYOUTS.get(layout, layout)}
    edited = lmcache_edits(config, raw, hints)
    infos = lmcache_infos(config, edited, hints)
    caches, formats = lmcache_detection(
        list(edited.values()),
        lmcache_view.engine_group_layer_indices(infos),
        EngineType.VLLM,
        hints,
    )
    parts = lmcache_groups(
        caches, formats, lmcache_view.get_engine_group_indices(infos, len(formats))
    )
    payload = msgspec.msgpack.encode(infos)
    return Grouping(
        msgspec.msgpack.decode(payload, type=list[EngineGroupInfo]),
        [shape_of(identity) for identity, _ in parts],
    )


def both(name: str, variant: str) -> tuple[Geometry, Grouping, Grouping]:
    geometry = load_geometry(name, variant)
    config, _ = real_config(geometry)
    raw = build_raw_caches(geometry, BLOCKS, "meta")
    return geometry, ours(config, raw), theirs(config, raw, geometry.kv_cache_layout)


@pytest.mark.parametrize(("name", "variant"), SERVED)
def test_infos_agree(name: str, variant: str) -> None:
    geometry, mine, lmcache = both(name, variant)
    chunked = {
        group.engine_group_id: group.window_tokens
        for group in geometry.groups
        if group.spec_class == "ChunkedLocalAttentionSpec"
    }
    # chunked-local attention: ours carries its chunk as the window, LMCache's keeps everything
    expected = [
        msgspec.structs.replace(info, sw_size_tokens=chunked[info.engine_group_id])
        if info.engine_group_id in chunked
        else info
        for info in lmcache.infos
    ]
    assert mine.infos == expected
    if chunked:
        assert {info.sw_size_tokens for info in lmcache.infos} == {-1}
        assert name == "llama-4-scout-17b-16e-instruct"


def reason_for(mine: Shape, lmcache: Shape, info: EngineGroupInfo, is_hybrid: bool) -> str:
    """Why two identities of one info differ; "" when they are the same."""
    if mine == lmcache:
        return ""
    if info.recurrent_state:
        return "state row"
    return "kernel pages transposed" if is_hybrid else "kernel pages not edited"


@pytest.mark.parametrize(("name", "variant"), SERVED)
def test_identities_agree_or_differ_for_a_listed_reason(name: str, variant: str) -> None:
    geometry, mine, lmcache = both(name, variant)
    is_hybrid = any(group.mamba_cache_mode for group in geometry.groups)
    assert len(mine.shapes) == len(lmcache.shapes) == len(mine.infos)
    reasons = set()
    for own, other, info in zip(mine.shapes, lmcache.shapes, mine.infos, strict=True):
        reason = reason_for(own, other, info, is_hybrid)
        reasons.add(reason)
        if reason == "state row":
            check_state_row(own, other, info, geometry)
        elif reason == "kernel pages transposed":
            check_transposed(own, other, info)
        elif reason == "kernel pages not edited":
            check_not_edited(own, other, info)
    paged = any(group.kernel_pages > 1 for group in geometry.groups)
    expected = {"state row"} if is_hybrid else set()
    if paged:
        expected.add("kernel pages transposed" if is_hybrid else "kernel pages not edited")
    assert reasons - {""} == expected


def check_state_row(own: Shape, other: Shape, info: EngineGroupInfo, geometry: Geometry) -> None:
    """LMCache cuts a state row into as many tokens as the block has and rounds each one up, so
    that it copies padding after the state; ours is one page of exactly the live bytes."""
    recorded = next(g for g in geometry.groups if g.engine_group_id == info.engine_group_id)
    assert (own.block_size, own.num_heads, own.head_size) == (1, 1, recorded.live_bytes)
    assert (other.block_size, other.num_heads) == (info.tokens_per_block, 1)
    copied = other.block_size * other.head_size
    assert recorded.live_bytes <= copied <= recorded.page_bytes
    assert own.dtype == other.dtype == torch.int8


def check_transposed(own: Shape, other: Shape, info: EngineGroupInfo) -> None:
    """LMCache re-views a kernel-paged cache with its tokens where its detector, under the same
    hint, reads heads: 544 heads in blocks of one slot. Its bytes agree, its tokens do not."""
    assert own.block_size == info.tokens_per_block
    assert other.block_size == 1
    assert other.num_heads == info.tokens_per_block
    assert own.num_heads == 1

    def page_bytes(shape: Shape) -> int:
        cell = shape.kv_size * shape.num_heads * shape.head_size * shape.block_size
        return cell * shape.dtype.itemsize

    assert page_bytes(own) == page_bytes(other)


def check_not_edited(own: Shape, other: Shape, info: EngineGroupInfo) -> None:
    """LMCache edits models with recurrent layers only; elsewhere a kernel-paged cache keeps its
    kernel block, and a block of 128 tokens over 64 slots passes for compression."""
    assert own.block_size == info.tokens_per_block
    assert own == other._replace(block_size=own.block_size)
    assert other.block_size * 2 == info.tokens_per_block


def test_the_known_transposed_identity_of_blackwell() -> None:
    _, mine, lmcache = both("qwen3.5-0.8b", "cuda100")
    assert lmcache.shapes[3] == Shape(2, 544, 512, 1, torch.bfloat16, "NL_X_NB_TWO_NH_BS_HS")
    assert mine.shapes[3] == Shape(1, 1, 2048, 544, torch.int8, "NL_X_NB_NH_BS_CS")
    _, mine, lmcache = both("kimi-linear-48b-a3b-instruct", "cuda100")
    assert lmcache.shapes[3][1:4] == (1920, 576, 1)
    assert mine.shapes[3][1:4] == (1, 576, 1920)


def test_the_formats_are_lmcaches() -> None:
    native = {fmt.name: int(fmt) for fmt in lmcache_native.EngineKVFormat.__members__.values()}
    assert {fmt.name: int(fmt) for fmt in EngineKVFormat} == native


def test_payloads_of_one_side_decode_on_the_other() -> None:
    mine = [EngineGroupInfo(0, (0, 2), 544, 1024, 1, True), EngineGroupInfo(1)]
    other = msgspec.msgpack.decode(
        msgspec.msgpack.encode(mine), type=list[lmcache_view.EngineGroupInfo]
    )
    assert msgspec.msgpack.encode(other) == msgspec.msgpack.encode(mine)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(other), type=list[EngineGroupInfo]) == mine


def test_case_19_lmcaches_pinned_view_holds_padding_and_ours_does_not() -> None:
    storage = torch.zeros(3 * 8064, dtype=torch.bfloat16)
    page = storage.as_strided((3, 1, 1, 8000), (8064, 8000, 8000, 1))
    spec = vllm_specs.MambaSpec(
        block_size=16,
        shapes=((8000,),),
        dtypes=(torch.bfloat16,),
        page_size_padded=8064 * 2,
        mamba_cache_mode="align",
    )
    group = vllm_specs.KVCacheGroupSpec(["m"], spec)
    for layout, shape in (("NHD", (3, 16, 1, 504)), ("HND", (3, 1, 16, 504))):
        config = vllm_specs.KVCacheConfig(3, [], [group], kv_cache_layout=layout)
        hints: Any = {"kv_layout": layout}
        pinned = lmcache_edits(config, {"m": page}, hints)["m"]
        assert (tuple(pinned.shape), pinned.stride(0)) == (shape, 8064)
        registered = register_from_vllm(config, {"m": page})
        edited = registered.kv_caches["m"]
        # the same pages: address and step; 64 elements of padding fewer in each
        assert edited.data_ptr() == pinned.data_ptr() == page.data_ptr()
        assert edited.stride(0) == pinned.stride(0)
        assert pinned[0].numel() - edited[0].numel() == 64
