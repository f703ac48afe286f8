"""Field cases of strides, padding, offsets and widths, as copies of real tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from hma_triton.engine import TransferEngine
from hma_triton.errors import PlanError
from hma_triton.kernels.addressing import (
    CopySpec,
    Direction,
    Int64Array,
    ObjectLayout,
    RegionSpecs,
    build_region,
)
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kv_format import LayerPages, PlanePages

POISON = 0xEE


def layer_of(view: torch.Tensor, content_bytes: int | None = None) -> LayerPages:
    """Pages of a byte tensor `[blocks, slots, content]` with any step between blocks."""
    blocks, slots, content = view.shape
    content_bytes = content_bytes or content
    plane = PlanePages(view.data_ptr(), view.stride(0), view.stride(1), content, content_bytes)
    return LayerPages(planes=(plane,), num_blocks=blocks, num_slots=slots, num_heads=1)


def region_of(
    layers: Sequence[LayerPages], blocks: int, layout: ObjectLayout = ObjectLayout.OPAQUE
) -> RegionSpecs:
    return build_region(0, layers, blocks, layout)


def move(
    copier: CpuCopier,
    region: RegionSpecs,
    direction: Direction,
    block_ids: Sequence[int],
    held: torch.Tensor,
) -> None:
    copier.prepare(region.specs)
    ids = np.array(block_ids, dtype=np.int64)
    for spec in region.specs:
        copier.copy_blocks(spec, direction, ids, places_of(spec, len(ids), held))


def places_of(spec: CopySpec, count: int, held: torch.Tensor) -> Int64Array:
    steps = np.arange(count, dtype=np.int64) * spec.object_block_stride_bytes
    return held.data_ptr() + spec.region_offset_bytes + steps


def noise(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@pytest.fixture(params=list(ObjectLayout), ids=lambda layout: layout.value)
def layout(request: pytest.FixtureRequest) -> Iterator[ObjectLayout]:
    yield request.param


def test_padding_after_a_block_is_never_copied(copier: CpuCopier, layout: ObjectLayout) -> None:
    """Case 16: 8,448 live bytes a block, 96 bytes of padding."""
    storage = torch.full((4 * 8544,), POISON, dtype=torch.uint8)
    view = storage.as_strided((4, 64, 132), (8544, 132, 1))
    live = noise(4, 64, 132)
    view.copy_(live)
    region = region_of([layer_of(view)], 2, layout)
    assert region.region_bytes == 2 * 8448
    held = torch.zeros(region.region_bytes, dtype=torch.uint8)
    move(copier, region, Direction.STORE, [2, 0], held)
    assert torch.equal(held.view(2, 64, 132), live[[2, 0]])
    move(copier, region, Direction.RETRIEVE, [3, 1], held)
    assert torch.equal(view, live[[0, 0, 2, 2]])
    padding = storage.as_strided((4, 96), (8544, 1), 8448)
    assert bool((padding == POISON).all())


def test_a_view_at_an_offset_spares_its_neighbour(copier: CpuCopier) -> None:
    """Case 17: views at bytes 0 and 8640 of one buffer with a common step."""
    step = 17_280
    storage = noise(200_000)
    first = storage.as_strided((11, 64, 132), (step, 132, 1), 0)
    second = storage.as_strided((11, 64, 132), (step, 132, 1), 8640)
    before, kept = first.clone(), storage.clone()
    region = region_of([layer_of(second)], 11)
    held = noise(region.region_bytes)
    move(copier, region, Direction.RETRIEVE, [*range(10, -1, -1)], held)
    assert torch.equal(second.flip(0).reshape(-1), held)
    assert torch.equal(first, before)
    gaps = storage != kept
    gaps.as_strided((11, 64, 132), (step, 132, 1), 8640).fill_(False)
    assert not bool(gaps.any())


def test_a_padded_state_page_is_its_live_bytes(copier: CpuCopier) -> None:
    """Case 19: rows of 8000 elements on steps of 8064; the padding stays."""
    storage = torch.full((3 * 8064,), -3.0, dtype=torch.bfloat16)
    rows = storage.as_strided((3, 8000), (8064, 1))
    rows.copy_(torch.randn(3, 8000, generator=torch.Generator().manual_seed(1)))
    expected = rows.clone()
    plane = PlanePages(storage.data_ptr(), 8064 * 2, 16_000, 16_000, 16_000)
    region = region_of([LayerPages((plane,), 3, 1, 1)], 2)
    assert region.region_bytes == 2 * 16_000
    held = torch.zeros(region.region_bytes, dtype=torch.uint8)
    move(copier, region, Direction.STORE, [2, 1], held)
    assert torch.equal(held.view(torch.bfloat16).view(2, 8000), expected[[2, 1]])
    rows.zero_()
    move(copier, region, Direction.RETRIEVE, [2, 1], held)
    assert torch.equal(rows[1:], expected[1:])
    assert bool((rows[0] == 0).all())
    assert bool((storage.as_strided((3, 64), (8064, 1), 8000) == -3.0).all())


def test_layers_keep_the_order_of_registration(copier: CpuCopier, layout: ObjectLayout) -> None:
    """Case 20: layers at offsets 2N, 0, N that hold 2, 0, 1."""
    size = 4 * 16 * 8
    storage = torch.arange(3, dtype=torch.uint8).repeat_interleave(size)
    views = [storage[i * size : (i + 1) * size].view(4, 16, 8) for i in (2, 0, 1)]
    region = region_of([layer_of(view) for view in views], 1, layout)
    held = torch.full((region.region_bytes,), POISON, dtype=torch.uint8)
    move(copier, region, Direction.STORE, [3], held)
    assert held.view(3, -1)[:, 0].tolist() == [2, 0, 1]
    assert torch.equal(held, torch.tensor([2, 0, 1], dtype=torch.uint8).repeat_interleave(128))


def planar_pool() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, LayerPages]:
    """8 pages of 64 slots: all values (128 bytes each), then all scales (4 bytes each)."""
    pages = noise(8, 64 * 132)
    values = pages.as_strided((8, 64, 128), (8448, 128, 1))
    scales = pages.as_strided((8, 64, 4), (8448, 4, 1), 64 * 128)
    plane = PlanePages(pages.data_ptr(), 8448, 132, 132, 132)
    return pages, values, scales, LayerPages((plane,), 8, 64, 1, planar_bytes=(128, 4))


def test_planar_pages_move_whole_without_their_layout(copier: CpuCopier) -> None:
    """Case 22, equal alignment: a page is its bytes."""
    pages, _, _, layer = planar_pool()
    before = pages.clone()
    region = region_of([layer], 2)
    held = torch.zeros(region.region_bytes, dtype=torch.uint8)
    move(copier, region, Direction.STORE, [5, 2], held)
    assert torch.equal(held.view(2, -1), before[[5, 2]])
    move(copier, region, Direction.RETRIEVE, [1, 7], held)
    assert torch.equal(pages, before[[0, 5, 2, 3, 4, 5, 6, 2]])


def test_planar_pages_become_token_rows(copier: CpuCopier) -> None:
    """Case 22: in token rows every token has its value and its scale."""
    _, values, scales, layer = planar_pool()
    region = region_of([layer], 2, ObjectLayout.TOKEN_MAJOR)
    held = torch.zeros(region.region_bytes, dtype=torch.uint8)
    move(copier, region, Direction.STORE, [5, 2], held)
    expected = torch.cat((values[[5, 2]], scales[[5, 2]]), dim=-1)
    assert torch.equal(held.view(2, 64, 132), expected)
    values.zero_()
    scales.zero_()
    move(copier, region, Direction.RETRIEVE, [0, 6], held)
    assert torch.equal(torch.cat((values[[0, 6]], scales[[0, 6]]), dim=-1), expected)


def test_planar_tokens_move_to_another_alignment(copier: CpuCopier) -> None:
    """Case 22: 96 tokens from slots 32-127 to slots 17-112, by the planar map."""
    _, values, scales, layer = planar_pool()
    wanted_values, wanted_scales = (
        field.reshape(512, -1)[32:128].clone() for field in (values, scales)
    )
    rows = torch.zeros(96, 132, dtype=torch.uint8)
    _move_tokens(copier, layer, Direction.STORE, range(32, 128), rows)
    assert torch.equal(rows, torch.cat((wanted_values, wanted_scales), dim=-1))
    before = values.reshape(512, -1).clone()
    _move_tokens(copier, layer, Direction.RETRIEVE, range(17, 113), rows)
    assert torch.equal(values.reshape(512, -1)[17:113], wanted_values)
    assert torch.equal(scales.reshape(512, -1)[17:113], wanted_scales)
    assert torch.equal(values.reshape(512, -1)[:17], before[:17])
    assert torch.equal(values.reshape(512, -1)[113:], before[113:])


def _move_tokens(
    copier: CpuCopier, layer: LayerPages, direction: Direction, slots: range, rows: torch.Tensor
) -> None:
    """Tokens one by one: ids are slots of a page, each planar field a spec of its own."""
    for page in range(slots[0] // 64, slots[-1] // 64 + 1):
        inside = np.array([slot % 64 for slot in slots if slot // 64 == page], dtype=np.int64)
        first = page * 64 + int(inside[0]) - slots[0]
        for start, width, offset in ((0, 128, 0), (64 * 128, 4, 128)):
            base = layer.planes[0].address + page * 8448 + start
            spec = CopySpec(
                0, (base,), width, 64, 0, 132, 132, 64, 1, width, width, 1, width, width, width
            )
            copier.prepare([spec])
            steps = (first + np.arange(len(inside), dtype=np.int64)) * 132
            copier.copy_blocks(spec, direction, inside, rows.data_ptr() + steps + offset)


def test_keys_of_an_interleaved_pool_leave_values_alone(copier: CpuCopier) -> None:
    """Case 23: K = pool[:, 0] of (4, 2, 8, 2, 4); its block step is twice the dense one."""
    pool = noise(4, 2, 8, 2, 4)
    before = pool.clone()
    keys = pool[:, 0].reshape(4, 8, 8) if pool[:, 0].is_contiguous() else pool[:, 0].flatten(2)
    assert keys.data_ptr() == pool.data_ptr()
    assert keys.stride(0) == 128
    region = region_of([layer_of(keys)], 1)
    held = torch.zeros(region.region_bytes, dtype=torch.uint8)
    move(copier, region, Direction.STORE, [3], held)
    assert torch.equal(held, before[3, 0].reshape(-1))
    assert torch.equal(pool, before)
    move(copier, region, Direction.RETRIEVE, [1], held)
    before[1, 0] = before[3, 0]
    assert torch.equal(pool, before)


def test_row_width_comes_from_the_registered_tensor() -> None:
    """Case 25: rows of 656 bytes; an object of 576-byte rows is refused before a byte moves."""
    pool = noise(6, 16, 656)
    before = pool.clone()
    engine = TransferEngine(
        [pool], layout_hints={"tokens_per_block": 16}, chunk_tokens=16, backend="cpu"
    )
    assert engine.object_nbytes(0) == 16 * 656
    narrow = noise(16 * 576)
    for way in (engine.store, engine.retrieve):
        with pytest.raises(PlanError, match=r"buffer of 9216 bytes, its objects have 10496"):
            way([[3]], [[narrow]])
    assert torch.equal(pool, before)
    assert torch.equal(narrow, noise(16 * 576))
    engine.close()


@pytest.mark.parametrize("row_bytes", [512, 576, 640, 656])
def test_store_and_retrieve_take_the_same_way(copier: CpuCopier, row_bytes: int) -> None:
    """Case 26: one rule for both directions, and the choice is reported."""
    pool = noise(5, 16, row_bytes)
    region = region_of([layer_of(pool)], 4)
    (spec,) = region.specs
    copier.prepare([spec])
    assert copier.way_of(spec, Direction.STORE) == copier.way_of(spec, Direction.RETRIEVE)
    assert copier.way_of(spec, Direction.STORE) in ("compiled, runs", "numpy")
    held = torch.zeros(region.region_bytes, dtype=torch.uint8)
    move(copier, region, Direction.STORE, [3, 1, 4, 0], held)
    assert torch.equal(held.view(4, 16, row_bytes), pool[[3, 1, 4, 0]])


@pytest.mark.parametrize("align", [1, 2, 8, 16, 64, 512, 4096, 16_384])
def test_objects_at_any_alignment(copier: CpuCopier, align: int) -> None:
    """Case 28, at the copy: what an arena advertises changes the speed, never the bytes."""
    pool = noise(4, 2, 16, 64)
    pages = [
        LayerPages((PlanePages(pool.data_ptr(), 2048, 64, 1024, 64),), 4, 16, 2),
    ]
    region = region_of(pages, 3, ObjectLayout.TOKEN_MAJOR)
    raw = torch.full((region.region_bytes + 3 * align + 64,), POISON, dtype=torch.uint8)
    start = -raw.data_ptr() % (2 * align) + align
    held = raw[start : start + region.region_bytes]
    assert held.data_ptr() % (2 * align) == align
    move(copier, region, Direction.STORE, [3, 0, 2], held)
    assert torch.equal(held.view(3, 16, 2, 64), pool[[3, 0, 2]].transpose(1, 2))
    assert bool((raw[:start] == POISON).all())
    assert bool((raw[start + region.region_bytes :] == POISON).all())


def test_groups_that_share_a_buffer_are_addressed_by_page(copier: CpuCopier) -> None:
    """Case 29: blocks of 16 x 64 and of 32 x 32 bytes on one buffer of six 1 KiB pages."""
    storage = torch.zeros(6 * 1024, dtype=torch.uint8)
    for shape, block_id, value in (((6, 16, 64), 2, 7), ((6, 32, 32), 1, 9)):
        region = region_of([layer_of(storage.view(shape))], 1)
        held = torch.full((region.region_bytes,), value, dtype=torch.uint8)
        move(copier, region, Direction.RETRIEVE, [block_id], held)
    assert (storage == 7).nonzero().flatten().tolist() == [*range(2048, 3072)]
    assert (storage == 9).nonzero().flatten().tolist() == [*range(1024, 2048)]


def test_the_largest_offset_of_a_view_is_its_own() -> None:
    """Case 97: K and V are half of a buffer each; no bound speaks of the whole buffer."""
    pool = torch.zeros(2, 50, 16, 2, 8, dtype=torch.bfloat16)
    for plane in pool:
        pages = PlanePages(plane.data_ptr(), 512, 32, 16, 16)
        (spec,) = region_of([LayerPages((pages,), 50, 16, 2)], 1).specs
        brute = max(
            sum(i * s for i, s in zip(index, plane.stride(), strict=True))
            for index in np.ndindex(*plane.shape)
        )
        end = (spec.num_blocks - 1) * spec.block_stride_bytes + spec.pool_extent_bytes
        assert end == (brute + 1) * 2 == pool.nbytes // 2
