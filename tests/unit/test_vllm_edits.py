"""Edits: which caches are re-viewed, as what, over the same bytes; which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.round_trips import POISON, RoundTrip, as_bytes, byte_storage, fill_with_noise

from hma_triton.errors import AmbiguousLayoutError, GroupMismatchError, UnsupportedLayoutError
from hma_triton.geometries import stand_ins
from hma_triton.geometries.stand_ins import KVCacheConfig, KVCacheGroupSpec
from hma_triton.integration.vllm.kv_cache_group_edits import (
    apply_kv_cache_group_edits,
    edit_caches,
    validate_kv_cache_groups,
)
from hma_triton.integration.vllm.kv_cache_groups import (
    create_engine_group_infos_from_vllm,
    register_from_vllm,
)
from hma_triton.integration.vllm.page_views import byte_view, check_same_bytes

BLOCKS, BLOCK, KERNEL, HEADS, HEAD = 3, 24, 8, 2, 5


def spec_of(page_bytes: int, cls: Any = stand_ins.FullAttentionSpec, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": torch.bfloat16,
        "num_states": BLOCK,
        "unpadded_page_size_bytes": page_bytes,
        "page_size_bytes": page_bytes,
    }
    return cls(**{**fields, **more})


def config_of(*specs: Any, layout: str | None = None, blocks: int = BLOCKS) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_groups=[
            KVCacheGroupSpec(layer_names=[f"l{i}"], kv_cache_spec=spec)
            for i, spec in enumerate(specs)
        ],
        kv_cache_layout=layout,
    )


def kernel_paged(rank: int, layout: str, kv: str = "") -> torch.Tensor:
    """A cache of 9 kernel pages: 3 blocks of 24 slots at 8 slots a page, as its backend lays it."""
    pages = BLOCKS * BLOCK // KERNEL
    heads_first = layout == "HND"
    inner = (HEADS, KERNEL) if heads_first else (KERNEL, HEADS)
    if rank == 3:
        shape: tuple[int, ...] = (pages, KERNEL, HEAD)
    elif rank == 4:
        shape = (pages, *inner, 2 * HEAD)
    else:
        shape = (2, pages, *inner, HEAD) if kv == "outside" else (pages, 2, *inner, HEAD)
    pool = torch.zeros(shape, dtype=torch.bfloat16)
    fill_with_noise(pool, rank)
    # the logical shape of vLLM has heads before slots in rank 4, slots before heads in rank 5
    if rank == 4 and not heads_first:
        pool = pool.transpose(1, 2)
    if rank == 5 and heads_first:
        pool = pool.transpose(2, 3)
    return pool


FORMS = [
    (3, "NHD", "", "rows", (BLOCKS, BLOCK, HEAD)),
    (4, "NHD", "", "rows", (BLOCKS, HEADS, BLOCK, 2 * HEAD)),
    (4, "HND", "", "bytes", (BLOCKS, BLOCK, 1, HEADS * 2 * HEAD * 2)),
    (5, "NHD", "outside", "rows", (2, BLOCKS, BLOCK, HEADS, HEAD)),
    (5, "HND", "outside", "bytes", (2, BLOCKS, BLOCK, 1, HEADS * HEAD * 2)),
    (5, "NHD", "inside", "bytes", (BLOCKS, BLOCK, 1, HEADS * 2 * HEAD * 2)),
    (5, "HND", "inside", "bytes", (BLOCKS, BLOCK, 1, HEADS * 2 * HEAD * 2)),
]


@pytest.mark.parametrize(("rank", "layout", "kv", "form", "shape"), FORMS)
def test_kernel_pages_become_blocks(
    rank: int, layout: str, kv: str, form: str, shape: tuple[int, ...]
) -> None:
    cache = kernel_paged(rank, layout, kv)
    block_bytes = cache.numel() * 2 // BLOCKS
    cls = stand_ins.MLAAttentionSpec if rank == 3 else stand_ins.FullAttentionSpec
    config = config_of(spec_of(block_bytes, cls), layout=layout)
    edited, labels = edit_caches(config, {"l0": cache}, layout)
    view = edited["l0"]
    assert labels == {"l0": f"kernel pages of 8 as {form}"}
    assert tuple(view.shape) == shape
    assert view.dtype == (torch.bfloat16 if form == "rows" else torch.int8)
    assert view.data_ptr() == cache.data_ptr()
    assert view.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
    # what a block id names are its three kernel pages, in every form
    registered = register_from_vllm(config, {"l0": cache})
    trip = RoundTrip(
        registered.kv_caches,
        registered.infos,
        layout_hints=registered.layout_hints,
        chunk_tokens=BLOCK,
    )
    group = trip.engine.manager.kernel_groups[0]
    assert (group.slots_per_block, group.shape_desc.nb) == (BLOCK, BLOCKS)
    assert group.layer_page_bytes == block_bytes
    axis = 1 if kv == "outside" else 0
    wanted = as_bytes(cache.narrow(axis, 3, 3))
    trip.store([1])
    byte_storage(cache).fill_(POISON)
    trip.retrieve([2])
    assert torch.equal(as_bytes(cache.narrow(axis, 6, 3)), wanted)
    assert bool((as_bytes(cache.narrow(axis, 0, 6)) == POISON).all())


@pytest.mark.parametrize(("rank", "layout", "kv", "form", "shape"), FORMS)
def test_an_edited_view_is_not_edited_again(
    rank: int, layout: str, kv: str, form: str, shape: tuple[int, ...]
) -> None:
    cache = kernel_paged(rank, layout, kv)
    cls = stand_ins.MLAAttentionSpec if rank == 3 else stand_ins.FullAttentionSpec
    config = config_of(spec_of(cache.numel() * 2 // BLOCKS, cls))
    once = apply_kv_cache_group_edits(config, {"l0": cache}, layout)
    assert apply_kv_cache_group_edits(config, once, layout)["l0"] is once["l0"]


def test_caches_at_the_blocks_grain_pass_as_they_are() -> None:
    cache = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * HEAD, dtype=torch.bfloat16)
    config = config_of(spec_of(cache[0].numel() * 2))
    caches = {"l0": cache, "shared": cache}
    edited = apply_kv_cache_group_edits(config, caches, "HND")
    assert edited is not caches
    assert edited == caches
    assert all(edited[name] is caches[name] for name in caches)
    assert apply_kv_cache_group_edits(None, caches) == caches


def test_a_page_that_lies_with_padding_is_not_kernel_paged() -> None:
    pool = torch.zeros(BLOCKS * 1000, dtype=torch.bfloat16)
    cache = pool.as_strided((BLOCKS, 1, BLOCK, 2 * HEAD), (1000, BLOCK * 2 * HEAD, 2 * HEAD, 1))
    spec = spec_of(BLOCK * 2 * HEAD * 2, page_size_bytes=2000)
    assert apply_kv_cache_group_edits(config_of(spec), {"l0": cache}, "HND")["l0"] is cache
    # a spec that tells its padded page only
    padded = SpecWithoutLiveBytes(block_size=BLOCK, page_size_bytes=2000)
    assert apply_kv_cache_group_edits(config_of(padded), {"l0": cache}, "HND")["l0"] is cache


class FullAttentionSpec:
    """An older vLLM's spec: the class name and whatever fields it had."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class MLAAttentionSpec(FullAttentionSpec):
    pass


SpecWithoutLiveBytes = FullAttentionSpec


@pytest.mark.parametrize(
    ("spec", "slots"),
    [
        # vLLM 0.32: states are declared, and the page tells its bytes
        (spec_of(6 * 132, stand_ins.MLAAttentionSpec, num_states=6, dtype=torch.uint8), 6),
        (SpecWithoutLiveBytes(block_size=24, tokens_per_state=4), 6),
        # older: a ratio, or TurboQuant's packed slots
        (MLAAttentionSpec(block_size=24, compress_ratio=4), 6),
        (SpecWithoutLiveBytes(block_size=24, tq_slot_size=99), 5),
        # fp8 rows of MLA pack bytes, not slots, and declare nothing
        (MLAAttentionSpec(block_size=24, cache_dtype_str="fp8_ds_mla"), 24),
    ],
)
def test_declared_compression_is_left_alone_and_served(spec: Any, slots: int) -> None:
    cache = torch.zeros(BLOCKS, 1, slots, 132, dtype=torch.uint8)
    config = config_of(spec)
    assert apply_kv_cache_group_edits(config, {"l0": cache}, "HND")["l0"] is cache
    infos = create_engine_group_infos_from_vllm(config, {"l0": cache}, "HND")
    assert infos[0].tokens_per_block == 24


@pytest.mark.parametrize("field", ["", "compress_ratio", "tokens_per_state"])
def test_undeclared_compression_is_refused(field: str) -> None:
    # 24 tokens over 6 slots; a declared ratio of 2 does not explain it either
    spec = MLAAttentionSpec(block_size=24, **({field: 2} if field else {}))
    cache = torch.zeros(BLOCKS, 1, 6, 132, dtype=torch.uint8)
    with pytest.raises(GroupMismatchError, match="6 slots per block, the engine declares"):
        create_engine_group_infos_from_vllm(config_of(spec), {"l0": cache}, "HND")


def test_a_packed_layout_that_nobody_declared_is_refused() -> None:
    cache = torch.zeros(BLOCKS * 3, HEADS, KERNEL, 2 * HEAD, dtype=torch.bfloat16)
    with pytest.raises(GroupMismatchError, match="960 bytes, the spec declares 1000 bytes"):
        apply_kv_cache_group_edits(config_of(spec_of(1000)), {"l0": cache}, "HND")


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        # pages that do not divide, in number and in slots
        (torch.zeros(8, HEADS, KERNEL, 2 * HEAD), "8 kernel pages of 8 slots do not tile"),
        (torch.zeros(9, HEADS, 10, 2 * HEAD), "10 slots do not tile blocks of 24 slots"),
        (torch.zeros(9, HEADS, 48, 2 * HEAD), "48 slots do not tile blocks of 24 slots"),
        # pages with holes between them
        (
            torch.zeros(9 * 200).as_strided((9, HEADS, KERNEL, 2 * HEAD), (200, 80, 10, 1)),
            "do not lie back to back",
        ),
        (torch.zeros(9, 3, KERNEL, HEADS, HEAD), "no K/V axis in front"),
    ],
)
def test_pages_that_are_no_blocks_are_refused(cache: torch.Tensor, why: str) -> None:
    spec = SpecWithoutLiveBytes(block_size=BLOCK)
    with pytest.raises((GroupMismatchError, UnsupportedLayoutError), match=f"layer l0: .*{why}"):
        apply_kv_cache_group_edits(config_of(spec), {"l0": cache}, "HND")


def test_two_kernel_pages_beside_a_kv_axis_are_ambiguous() -> None:
    cache = torch.zeros(2, 2, KERNEL, HEADS, HEAD)
    spec = SpecWithoutLiveBytes(block_size=16)
    with pytest.raises(AmbiguousLayoutError, match=r"both \[2, pages"):
        apply_kv_cache_group_edits(config_of(spec), {"l0": cache}, "NHD")


def test_kernel_paged_planar_pages_become_bytes_not_rows() -> None:
    # GLM's indexer: 32 rows a kernel page, 96 states a block; merged pages are not planar
    cache = torch.zeros(9, 1, 32, 132, dtype=torch.uint8)
    fill_with_noise(cache)
    spec = spec_of(96 * 132, stand_ins.MLAAttentionSpec, block_size=384, num_states=96)
    registered = register_from_vllm(config_of(spec), {"l0": cache}, kv_layout="HND")
    view = registered.kv_caches["l0"]
    assert (tuple(view.shape), view.dtype) == ((3, 96, 1, 132), torch.int8)
    trip = RoundTrip(
        registered.kv_caches,
        registered.infos,
        layout_hints=registered.layout_hints,
        chunk_tokens=384,
        object_layout="token_major",
    )
    assert trip.engine.manager.layer_pages(0)[0].planar_bytes == ()
    trip.store([2])
    assert torch.equal(trip.objects[0][0], as_bytes(cache[6:9]))


def mamba(page_bytes: int, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "block_size": 16,
        "shapes": ((3, 4), (2, 5)),
        "dtypes": (torch.bfloat16, torch.float32),
        "page_size_bytes": page_bytes,
        "mamba_cache_mode": "align",
    }
    return stand_ins.MambaSpec(**{**fields, **more})


def conv_and_ssm(step: int, offset: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """`(bytes, [conv, ssm])` with 24 and 40 bytes of state in pages `step` bytes apart."""
    raw = torch.full((offset + BLOCKS * step,), POISON, dtype=torch.uint8)
    conv = (
        raw[offset:].view(torch.bfloat16).as_strided((BLOCKS, 3, 4), (step // 2, 4, 1), offset // 2)
    )
    ssm = raw.view(torch.float32).as_strided((BLOCKS, 2, 5), (step // 4, 5, 1), (offset + 24) // 4)
    return raw, [conv, ssm]


@pytest.mark.parametrize("offset", [0, 80])
def test_conv_and_ssm_become_one_page_of_their_live_bytes(offset: int) -> None:
    raw, states = conv_and_ssm(80, offset)
    for block in range(BLOCKS):
        states[0][block] = block + 1
        states[1][block] = 10 * (block + 1)
    config = config_of(mamba(80))
    edited, labels = edit_caches(config, {"l0": states}, "NHD")
    page = edited["l0"]
    assert labels["l0"] == "state list as bytes"
    assert (tuple(page.shape), page.stride(0), page.dtype) == ((3, 1, 1, 64), 80, torch.int8)
    assert page.data_ptr() == states[0].data_ptr()
    infos = create_engine_group_infos_from_vllm(config, edited, "NHD")
    assert (infos[0].recurrent_state, infos[0].sw_size_tokens) == (True, 16)
    trip = RoundTrip(edited, infos, layout_hints="NHD", chunk_tokens=16)
    trip.store([1])
    trip.retrieve([2])
    assert bool((states[0][2] == 2).all())
    assert bool((states[1][2] == 20).all())
    padding = raw[offset:].view(BLOCKS, 80)[:, 64:]
    assert bool((padding == POISON).all())


@pytest.mark.parametrize(
    ("states", "page_bytes", "why"),
    [
        (list(reversed(conv_and_ssm(80)[1])), 80, "state 0|state 1"),
        ([conv_and_ssm(80)[1][0], conv_and_ssm(80)[1][1]], 80, "state 1 .* does not follow"),
        ([conv_and_ssm(80)[1][0], conv_and_ssm(80)[1][1][:2]], 80, "state 1"),
        (conv_and_ssm(80)[1], 60, "64 bytes of state in a page of 60 bytes"),
        ([], 80, "list of"),
        ("text", 80, "recurrent state is"),
        (torch.zeros(3, 2, 1, 8), 80, r"recurrent state is \[NB, 1, 1, row\]"),
        (torch.zeros(3, 1, 1, 80, dtype=torch.int8), 64, "row of 80 bytes in a page of 64"),
    ],
)
def test_states_that_are_no_page_are_refused(states: Any, page_bytes: int, why: str) -> None:
    with pytest.raises((GroupMismatchError, UnsupportedLayoutError), match=f"layer l0: .*({why})"):
        apply_kv_cache_group_edits(config_of(mamba(page_bytes)), {"l0": states}, "NHD")


def test_an_unedited_state_list_is_refused_by_detection() -> None:
    _, states = conv_and_ssm(80)
    with pytest.raises(UnsupportedLayoutError, match="apply_kv_cache_group_edits"):
        create_engine_group_infos_from_vllm(config_of(mamba(80)), {"l0": states}, "NHD")


def test_uniform_groups_are_judged_by_the_leaf() -> None:
    whole = torch.zeros(BLOCKS, 1, BLOCK, 4, dtype=torch.bfloat16)
    paged = torch.zeros(BLOCKS * 3, 1, KERNEL, 8, dtype=torch.bfloat16)
    leaves = {
        "whole": spec_of(BLOCK * 8, stand_ins.MLAAttentionSpec),
        "paged": spec_of(BLOCK * 16, stand_ins.MLAAttentionSpec),
    }
    uniform = stand_ins.UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=leaves)
    group = KVCacheGroupSpec(layer_names=list(leaves), kv_cache_spec=uniform)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_groups=[group])
    caches = {"whole": whole, "paged": paged}
    edited = apply_kv_cache_group_edits(config, caches, "HND")
    assert edited["whole"] is whole
    assert tuple(edited["paged"].shape) == (BLOCKS, 1, BLOCK, 8)
    del leaves["paged"]
    with pytest.raises(GroupMismatchError, match="layer paged: its group holds no spec"):
        apply_kv_cache_group_edits(config, caches, "HND")


class CrossAttentionSpec:
    block_size = 16


class EncoderOnlyAttentionSpec:
    block_size = 16


class StrangeSpec:
    block_size = 16


def test_every_group_that_cannot_be_served_is_in_one_error() -> None:
    config = config_of(
        spec_of(8),
        CrossAttentionSpec(),
        mamba(80, mamba_cache_mode="none"),
        EncoderOnlyAttentionSpec(),
        StrangeSpec(),
        MLAAttentionSpec(block_size=24, tokens_per_state=0.25),
        mamba(80, mamba_cache_mode="all"),
    )
    with pytest.raises(UnsupportedLayoutError) as refused:
        validate_kv_cache_groups(config)
    message = str(refused.value)
    for part in (
        "group 1: CrossAttentionSpec (cross attention)",
        "group 2: MambaSpec keeps no state snapshots (mamba_cache_mode 'none'",
        "group 3: EncoderOnlyAttentionSpec",
        "group 4: StrangeSpec (unknown)",
        "group 5: MLAAttentionSpec stores several states per token",
    ):
        assert part in message
    assert "group 0" not in message
    assert "group 6" not in message
    for call in (apply_kv_cache_group_edits, create_engine_group_infos_from_vllm):
        with pytest.raises(UnsupportedLayoutError, match="group 1: CrossAttentionSpec"):
            call(config, {})
    validate_kv_cache_groups(None)
    validate_kv_cache_groups(config_of(spec_of(8), mamba(80)))
    with pytest.raises(UnsupportedLayoutError, match="none of the 1 groups is prefix-cacheable"):
        validate_kv_cache_groups(config_of(spec_of(8, prefix_cacheable=False)))


def test_a_view_that_left_its_bytes_would_be_noticed() -> None:
    cache = torch.zeros(4, 1, 8, 4)
    assert check_same_bytes(cache, cache, "layer l0") is cache
    with pytest.raises(GroupMismatchError, match=r"layer l0: .* left the registered storage"):
        check_same_bytes(cache, cache.clone(), "layer l0")
    with pytest.raises(GroupMismatchError, match="left the registered storage or address"):
        check_same_bytes(cache, cache[1:], "layer l0")
    with pytest.raises(GroupMismatchError, match="ends at byte 640 of a storage of 512"):
        check_same_bytes(cache, byte_view_beyond(cache), "layer l0")


def byte_view_beyond(cache: torch.Tensor) -> Any:
    """What a wrong stride would give: torch itself would refuse to make it."""
    view = byte_view(cache, (4, 128), (128, 1))

    class Beyond:
        shape = (5, 128)
        storage_offset = staticmethod(view.storage_offset)
        untyped_storage = staticmethod(view.untyped_storage)
        element_size = staticmethod(view.element_size)

        @staticmethod
        def stride() -> tuple[int, int]:
            return (128, 1)

    return Beyond()
