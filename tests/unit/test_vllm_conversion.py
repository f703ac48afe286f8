"""vLLM's config as infos, hints and groups, with stand-ins: no vLLM is needed or imported."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.round_trips import RoundTrip, as_bytes, fill_with_noise

from hma_triton.errors import AmbiguousLayoutError, GroupMismatchError, UnsupportedLayoutError
from hma_triton.geometries import stand_ins
from hma_triton.geometries.stand_ins import KVCacheConfig, KVCacheGroupSpec
from hma_triton.group_view import EngineGroupInfo
from hma_triton.integration.vllm.kv_cache_groups import (
    create_engine_group_infos_from_vllm,
    describe_groups,
    layout_of,
    register_from_vllm,
)
from hma_triton.layout_hints import LayoutHints

BLOCKS, BLOCK, HEADS, CONTENT = 4, 8, 2, 6
PAGE_BYTES = BLOCK * HEADS * CONTENT * 2


def spec_of(cls: Any = stand_ins.FullAttentionSpec, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": HEADS,
        "head_size": CONTENT,
        "dtype": torch.bfloat16,
        "num_states": BLOCK,
        "unpadded_page_size_bytes": PAGE_BYTES,
        "page_size_bytes": PAGE_BYTES,
    }
    return cls(**{**fields, **more})


def cache() -> torch.Tensor:
    return torch.zeros(BLOCKS, HEADS, BLOCK, CONTENT, dtype=torch.bfloat16)


def config_of(*groups: tuple[list[str], Any], **fields: Any) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_groups=[KVCacheGroupSpec(layer_names=n, kv_cache_spec=s) for n, s in groups],
        **fields,
    )


def mamba(block: int = 16, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "block_size": block,
        "shapes": ((10,),),
        "dtypes": (torch.int8,),
        "page_size_bytes": 16,
        "mamba_cache_mode": "align",
    }
    return stand_ins.MambaSpec(**{**fields, **more})


def state_row() -> torch.Tensor:
    return torch.zeros(BLOCKS * 16, dtype=torch.int8).as_strided(
        (BLOCKS, 1, 1, 10), (16, 10, 10, 1)
    )


def test_the_module_needs_no_vllm() -> None:
    probe = (
        "import sys, hma_triton.integration.vllm.kv_cache_groups, "
        "hma_triton.integration.vllm.kv_cache_group_edits, hma_triton.geometries;"
        "sys.exit(any(name.split('.')[0] in ('vllm', 'lmcache') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0


def test_a_hybrid_in_group_order() -> None:
    config = config_of(
        (["state.0", "state.2"], mamba()),
        (["window.1"], spec_of(stand_ins.SlidingWindowSpec, sliding_window=20)),
        (["chunked.3"], spec_of(stand_ins.ChunkedLocalAttentionSpec, attention_chunk_size=32)),
        (["full.4"], spec_of()),
        (["ring.5"], spec_of(block_size=4, prefix_cacheable=False)),
        kv_cache_layout="LBHNC",
    )
    caches = {
        "state.0": state_row(),
        "state.2": state_row(),
        "window.1": cache(),
        "chunked.3": cache(),
        "full.4": cache(),
        # a scratch group's layout is never looked at
        "ring.5": torch.zeros(7),
        "shared.6": cache(),
    }
    registered = register_from_vllm(config, caches)
    assert registered.infos == (
        EngineGroupInfo(0, (0, 1), 16, 16, 0, True),
        EngineGroupInfo(1, (2,), 8, 20),
        EngineGroupInfo(2, (3,), 8, 32),
        EngineGroupInfo(3, (4,), 8),
    )
    assert registered.layout_hints == LayoutHints(
        kv_layout="LBHNC", slots_per_block=(1, 1, 8, 8, 8, 0, 0), edits=("",) * 7
    )
    assert [(g.engine_group_id, g.tokens_per_block) for g in registered.groups] == [
        (0, 16),
        (1, 8),
        (2, 8),
        (3, 8),
        (4, 0),
    ]
    assert [g.window_tokens for g in registered.groups] == [16, 20, 32, None, None]
    assert [g.is_recurrent for g in registered.groups] == [True] + [False] * 4
    assert [g.is_cacheable for g in registered.groups] == [True] * 4 + [False]
    assert {g.null_block_id for g in registered.groups} == {0}
    # the scheduler's view needs no tensors and is the same
    assert describe_groups(config) == registered.groups


def test_registration_order_is_the_dicts_order() -> None:
    config = config_of((["b", "c"], spec_of()), (["a"], spec_of()))
    infos = create_engine_group_infos_from_vllm(
        config, {"a": cache(), "b": cache(), "c": cache()}, "HND"
    )
    assert infos == [EngineGroupInfo(1, (0,), 8), EngineGroupInfo(0, (1, 2), 8)]


@pytest.mark.parametrize("config", [None, config_of()])
def test_without_groups_there_is_one(config: Any) -> None:
    caches = {"a": cache(), "b": torch.zeros(BLOCKS, 16, 3)}
    infos = create_engine_group_infos_from_vllm(config, caches, "HND")
    assert infos == [EngineGroupInfo(0, (0,)), EngineGroupInfo(0, (1,))]


def test_decode_context_parallelism_scales_what_is_sharded() -> None:
    config = config_of(
        (["full"], spec_of()),
        (["draft"], spec_of(dcp_sharded=False)),
        (["state"], mamba()),
        kv_cache_layout="HND",
    )
    caches = {"full": cache(), "draft": cache(), "state": state_row()}
    for ranks, tokens in ((1, [8, 8, 16]), (2, [16, 8, 16]), (3, [24, 8, 16])):
        registered = register_from_vllm(config, caches, dcp_size=ranks)
        assert [info.tokens_per_block for info in registered.infos] == tokens
        assert registered.layout_hints.slots_per_block == (8, 8, 1)


def test_layers_of_one_kind_but_two_rules_are_refused() -> None:
    leaves = {
        "a": spec_of(stand_ins.SlidingWindowSpec, sliding_window=20),
        "b": spec_of(stand_ins.SlidingWindowSpec, sliding_window=40),
    }
    uniform = stand_ins.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=leaves)
    config = config_of((["a", "b"], uniform))
    caches = {"a": cache(), "b": cache()}
    with pytest.raises(GroupMismatchError, match=r"layers \[0, 1\] of group 0 .* differ"):
        create_engine_group_infos_from_vllm(config, caches, "HND")
    with pytest.raises(
        GroupMismatchError, match=r"group 0: its layers differ in window \[20, 40\]"
    ):
        describe_groups(config)


def test_one_window_over_several_layouts_is_two_infos() -> None:
    narrow = spec_of(
        stand_ins.SlidingWindowMLASpec,
        sliding_window=20,
        unpadded_page_size_bytes=BLOCK * 3 * 2,
        page_size_bytes=BLOCK * 3 * 2,
    )
    leaves = {"a": spec_of(stand_ins.SlidingWindowSpec, sliding_window=20), "b": narrow}
    uniform = stand_ins.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=leaves)
    latent = torch.zeros(BLOCKS, 1, BLOCK, 3, dtype=torch.bfloat16)
    infos = create_engine_group_infos_from_vllm(
        config_of((["a", "b"], uniform)), {"a": cache(), "b": latent}, "HND"
    )
    assert infos == [EngineGroupInfo(0, (0,), 8, 20), EngineGroupInfo(0, (1,), 8, 20)]


@pytest.mark.parametrize(
    ("groups", "names", "why"),
    [
        ([(["a", "gone"], spec_of())], ["a"], "group 0 names layer gone: no .*cache has that name"),
        ([(["a"], spec_of()), (["a"], spec_of())], ["a"], "layer a is in groups 0 and 1"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    groups: list[tuple[list[str], Any]], names: list[str], why: str
) -> None:
    caches = {name: cache() for name in names}
    with pytest.raises(GroupMismatchError, match=why):
        create_engine_group_infos_from_vllm(config_of(*groups), caches, "HND")
    with pytest.raises(GroupMismatchError, match=why):
        register_from_vllm(config_of(*groups), caches, kv_layout="HND")


def test_a_pool_of_another_size_than_the_engines_is_refused() -> None:
    config = config_of((["a"], spec_of()))
    small = torch.zeros(BLOCKS - 1, HEADS, BLOCK, CONTENT, dtype=torch.bfloat16)
    with pytest.raises(GroupMismatchError, match=r"layer a: .* no axis of the engine's 4 blocks"):
        register_from_vllm(config, {"a": small}, kv_layout="HND")


def test_layouts_are_taken_from_the_config_first() -> None:
    assert layout_of(config_of(kv_cache_layout="BLNHC")) == "BLNHC"
    assert layout_of(None) is None
    config = config_of((["a"], spec_of()), kv_cache_layout="LBHNC")
    assert register_from_vllm(config, {"a": cache()}, kv_layout="NHD").layout_hints.kv_layout == (
        "LBHNC"
    )
    for layout in ("LHBNC", "BHLNC", "hnd"):
        refused = config_of((["a"], spec_of()), kv_cache_layout=layout)
        with pytest.raises(UnsupportedLayoutError, match=layout):
            register_from_vllm(refused, {"a": cache()})


def test_without_a_layout_the_declared_block_must_tell() -> None:
    config = config_of((["a"], spec_of()))
    assert register_from_vllm(config, {"a": cache()}).infos == (EngineGroupInfo(0, (0,), 8),)
    square = spec_of(num_kv_heads=BLOCK, unpadded_page_size_bytes=BLOCK * BLOCK * CONTENT * 2)
    both = torch.zeros(BLOCKS, BLOCK, BLOCK, CONTENT, dtype=torch.bfloat16)
    with pytest.raises(AmbiguousLayoutError, match=r"layer 0 \(a\).*8 slots of 8 heads"):
        register_from_vllm(config_of((["a"], square)), {"a": both})


def lay(layout: str, kernel_pages: int, kernel: int, heads: int, content: int) -> torch.Tensor:
    """Kernel pages in a layout's memory order; the shape is [pages, heads, slots, C]."""
    if layout == "HND":
        return torch.zeros(kernel_pages, heads, kernel, content, dtype=torch.bfloat16)
    inner = torch.zeros(kernel_pages, kernel, heads, content, dtype=torch.bfloat16)
    return inner.transpose(1, 2)


@settings(max_examples=300)
@given(
    layout=st.sampled_from(("NHD", "HND")),
    kernel=st.integers(1, 9),
    ratio=st.integers(1, 6),
    heads=st.integers(1, 9),
    content=st.integers(1, 7),
    blocks=st.integers(1, 4),
    data=st.data(),
)
def test_a_block_id_is_its_kernel_pages_for_any_size(
    layout: str, kernel: int, ratio: int, heads: int, content: int, blocks: int, data: Any
) -> None:
    pool = lay(layout, blocks * ratio, kernel, heads, content)
    fill_with_noise(pool, kernel)
    page = kernel * ratio * heads * content * 2
    spec = spec_of(
        block_size=kernel * ratio,
        num_states=kernel * ratio,
        unpadded_page_size_bytes=page,
        page_size_bytes=page,
    )
    group = KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=spec)
    config = KVCacheConfig(num_blocks=blocks, kv_cache_groups=[group])
    registered = register_from_vllm(config, {"a": pool}, kv_layout=layout)
    trip = RoundTrip(
        registered.kv_caches,
        registered.infos,
        layout_hints=registered.layout_hints,
        chunk_tokens=kernel * ratio,
    )
    manager = trip.engine.manager
    assert manager.kernel_groups[0].slots_per_block == kernel * ratio
    assert manager.kernel_groups[0].shape_desc.nb == blocks
    source = data.draw(st.integers(0, blocks - 1))
    target = data.draw(st.integers(0, blocks - 1))
    before = pool.clone()
    trip.store([source])
    trip.retrieve([target])
    for block in range(blocks):
        was = source if block == target else block
        now = as_bytes(pool[block * ratio : (block + 1) * ratio])
        assert torch.equal(now, as_bytes(before[was * ratio : (was + 1) * ratio]))
