"""Object layouts byte by byte: what `build_region` says against plain tensor indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hma_triton.errors import UnsupportedLayoutError
from hma_triton.kernels.addressing import (
    CopySpec,
    Direction,
    ObjectLayout,
    RegionSpecs,
    build_region,
    merge_adjacent,
)
from hma_triton.kernels.reference import ReferenceCopier
from hma_triton.kv_format import EngineKVFormat, LayerPages, PlanePages, layer_pages


def random_bytes(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def pages_of(
    tensor: torch.Tensor, block: int, slot: int, head: int, plane: int | None
) -> LayerPages:
    """Pages of a uint8 tensor whose axes are named by index; the last axis is the content."""
    count = 1 if plane is None else tensor.shape[plane]
    planes = tuple(
        PlanePages(
            address=tensor.data_ptr() + (index * tensor.stride(plane) if plane is not None else 0),
            block_stride_bytes=tensor.stride(block),
            slot_stride_bytes=tensor.stride(slot),
            head_stride_bytes=tensor.stride(head),
            content_bytes=tensor.shape[-1],
        )
        for index in range(count)
    )
    return LayerPages(
        planes=planes,
        num_blocks=tensor.shape[block],
        num_slots=tensor.shape[slot],
        num_heads=tensor.shape[head],
    )


def gather(region: RegionSpecs, block_ids: list[int]) -> torch.Tensor:
    """One object's region, stored through the reference."""
    out = torch.full((region.region_bytes,), 0xA5, dtype=torch.uint8)
    ids = np.asarray(block_ids, dtype=np.int64)
    for spec in region.specs:
        places = (
            out.data_ptr()
            + spec.region_offset_bytes
            + np.arange(ids.size, dtype=np.int64) * spec.object_block_stride_bytes
        )
        ReferenceCopier().copy_blocks(spec, Direction.STORE, ids, places)
    return out


def opaque(pages: list[LayerPages], blocks: int) -> RegionSpecs:
    return build_region(0, pages, blocks, ObjectLayout.OPAQUE)


def token_major(pages: list[LayerPages], blocks: int) -> RegionSpecs:
    return build_region(0, pages, blocks, ObjectLayout.TOKEN_MAJOR)


def test_kv_first_layers_are_rows_of_their_own() -> None:
    layers = [random_bytes(2, 7, 4, 3, 8) + index for index in range(3)]
    pages = [pages_of(layer, 1, 2, 3, 0) for layer in layers]
    region = opaque(pages, 2)
    expected = torch.cat([layer[plane][[5, 1]].reshape(-1) for layer in layers for plane in (0, 1)])
    assert torch.equal(gather(region, [5, 1]), expected)
    assert [spec.num_rows for spec in region.specs] == [6]
    rows = torch.stack(
        [torch.stack([layer[plane][[5, 1]] for layer in layers]) for plane in (0, 1)]
    )
    assert torch.equal(gather(token_major(pages, 2), [5, 1]), rows.reshape(-1))


def test_planes_that_adjoin_in_a_block_are_one_page() -> None:
    layers = [random_bytes(7, 2, 4, 3, 8), random_bytes(7, 2, 4, 3, 8).flip(0).contiguous()]
    pages = [pages_of(layer, 0, 2, 3, 1) for layer in layers]
    region = opaque(pages, 2)
    expected = torch.cat([layer[[6, 2]].reshape(-1) for layer in layers])
    assert torch.equal(gather(region, [6, 2]), expected)
    assert region.specs[0].run_bytes == 2 * 4 * 3 * 8
    rows = torch.stack([torch.stack([layer[[6, 2]][:, p] for layer in layers]) for p in (0, 1)])
    assert torch.equal(gather(token_major(pages, 2), [6, 2]), rows.reshape(-1))


def test_heads_major_pages_lie_as_they_are_or_are_transposed() -> None:
    layers = [random_bytes(5, 3, 4, 8), random_bytes(5, 3, 4, 8).flip(1).contiguous()]
    pages = [pages_of(layer, 0, 2, 1, None) for layer in layers]
    ids = [4, 0]
    plain = torch.cat([layer[ids].reshape(-1) for layer in layers])
    assert torch.equal(gather(opaque(pages, 2), ids), plain)
    rows = torch.cat([layer[ids].transpose(1, 2).reshape(-1) for layer in layers])
    assert torch.equal(gather(token_major(pages, 2), ids), rows)


def test_block_outermost_pools_keep_their_nesting_and_merge_layers() -> None:
    pool = random_bytes(6, 3, 4, 2, 8)  # [block, layer, slot, head, content]
    pages = [pages_of(pool[:, layer], 0, 1, 2, None) for layer in range(3)]
    region = opaque(pages, 2)
    assert [(spec.num_rows, spec.run_bytes) for spec in region.specs] == [(1, 3 * 64)]
    assert region.specs[0].merges_blocks
    assert torch.equal(gather(region, [3, 5]), pool[[3, 5]].reshape(-1))
    rows = torch.cat([pool[[3, 5], layer].reshape(-1) for layer in range(3)])
    assert torch.equal(gather(token_major(pages, 2), [3, 5]), rows)


def test_layers_out_of_address_order_keep_registration_order() -> None:
    # case 20: layers at offsets 2N, 0, N
    pool = random_bytes(6, 3, 16)
    order = [2, 0, 1]
    pages = [
        LayerPages(
            planes=(PlanePages(pool.data_ptr() + layer * 16, 48, 16, 16, 16),),
            num_blocks=6,
            num_slots=1,
            num_heads=1,
        )
        for layer in order
    ]
    region = opaque(pages, 1)
    assert region.specs[0].num_rows == 3
    assert torch.equal(gather(region, [4]), pool[4, order].reshape(-1))


def test_padded_state_rows_never_carry_their_padding() -> None:
    # case 19 in bytes: rows of 8000 live bytes, 8064 apart
    storage = random_bytes(3 * 8064)
    rows = torch.as_strided(storage, (3, 1, 1, 8000), (8064, 8000, 8000, 1))
    pages = [pages_of(rows, 0, 1, 2, None)]
    for region in (opaque(pages, 1), token_major(pages, 1)):
        assert region.region_bytes == 8000
        assert torch.equal(gather(region, [2]), rows[2].reshape(-1))


def test_planar_pages_stay_planar_or_become_token_rows() -> None:
    slots, values, scales = 64, 128, 4
    storage = random_bytes(5, slots * (values + scales))
    pages = [
        LayerPages(
            planes=(PlanePages(storage.data_ptr(), storage.stride(0), 132, 132, 132),),
            num_blocks=5,
            num_slots=slots,
            num_heads=1,
            planar_bytes=(values, scales),
        )
    ]
    assert torch.equal(gather(opaque(pages, 2), [3, 1]), storage[[3, 1]].reshape(-1))
    rows = torch.cat(
        [
            torch.cat(
                [page[: slots * values].view(slots, values), page[slots * values :].view(slots, 4)],
                dim=1,
            ).reshape(-1)
            for page in (storage[3], storage[1])
        ]
    )
    assert torch.equal(gather(token_major(pages, 2), [3, 1]), rows)


@pytest.mark.parametrize(("latent_bytes", "rope_bytes"), [(24, 8), (16, 16)])
def test_planes_of_a_latent_stand_side_by_side_in_token_rows(
    latent_bytes: int, rope_bytes: int
) -> None:
    latent, rope = random_bytes(5, 4, 1, latent_bytes), random_bytes(5, 4, 1, rope_bytes)
    (layer,) = layer_pages(EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS, [(latent, rope)])
    plain = torch.cat([latent[[2, 4]].reshape(-1), rope[[2, 4]].reshape(-1)])
    assert torch.equal(gather(opaque([layer], 2), [2, 4]), plain)
    rows = torch.cat([latent[[2, 4]], rope[[2, 4]]], dim=-1).reshape(-1)
    assert torch.equal(gather(token_major([layer], 2), [2, 4]), rows)


def test_interior_padding_is_refused() -> None:
    padded = random_bytes(5, 4, 3, 16)[..., :8]
    with pytest.raises(UnsupportedLayoutError, match="interior padding"):
        opaque([pages_of(padded, 0, 1, 2, None)], 1)
    with pytest.raises(UnsupportedLayoutError, match="interior padding"):
        token_major([pages_of(padded, 0, 1, 2, None)], 1)


def make_spec(run: int = 64, block_stride: int = 64) -> CopySpec:
    return CopySpec(0, (4096,), block_stride, 100, 0, 640, run, 10, 1, run, run, 1, run, run, run)


def test_neighbours_merge_only_where_both_sides_adjoin() -> None:
    ids = np.array([4, 5, 6, 9, 10, 2])
    places = np.array([0, 64, 128, 192, 320, 384])
    firsts, addresses, lengths = merge_adjacent(make_spec(), ids, places)
    assert firsts.tolist() == [4, 9, 10, 2]
    assert addresses.tolist() == [0, 192, 320, 384]
    assert lengths.tolist() == [3, 1, 1, 1]
    _, _, lengths = merge_adjacent(make_spec(block_stride=80), ids, places)
    assert lengths.tolist() == [1] * 6
    firsts, _, lengths = merge_adjacent(make_spec(), ids[:0], places[:0])
    assert firsts.size == lengths.size == 0
