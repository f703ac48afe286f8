"""Which format a cache has, for structures of every engine, and what is refused or ambiguous."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.errors import (
    AmbiguousLayoutError,
    GeometryError,
    GroupMismatchError,
    UnsupportedLayoutError,
)
from hma_triton.group_view import EngineGroupInfo
from hma_triton.kv_format import EngineKVFormat as F
from hma_triton.kv_format import FormattedCaches
from hma_triton.kv_layer_groups import KVLayerGroupsManager
from hma_triton.layout_hints import LayoutHints, as_layout_hints, hints_with_blocks


def detect(caches: Any, hints: Any = None, engine: Any = "vllm") -> tuple[Any, list[F]]:
    return normalize_and_discover_per_layer_formats(caches, [], engine, hints)


def memory_order(shape: tuple[int, ...], *outer_to_inner: int) -> torch.Tensor:
    """A tensor of `shape` whose axes lie in memory in the given order."""
    physical = torch.zeros([shape[axis] for axis in outer_to_inner])
    back = [outer_to_inner.index(axis) for axis in range(len(shape))]
    return physical.permute(back)


@pytest.mark.parametrize(
    ("hint", "order", "fmt"),
    [
        ("NHD", (0, 2, 1, 3), F.NL_X_NB_BS_NH_CS),
        ("LBNHC", (0, 2, 1, 3), F.NL_X_NB_BS_NH_CS),
        ("HND", (0, 1, 2, 3), F.NL_X_NB_NH_BS_CS),
        ("BLHNC", (0, 1, 2, 3), F.NL_X_NB_NH_BS_CS),
    ],
)
def test_a_logical_shape_is_read_by_its_memory_order(
    hint: str, order: tuple[int, ...], fmt: F
) -> None:
    # [NB, heads, slots, content] with 8 heads and 16 slots, whatever the memory order
    cache = memory_order((5, 8, 16, 6), *order)
    caches, formats = detect([cache], hint)
    view = FormattedCaches(caches, formats[0])
    assert formats == [fmt]
    assert (view.block_size(), view.num_heads(), view.head_size()) == (16, 8, 6)
    assert caches[0].data_ptr() == cache.data_ptr()


@pytest.mark.parametrize(
    ("shape", "order", "hint", "fmt"),
    [
        # old vLLM: [2, NB, slots, heads, D] or [NB, 2, slots, heads, D], heads-first by permute
        ((2, 5, 16, 8, 6), (0, 1, 2, 3, 4), "NHD", F.NL_X_TWO_NB_BS_NH_HS),
        ((2, 5, 16, 8, 6), (0, 1, 3, 2, 4), "HND", F.NL_X_TWO_NB_NH_BS_HS),
        ((5, 2, 16, 8, 6), (0, 1, 2, 3, 4), "NHD", F.NL_X_NB_TWO_BS_NH_HS),
        ((5, 2, 16, 8, 6), (0, 1, 3, 2, 4), "HND", F.NL_X_NB_TWO_NH_BS_HS),
        # a K/V axis in front that lies inside the blocks in memory, and the other way round
        ((2, 5, 16, 8, 6), (1, 0, 2, 3, 4), "NHD", F.NL_X_NB_TWO_BS_NH_HS),
        ((5, 2, 16, 8, 6), (1, 0, 2, 3, 4), "NHD", F.NL_X_TWO_NB_BS_NH_HS),
        # two KV heads are no second K/V axis
        ((5, 2, 16, 2, 6), (0, 1, 2, 3, 4), "NHD", F.NL_X_NB_TWO_BS_NH_HS),
        ((2, 5, 2, 16, 6), (0, 1, 2, 3, 4), "HND", F.NL_X_TWO_NB_NH_BS_HS),
    ],
)
def test_keys_and_values_apart(
    shape: tuple[int, ...], order: tuple[int, ...], hint: str, fmt: F
) -> None:
    cache = memory_order(shape, *order)
    caches, formats = detect([cache], hint)
    view = FormattedCaches(caches, formats[0])
    assert formats == [fmt]
    assert (view.num_blocks(), view.block_size(), view.kv_size) == (5, 16, 2)
    planes = view.pages(0).planes
    kv = shape[:2].index(2)
    assert [p.address for p in planes] == [cache.select(kv, i).data_ptr() for i in (0, 1)]


@pytest.mark.parametrize("hints", [None, "NHD", {"kv_layout": "HND"}])
def test_two_blocks_and_a_kv_axis_are_told_apart_only_by_a_stated_format(hints: Any) -> None:
    cache = torch.zeros(2, 2, 16, 8, 6)
    with pytest.raises(AmbiguousLayoutError, match=r"layer 0.*\[2, NB=2.*\[NB=2, 2"):
        detect([cache], hints)
    stated = {"kv_layout": "NHD", "formats": ["NL_X_NB_TWO_BS_NH_HS"]}
    assert detect([cache], stated)[1] == [F.NL_X_NB_TWO_BS_NH_HS]


@pytest.mark.parametrize(
    ("shape", "readings"),
    [
        ((5, 2, 16, 6), ("2 slots of 16 heads", "16 slots of 2 heads")),
        ((5, 1, 16, 6), ("1 slots of 16 heads", "16 slots of 1 heads")),
        ((5, 16, 16, 6), ("16 slots of 16 heads",)),
        ((2, 5, 8, 2, 6), ("8 slots of 2 heads", "2 slots of 8 heads")),
    ],
)
def test_two_readings_without_a_hint_raise_and_are_named(
    shape: tuple[int, ...], readings: tuple[str, ...]
) -> None:
    with pytest.raises(AmbiguousLayoutError, match=r"layer 1 \(b\)") as refused:
        detect({"a": torch.zeros(5, 4, 3), "b": torch.zeros(shape)})
    assert all(reading in str(refused.value) for reading in readings)
    assert "give the layout hint" in str(refused.value)


def test_the_declared_block_settles_what_strides_leave_open() -> None:
    cache = torch.zeros(5, 2, 16, 6)
    for slots, heads in ((16, 2), (2, 16)):
        caches, formats = detect([cache], {"slots_per_block": slots})
        view = FormattedCaches(caches, formats[0])
        assert (view.block_size(), view.num_heads()) == (slots, heads)
    # equal lengths need the order
    with pytest.raises(AmbiguousLayoutError):
        detect([torch.zeros(5, 16, 16, 6)], {"slots_per_block": 16})


def test_a_declared_block_that_no_reading_has_is_a_mismatch() -> None:
    with pytest.raises(GroupMismatchError, match="has 16 slots per block, the engine declares 544"):
        detect([torch.zeros(5, 16, 2, 6)], {"kv_layout": "NHD", "slots_per_block": 544})
    with pytest.raises(GroupMismatchError, match="declares 32"):
        detect([torch.zeros(5, 16, 6)], {"slots_per_block": 32})
    # the hint wins over a block that would fit the other way round
    with pytest.raises(GroupMismatchError, match="has 2 slots per block"):
        detect([torch.zeros(5, 2, 16, 6)], {"kv_layout": "NHD", "slots_per_block": 16})


def test_tokens_per_block_settle_but_do_not_bind() -> None:
    cache = torch.zeros(5, 2, 16, 6)
    infos = [EngineGroupInfo(0, (0,), 16)]
    caches, formats = detect([cache], hints_with_blocks(None, infos, [cache]))
    assert FormattedCaches(caches, formats[0]).block_size() == 16
    # compression: 32 tokens over 16 slots is no contradiction, but needs the order
    compressed = hints_with_blocks("HND", [EngineGroupInfo(0, (0,), 32)], [cache])
    caches, formats = detect([cache], compressed)
    assert FormattedCaches(caches, formats[0]).block_size() == 16


def test_state_rows_of_one_slot_need_no_hint() -> None:
    row = torch.zeros(3 * 64, dtype=torch.int8).as_strided((3, 1, 1, 50), (64, 50, 50, 1))
    caches, formats = detect([row])
    view = FormattedCaches(caches, formats[0])
    assert (view.block_size(), view.num_heads(), view.head_size()) == (1, 1, 50)
    assert view.pages(0).planes[0].block_stride_bytes == 64


@pytest.mark.parametrize("shape", [(5, 64, 132), (5, 1, 64, 132), (5, 64, 1, 132)])
def test_an_indexers_pages_are_planar_in_every_rank(shape: tuple[int, ...]) -> None:
    cache = torch.zeros(shape, dtype=torch.uint8)
    caches, formats = detect([cache], {"kv_layout": "NHD", "slots_per_block": 64})
    assert formats == [F.NL_X_NB_BSV_BSS]
    assert tuple(caches[0].shape) == (5, 64, 132)
    assert FormattedCaches(caches, formats[0]).pages(0).planar_bytes == (128, 4)
    # the same width as signed bytes, or over several heads, is something else
    assert detect([cache.view(torch.int8)], "NHD")[1] != [F.NL_X_NB_BSV_BSS]
    assert detect([torch.zeros(5, 64, 2, 132, dtype=torch.uint8)], "NHD")[1] == [F.NL_X_NB_BS_NH_CS]


def test_tuples_of_planes() -> None:
    pair = (torch.zeros(5, 8, 4, 6), torch.zeros(5, 8, 4, 6))
    latents = (torch.zeros(5, 8, 1, 6), torch.zeros(5, 8, 1, 2))
    three = (*latents, torch.zeros(5, 8, 1, 1))
    caches, formats = detect({"a": pair, "b": list(latents), "c": three}, "NHD")
    assert formats == [F.NL_X_TWO_X_NB_BS_NH_HS] + [F.NL_X_NP_X_NB_BS_ONE_HS] * 2
    assert [len(entry) for entry in caches] == [2, 2, 3]
    with pytest.raises(UnsupportedLayoutError, match="apply_kv_cache_group_edits"):
        detect([[torch.zeros(3, 4), torch.zeros(3, 4, 5)]])
    with pytest.raises(UnsupportedLayoutError, match=r"neither \(K, V\) nor latents"):
        detect([(torch.zeros(5, 8, 4, 6), torch.zeros(5, 8, 4, 7))], "NHD")


def test_one_tensor_of_all_layers() -> None:
    cache = torch.zeros(5, 3, 2, 16, 8, 6)
    caches, formats = detect(cache, "NHD")
    assert formats == [F.NB_NL_TWO_BS_NH_HS] * 3
    manager = KVLayerGroupsManager(caches, formats, (), 16)
    assert manager.kernel_groups[0].layer_indices == (0, 1, 2)
    addresses = [[p.address for p in layer.planes] for layer in manager.layer_pages(0)]
    assert addresses == [[cache[0, i, kv].data_ptr() for kv in (0, 1)] for i in range(3)]
    heads_first = torch.zeros(5, 3, 2, 8, 16, 6)
    assert detect(heads_first, "HND")[1] == [F.NB_NL_TWO_NH_BS_HS] * 3
    with pytest.raises(AmbiguousLayoutError, match="cross-layer cache"):
        detect(cache)
    with pytest.raises(UnsupportedLayoutError, match=r"\[NB, NL, 2, BS, NH, HS\]"):
        detect(torch.zeros(5, 3, 16, 8, 6), "NHD")


def test_layers_in_no_group_are_not_looked_at() -> None:
    odd = torch.zeros(7)
    caches, formats = normalize_and_discover_per_layer_formats(
        {"a": torch.zeros(5, 4, 3), "shared": odd}, [[0]], "vllm"
    )
    assert caches[1] is odd
    assert formats == [F.NL_X_NB_BS_HS] * 2
    manager = KVLayerGroupsManager(caches, formats, [EngineGroupInfo(0, (0,), 4)], 4)
    assert [g.layer_indices for g in manager.kernel_groups] == [(0,)]
    with pytest.raises(GeometryError, match=r"groups name layers \[2\]; 2 layers"):
        normalize_and_discover_per_layer_formats([odd, odd], [[2]], "vllm")


class Engine(Enum):
    VLLM = "vllm"
    TRTLLM = "TRT-LLM"
    OTHER = "other"


def test_engines_by_name_or_enum() -> None:
    assert detect([torch.zeros(5, 4, 3)], engine=Engine.VLLM)[1] == [F.NL_X_NB_BS_HS]
    assert detect([torch.zeros(5, 4, 3)], engine="atom")[1] == [F.NL_X_NB_BS_HS]
    with pytest.raises(UnsupportedLayoutError, match="known are vllm, atom, sglang, trtllm"):
        detect([torch.zeros(5, 4, 3)], engine=Engine.OTHER)


def test_tensorrt_pools() -> None:
    flat = torch.zeros(5, 3, 2, 8 * 16 * 6)
    hints = {"num_kv_heads": 8, "tokens_per_block": 16, "head_dim": 6}
    for caches in (flat, [flat], {"pool": flat}):
        found, formats = detect(caches, hints, Engine.TRTLLM)
        assert tuple(found.shape) == (5, 3, 2, 8, 16, 6)
        assert found.data_ptr() == flat.data_ptr()
        assert formats == [F.NB_NL_TWO_NH_BS_HS] * 3
    with pytest.raises(GeometryError, match=r"768 elements is not num_kv_heads 8 x .* 0 "):
        detect(flat, {"num_kv_heads": 8, "tokens_per_block": 16}, "trtllm")
    with pytest.raises(UnsupportedLayoutError, match="TensorRT-LLM pool"):
        detect(torch.zeros(5, 3, 4), hints, "trtllm")


def test_sglang_lists() -> None:
    keys = [torch.zeros(20, 2, 6) for _ in range(3)]
    caches, formats = detect([keys, keys], None, "sglang")
    assert formats == [F.TWO_X_NL_X_NBBS_NH_HS] * 3
    caches, formats = detect([keys, keys], {"tokens_per_block": 5}, "sglang")
    assert formats == [F.TWO_X_NL_X_NB_BS_NH_HS] * 3
    assert tuple(caches[0][0].shape) == (4, 5, 2, 6)
    split = [t.view(4, 5, 2, 6) for t in keys]
    assert detect([split, split], None, "sglang")[1] == [F.TWO_X_NL_X_NB_BS_NH_HS] * 3
    latents = [torch.zeros(20, 1, 6)]
    assert detect(latents, None, "sglang")[1] == [F.NL_X_NBBS_ONE_HS]
    caches, formats = detect(latents, {"tokens_per_block": 5}, "sglang")
    assert (formats, tuple(caches[0].shape)) == ([F.NL_X_NB_BS_HS], (4, 5, 6))
    assert detect([torch.zeros(4, 5, 6)], {"tokens_per_block": 5}, "sglang")[1] == [F.NL_X_NB_BS_HS]
    unified = {"kv_list_layout": "unified"}
    mixed = [torch.zeros(4, 5, 6), torch.zeros(4, 5, 2, 6)]
    assert detect(mixed, unified, "sglang")[1] == [F.NL_X_NB_BS_HS, F.NL_X_NB_BS_NH_HS]


@pytest.mark.parametrize(
    ("caches", "hints", "why"),
    [
        ([torch.zeros(21, 2, 6)] * 2, {"kv_list_layout": "k_v", "tokens_per_block": 5}, "keys of"),
        ([torch.zeros(20, 2, 6)] * 3, {"kv_list_layout": "k_v"}, "3 tensors are no keys"),
        ([torch.zeros(20, 2, 6)], None, "need kv_list_layout 'k_v'"),
        ([torch.zeros(20, 2, 6)], {"kv_list_layout": "v_k"}, "'v_k' is none of"),
        ([[torch.zeros(4, 5)], [torch.zeros(4, 5)]], None, r"\[2\] axes"),
        (torch.zeros(4), None, "SGLang registers lists"),
        ([torch.zeros(4, 5)], {"kv_list_layout": "unified"}, "layer 0: unified components"),
    ],
)
def test_sglang_structures_that_are_refused(caches: Any, hints: Any, why: str) -> None:
    with pytest.raises(GeometryError, match=why):
        detect(caches, hints, "sglang")


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (torch.zeros(4, 5), "no layout has 2 axes"),
        (torch.zeros(3, 4, 5, 2, 6), "no K/V axis of length 2 in front"),
        (torch.zeros(3, 4, 5, 2, 6, 7), r"is not \[2, NB, NH, 1, BS, HS\]"),
        ("text", "a cache is a tensor"),
    ],
)
def test_tensors_of_no_layout_are_named(cache: Any, why: str) -> None:
    with pytest.raises(UnsupportedLayoutError, match=f"layer 0.*{why}"):
        detect([cache], "NHD")


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ("NO_SUCH_FORMAT", "'NO_SUCH_FORMAT' does not exist"),
        ("NB_NL_TWO_BS_NH_HS", "not a format of single layers"),
        ("NL_X_NB_BS_HS", "is not NL_X_NB_BS_HS"),
        ("NL_X_TWO_NB_BS_NH_HS", "is not NL_X_TWO_NB_BS_NH_HS"),
    ],
)
def test_stated_formats_are_checked(stated: str, why: str) -> None:
    with pytest.raises(GeometryError, match=why):
        detect([torch.zeros(3, 4, 5, 6)], {"formats": stated})


def test_the_deprecated_split_forms_are_served_when_stated() -> None:
    for name in ("NL_X_NB_BS_NH_TWO_HS", "NL_X_NB_NH_BS_TWO_HS"):
        cache = torch.zeros((5, 8, 4, 2, 6) if "BS_NH" in name else (5, 4, 8, 2, 6))
        caches, formats = detect([cache], {"formats": name, "slots_per_block": 8})
        view = FormattedCaches(caches, formats[0])
        assert (view.block_size(), view.num_heads(), view.head_size()) == (8, 4, 12)


def test_hints_come_in_every_form() -> None:
    assert as_layout_hints(None) == LayoutHints()
    assert as_layout_hints("NHD") == LayoutHints(kv_layout="NHD")
    given = LayoutHints(kv_layout="HND", slots_per_block=(4, 8))
    assert as_layout_hints(given) is given
    assert as_layout_hints({"kv_layout": "HND", "slots_per_block": [4, 8]}) == given
    assert as_layout_hints({"head_dim": 64, "tokens_per_block": 32}) == LayoutHints(
        head_size=64, tokens_per_block=(32,)
    )
    with pytest.raises(GeometryError, match=r"\['kv_layuot'\] are unknown"):
        as_layout_hints({"kv_layuot": "NHD"})
    for value in ("[4,", "[4.5]", "[-"):
        with pytest.raises(GeometryError, match=r"slots_per_block|layout hints"):
            as_layout_hints({"slots_per_block": value})
    with pytest.raises(GeometryError, match="layout hints: Expected"):
        as_layout_hints({"num_kv_heads": "many"})
    with pytest.raises(GeometryError, match="slots_per_block has 2 entries for 3 layers"):
        detect([torch.zeros(5, 4, 3)] * 3, given)
    with pytest.raises(GeometryError, match="no caches"):
        detect([])


def test_hints_travel_as_strings() -> None:
    hints = LayoutHints(
        kv_layout="BLHNC",
        slots_per_block=(64, 2, 0),
        formats=("", "NL_X_NB_BS_HS", ""),
        tokens_per_block=(256, 256, 256),
        edits=("", "kernel pages of 32 as bytes", ""),
        kv_list_layout="unified",
        num_kv_heads=8,
        head_size=128,
    )
    wire = hints.to_wire()
    assert wire == {
        "kv_layout": "BLHNC",
        "slots_per_block": "[64,2,0]",
        "formats": '["","NL_X_NB_BS_HS",""]',
        "tokens_per_block": "[256]",
        "kv_list_layout": "unified",
        "num_kv_heads": "8",
        "head_size": "128",
    }
    back = as_layout_hints(wire)
    assert back == LayoutHints(
        kv_layout="BLHNC",
        slots_per_block=(64, 2, 0),
        formats=("", "NL_X_NB_BS_HS", ""),
        tokens_per_block=(256,),
        kv_list_layout="unified",
        num_kv_heads=8,
        head_size=128,
    )
    assert LayoutHints().to_wire() == {}
    assert as_layout_hints({"formats": "NL_X_NB_BS_HS"}).formats == ("NL_X_NB_BS_HS",)
