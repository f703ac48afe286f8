"""The format table: every member's accessors and addresses against literal shapes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hma_triton.errors import GeometryError, UnsupportedLayoutError
from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat, FormattedCaches, layer_pages

F = EngineKVFormat
NL, NB, BS, NH, HS = 3, 4, 5, 2, 6


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = int(np.prod(shape)) * dtype.itemsize
    seed = sum(shape) + noise.calls  # type: ignore[attr-defined]
    noise.calls += 1  # type: ignore[attr-defined]
    raw = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


noise.calls = 0  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Member:
    """What one format is, written out by hand.

    `planes(caches, layer)` gives each plane as `[NB, slots, heads, content]`.
    """

    caches: Any
    planes: Any
    kv_size: int
    heads: int
    head_size: int
    num_ptrs: int


def one_per_layer(*shape: int) -> list[torch.Tensor]:
    return [noise(*shape) for _ in range(NL)]


def swap(tensor: torch.Tensor) -> torch.Tensor:
    """Heads-first planes `[NB, NH, BS, C]` as `[NB, BS, NH, C]`."""
    return tensor.transpose(1, 2)


def members() -> dict[EngineKVFormat, Member]:
    pair = [(noise(NB, BS, NH, HS), noise(NB, BS, NH, HS)) for _ in range(NL)]
    latents = [(noise(NB, BS, 1, HS), noise(NB, BS, 1, 2), noise(NB, BS, 1, 3)) for _ in range(NL)]
    keys_values = [one_per_layer(NB, BS, NH, HS), one_per_layer(NB, BS, NH, HS)]
    return {
        F.NB_NL_TWO_BS_NH_HS: Member(
            noise(NB, NL, 2, BS, NH, HS), lambda c, i: [c[:, i, 0], c[:, i, 1]], 2, NH, HS, 1
        ),
        F.NL_X_TWO_NB_BS_NH_HS: Member(
            one_per_layer(2, NB, BS, NH, HS), lambda c, i: [c[i][0], c[i][1]], 2, NH, HS, NL
        ),
        F.NL_X_NB_TWO_BS_NH_HS: Member(
            one_per_layer(NB, 2, BS, NH, HS), lambda c, i: [c[i][:, 0], c[i][:, 1]], 2, NH, HS, NL
        ),
        F.NL_X_NB_BS_HS: Member(
            one_per_layer(NB, BS, HS), lambda c, i: [c[i].unsqueeze(2)], 1, 1, HS, NL
        ),
        F.NL_X_TWO_NB_NH_BS_HS: Member(
            one_per_layer(2, NB, NH, BS, HS), lambda c, i: [swap(p) for p in c[i]], 2, NH, HS, NL
        ),
        F.NL_X_NB_TWO_NH_BS_HS: Member(
            one_per_layer(NB, 2, NH, BS, HS),
            lambda c, i: [swap(c[i][:, 0]), swap(c[i][:, 1])],
            2,
            NH,
            HS,
            NL,
        ),
        F.NB_NL_TWO_NH_BS_HS: Member(
            noise(NB, NL, 2, NH, BS, HS),
            lambda c, i: [swap(c[:, i, 0]), swap(c[:, i, 1])],
            2,
            NH,
            HS,
            1,
        ),
        F.TWO_X_NL_X_NB_BS_NH_HS: Member(
            keys_values, lambda c, i: [c[0][i], c[1][i]], 2, NH, HS, 2 * NL
        ),
        F.NL_X_NB_NH_BS_TWO_HS: Member(
            one_per_layer(NB, NH, BS, 2, HS),
            lambda c, i: [swap(c[i].flatten(3))],
            1,
            NH,
            2 * HS,
            NL,
        ),
        F.NL_X_NB_BS_NH_TWO_HS: Member(
            one_per_layer(NB, BS, NH, 2, HS), lambda c, i: [c[i].flatten(3)], 1, NH, 2 * HS, NL
        ),
        F.NL_X_NB_NH_BS_CS: Member(
            one_per_layer(NB, NH, BS, HS), lambda c, i: [swap(c[i])], 1, NH, HS, NL
        ),
        F.NL_X_NB_BS_NH_CS: Member(
            one_per_layer(NB, BS, NH, HS), lambda c, i: [c[i]], 1, NH, HS, NL
        ),
        F.NL_X_NB_BSV_BSS: Member(
            [noise(NB, BS, 132, dtype=torch.uint8) for _ in range(NL)],
            lambda c, i: [c[i].unsqueeze(2)],
            1,
            1,
            132,
            NL,
        ),
        F.NL_X_TWO_NB_NH_ONE_BS_HS: Member(
            one_per_layer(2, NB, NH, 1, BS, HS),
            lambda c, i: [swap(p.squeeze(2)) for p in c[i]],
            2,
            NH,
            HS,
            NL,
        ),
        F.NL_X_TWO_X_NB_BS_NH_HS: Member(pair, lambda c, i: list(c[i]), 2, NH, HS, 2 * NL),
        F.NL_X_NP_X_NB_BS_ONE_HS: Member(latents, lambda c, i: list(c[i]), 1, 1, HS + 5, 3 * NL),
        F.NL_X_NB_BS_NH_HS: Member(
            one_per_layer(NB, BS, NH, HS), lambda c, i: [c[i]], 1, NH, HS, NL
        ),
    }


FOLDED = {
    F.TWO_X_NL_X_NBBS_NH_HS: ([[noise(NB * BS, NH, HS)] * NL] * 2, NH),
    F.NL_X_NBBS_ONE_HS: ([noise(NB * BS, 1, HS)] * NL, 1),
}
MEMBERS = members()


def test_every_member_has_a_row_and_a_case() -> None:
    assert set(FORMAT_ROWS) == set(EngineKVFormat)
    assert set(MEMBERS) | set(FOLDED) == set(EngineKVFormat)
    assert len(EngineKVFormat) == 19
    assert [fmt.value for fmt in EngineKVFormat] == list(range(19))


@pytest.mark.parametrize("fmt", list(EngineKVFormat), ids=lambda fmt: fmt.name)
def test_a_row_is_what_the_name_spells(fmt: EngineKVFormat) -> None:
    *lists, axes = fmt.name.split("_X_")
    row = FORMAT_ROWS[fmt]
    assert row.lists == tuple(lists)
    spelled = axes.replace("BSV_BSS", "BS_HS").split("_")
    assert row.axes == tuple(spelled)
    assert bool(row.planar_bytes) == ("BSV" in axes)


@pytest.mark.parametrize("fmt", list(MEMBERS), ids=lambda fmt: fmt.name)
def test_accessors(fmt: EngineKVFormat) -> None:
    member = MEMBERS[fmt]
    view = FormattedCaches(member.caches, fmt)
    assert view.num_layers == NL
    assert view.kv_size == member.kv_size
    for layer in range(NL):
        assert (view.num_blocks(layer), view.block_size(layer)) == (NB, BS)
        assert view.num_slots(layer) == NB * BS
        assert view.num_heads(layer) == member.heads
        assert view.head_size(layer) == member.head_size
        assert view.hidden_dim(layer) == member.heads * member.head_size
        assert view.dtype(layer) == view.tensors(layer)[0].dtype
        first = member.planes(member.caches, layer)[0]
        assert view.block_stride_elems(layer) == first.stride(0)
    pointers = view.data_ptrs(range(NL))
    assert len(pointers) == member.num_ptrs
    firsts = [member.planes(member.caches, layer)[0].data_ptr() for layer in range(NL)]
    assert pointers[0] == firsts[0]
    assert set(pointers) >= set(firsts[:1] if FORMAT_ROWS[fmt].is_cross_layer else firsts)


@pytest.mark.parametrize("fmt", list(MEMBERS), ids=lambda fmt: fmt.name)
def test_addresses_are_indexing(fmt: EngineKVFormat) -> None:
    member = MEMBERS[fmt]
    found = layer_pages(fmt, member.caches)
    assert len(found) == NL
    for layer, pages in enumerate(found):
        planes = member.planes(member.caches, layer)
        assert (pages.num_blocks, pages.num_slots, pages.num_heads) == (NB, BS, member.heads)
        assert len(pages.planes) == len(planes)
        width = planes[0].element_size()
        assert pages.page_bytes == sum(p[0].numel() for p in planes) * width
        assert pages.planar_bytes == ((128, 4) if fmt is F.NL_X_NB_BSV_BSS else ())
        for place, plane in zip(pages.planes, planes, strict=True):
            assert place.content_bytes == plane.shape[3] * width
            for block, slot, head in np.ndindex(NB, BS, plane.shape[2]):
                at = (
                    place.address
                    + block * place.block_stride_bytes
                    + slot * place.slot_stride_bytes
                    + head * place.head_stride_bytes
                )
                raw = ctypes.string_at(at, place.content_bytes)
                assert raw == plane[block, slot, head].contiguous().numpy().tobytes()


@pytest.mark.parametrize("fmt", list(FOLDED), ids=lambda fmt: fmt.name)
def test_folded_formats_know_slots_but_no_blocks(fmt: EngineKVFormat) -> None:
    caches, heads = FOLDED[fmt]
    view = FormattedCaches(caches, fmt)
    assert (view.num_slots(), view.num_heads(), view.head_size()) == (NB * BS, heads, HS)
    assert view.kv_size == (2 if FORMAT_ROWS[fmt].is_kv_list else 1)
    for ask in (view.num_blocks, view.block_size, view.block_stride_elems):
        with pytest.raises(GeometryError, match="tokens_per_block"):
            ask()
    with pytest.raises(GeometryError, match="tokens_per_block"):
        layer_pages(fmt, caches)


def test_lists_order_pointers_as_lmcache_takes_them() -> None:
    keys, values = [noise(NB, BS, NH, HS) for _ in range(2)], [noise(NB, BS, NH, HS)] * 2
    split = FormattedCaches([keys, values], F.TWO_X_NL_X_NB_BS_NH_HS)
    assert split.data_ptrs([0, 1]) == [t.data_ptr() for t in (*keys, *values)]
    pairs = FormattedCaches(list(zip(keys, values, strict=True)), F.NL_X_TWO_X_NB_BS_NH_HS)
    assert pairs.data_ptrs([1]) == [keys[1].data_ptr(), values[1].data_ptr()]


def test_a_rank_that_is_not_the_formats_is_named() -> None:
    with pytest.raises(UnsupportedLayoutError, match="layer 0: NL_X_NB_BS_HS has 3 axes"):
        layer_pages(F.NL_X_NB_BS_HS, [noise(NB, BS, NH, HS)])


def test_latents_of_several_widths_must_make_up_whole_elements() -> None:
    odd = [(noise(NB, BS, 1, 3), noise(NB, BS, 1, 3, dtype=torch.uint8))]
    with pytest.raises(GeometryError, match="15 bytes per slot"):
        FormattedCaches(odd, F.NL_X_NP_X_NB_BS_ONE_HS).head_size()
