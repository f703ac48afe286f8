"""Field cases of kind K2: strides, padding, offsets and alignment that were not looked at."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.round_trips import POISON, RoundTrip, as_bytes, byte_storage, fill_with_noise

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.errors import GroupMismatchError, PlanError, UnsupportedLayoutError
from hma_triton.geometries import stand_ins
from hma_triton.group_view import EngineGroupInfo
from hma_triton.integration.vllm.kv_cache_group_edits import apply_kv_cache_group_edits
from hma_triton.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.paths import CopyShape, choose_path, path_table
from hma_triton.kv_layer_groups import KVLayerGroupsManager
from hma_triton.kv_strides import check_plane_strides
from hma_triton.objects.arena import SLOT_ALIGN_BYTES, Arena


def padded_rows(blocks: int, slots: int, width: int, step: int, offset: int = 0) -> torch.Tensor:
    """uint8 `[blocks, slots, width]`, blocks `step` bytes apart, over bytes of poison."""
    storage = torch.full((offset + blocks * step,), POISON, dtype=torch.uint8)
    return storage.as_strided((blocks, slots, width), (step, width, 1), offset)


def test_case_16_padding_between_blocks_is_stepped_over_and_never_touched() -> None:
    pool = padded_rows(4, 64, 132, 8544)
    for block in range(4):
        pool[block] = torch.randint(0, POISON, (64, 132), dtype=torch.uint8)
    before = pool.clone()
    trip = RoundTrip([pool], chunk_tokens=128)
    assert trip.engine.manager.kernel_groups[0].shape_desc.block_stride_elems == 8544
    assert trip.engine.object_nbytes(0) == 2 * 64 * 132
    trip.store([2, 0])
    pool.fill_(0)
    trip.retrieve([3, 1])
    assert torch.equal(pool[3], before[2])
    assert torch.equal(pool[1], before[0])
    padding = byte_storage(pool).view(4, 8544)[:, 64 * 132 :]
    assert padding.shape == (4, 96)
    assert bool((padding == POISON).all())


def test_case_17_a_view_at_an_offset_leaves_its_sibling_alone() -> None:
    step, blocks = 8640 + 37440, 4
    storage = torch.randint(0, 256, (blocks * step,), dtype=torch.uint8)
    first = storage.as_strided((blocks, 64, 132), (step, 132, 1), 0)
    second = storage.as_strided((blocks, 64, 584), (step, 584, 1), 8640)
    infos = [EngineGroupInfo(0, (0,), 64), EngineGroupInfo(0, (1,), 64)]
    trip = RoundTrip({"first": first, "second": second}, infos, chunk_tokens=64)
    assert trip.engine.manager.layer_pages(1)[0].planes[0].address == storage.data_ptr() + 8640
    before, wanted = first.clone(), second[1].clone()
    trip.store([1], [1])
    second.fill_(0)
    # the first view's blocks are written with what they hold, the second's with block 1
    trip.engine.retrieve([[1], [3]], trip.objects)
    assert torch.equal(first, before)
    assert torch.equal(second[3], wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND", "BLNHC", "BLHNC"])
def test_case_19_a_padded_state_page_is_its_live_bytes_at_the_tensors_step(layout: str) -> None:
    storage = torch.zeros(3 * 8064, dtype=torch.bfloat16)
    page = storage.as_strided((3, 1, 1, 8000), (8064, 8000, 8000, 1))
    with pytest.raises(RuntimeError):
        page.view(3, 16, 1, 504)
    spec = stand_ins.MambaSpec(
        block_size=16,
        shapes=((8000,),),
        dtypes=(torch.bfloat16,),
        page_size_bytes=8064 * 2,
        mamba_cache_mode="align",
    )
    config = stand_ins.KVCacheConfig(
        num_blocks=3,
        kv_cache_groups=[stand_ins.KVCacheGroupSpec(layer_names=["m"], kv_cache_spec=spec)],
        kv_cache_layout=layout,
    )
    edited = apply_kv_cache_group_edits(config, {"m": page}, layout)["m"]
    assert edited.data_ptr() == page.data_ptr()
    assert edited.stride(0) * edited.element_size() == 8064 * 2
    assert edited[0].numel() * edited.element_size() == 8000 * 2
    infos = create_engine_group_infos_from_vllm(config, {"m": edited}, layout)
    assert infos == [EngineGroupInfo(0, (0,), 16, 16, 0, True)]
    storage.view(torch.uint8).fill_(POISON)
    page.view(torch.uint8)[1] = 7
    trip = RoundTrip({"m": edited}, infos, layout_hints=layout, chunk_tokens=16)
    assert trip.engine.object_nbytes(0) == 16000
    trip.store([1])
    trip.retrieve([2])
    assert bool((page.view(torch.uint8)[2] == 7).all())
    assert bool((storage.view(torch.uint8).view(3, -1)[:, 16000:] == POISON).all())


def test_case_20_layers_keep_the_order_of_registration() -> None:
    storage = torch.empty(3 * 256, dtype=torch.uint8)
    layers = [storage.as_strided((4, 8, 8), (64, 8, 1), 256 * place) for place in (2, 0, 1)]
    for layer, value in zip(layers, (2, 0, 1), strict=True):
        layer.fill_(value)
    trip = RoundTrip(layers, chunk_tokens=8, object_layout="token_major")
    trip.store([0])
    assert trip.objects[0][0].view(3, 64)[:, 0].tolist() == [2, 0, 1]


def planar_page(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """A 64-slot page: 128 value bytes of every slot, then 4 scale bytes of every slot."""
    return torch.cat([values.reshape(-1), scales.reshape(-1)])


def test_case_22_token_rows_of_a_planar_page_follow_the_planar_map() -> None:
    slots, pages = 64, 8
    pool = torch.zeros(pages, slots, 132, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(22)
    values = torch.randint(0, 256, (2, slots, 128), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (2, slots, 4), dtype=torch.uint8, generator=generator)
    for page in range(2):
        pool[page] = planar_page(values[page], scales[page]).view(slots, 132)
    trip = RoundTrip([pool], chunk_tokens=128, object_layout="token_major")
    trip.store([0, 1])
    rows = trip.objects[0][0].view(128, 132)
    assert torch.equal(rows[:, :128], values.view(128, 128))
    assert torch.equal(rows[:, 128:], scales.view(128, 4))
    # tokens of slots 32 to 127 put back at slots 17 to 112
    shifted = torch.zeros_like(rows)
    shifted[17:113] = rows[32:128]
    trip.objects[0][0].view(128, 132).copy_(shifted)
    trip.retrieve([5, 6])
    flat_values = torch.cat([pool[p].flatten()[: 64 * 128].view(64, 128) for p in (5, 6)])
    flat_scales = torch.cat([pool[p].flatten()[64 * 128 :].view(64, 4) for p in (5, 6)])
    assert torch.equal(flat_values[17:113], values.view(128, 128)[32:])
    assert torch.equal(flat_scales[17:113], scales.view(128, 4)[32:])
    # whole pages need no knowledge of the map
    whole = RoundTrip([pool], chunk_tokens=64)
    whole.store([0])
    whole.retrieve([7])
    assert torch.equal(pool[7], pool[0])


def test_case_23_keys_of_an_interleaved_pool_step_over_the_values() -> None:
    pool = torch.zeros(4, 2, 8, 2, 4)
    fill_with_noise(pool)
    before = pool.clone()
    keys = pool[:, 0]
    trip = RoundTrip([keys], layout_hints="NHD", chunk_tokens=8)
    assert trip.engine.manager.kernel_groups[0].shape_desc.block_stride_elems == 2 * 8 * 2 * 4
    trip.store([3])
    assert torch.equal(trip.objects[0][0], as_bytes(keys[3]))
    trip.retrieve([1])
    assert torch.equal(as_bytes(pool[1, 0]), as_bytes(before[3, 0]))
    assert torch.equal(as_bytes(pool[:, 1]), as_bytes(before[:, 1]))


def test_case_25_rows_are_as_wide_as_the_tensor_not_as_the_config() -> None:
    pool = torch.zeros(4, 16, 656, dtype=torch.uint8)
    trip = RoundTrip([pool], chunk_tokens=16)
    assert trip.engine.object_nbytes(0) == 16 * 656
    narrow = [[torch.zeros(16 * 576, dtype=torch.uint8)]]
    with pytest.raises(PlanError, match="9216 bytes, its objects have 10496"):
        trip.engine.store([[1]], narrow)
    spec = stand_ins.MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8,
        num_states=16,
        unpadded_page_size_bytes=16 * 576,
        page_size_bytes=16 * 576,
    )
    group = stand_ins.KVCacheGroupSpec(layer_names=["mla"], kv_cache_spec=spec)
    config = stand_ins.KVCacheConfig(num_blocks=4, kv_cache_groups=[group])
    with pytest.raises(GroupMismatchError, match=r"mla: a block .* 10496 live bytes.* 9216"):
        create_engine_group_infos_from_vllm(config, {"mla": pool})


@pytest.mark.parametrize("row_bytes", [512, 576, 640, 656])
def test_case_26_one_eligibility_for_both_directions(row_bytes: int) -> None:
    pool = torch.zeros(4, 16, row_bytes, dtype=torch.uint8)
    trip = RoundTrip([pool], chunk_tokens=16, backend="cpu")
    stored, retrieved = trip.store([1]), trip.retrieve([2])
    assert stored.backend == retrieved.backend == trip.engine.backend
    assert stored.paths == retrieved.paths
    trip.engine.close()
    # on a device a row's width is no gate: short runs go the same way out and back
    for architecture in ("sm_90", "gfx942"):
        chosen = {
            choose_path(
                CopyShape(direction, 100, row_bytes, 100 * row_bytes, True, True),
                path_table(architecture),
            )
            for direction in Direction
        }
        assert len(chosen) == 1


def test_case_28_every_object_starts_where_the_arena_says() -> None:
    # one alignment for all objects, a power of two, whatever their size
    assert SLOT_ALIGN_BYTES & (SLOT_ALIGN_BYTES - 1) == 0
    for nbytes in (512, 4096, 16384, 3000):
        arena = Arena(8 << 20)
        size = arena.size_class(nbytes)
        offsets = []
        while len(offsets) < 100:
            offset = arena.take(size, owner=1)
            if offset is None:
                assert arena.open_span(size)
            else:
                offsets.append(offset)
        assert {(arena.address + offset) % SLOT_ALIGN_BYTES for offset in offsets} == {0}
        assert arena.address % 4096 == 0


def test_case_29_groups_over_one_buffer_are_addressed_by_page() -> None:
    pool = torch.zeros(6 * 1024, dtype=torch.uint8)
    of_16 = pool.as_strided((6, 16, 64), (1024, 64, 1))
    of_32 = pool.as_strided((6, 32, 32), (1024, 32, 1))
    infos = [EngineGroupInfo(0, (0,), 16), EngineGroupInfo(1, (1,), 32)]
    trip = RoundTrip([of_16, of_32], infos, chunk_tokens=32)
    specs = trip.engine.copy_specs
    base = pool.data_ptr()
    start = [
        spec.row_addresses[0] + block * spec.block_stride_bytes - base
        for spec, block in zip(specs, (2, 1), strict=True)
    ]
    assert [(at, at + s.pool_extent_bytes - 1) for at, s in zip(start, specs, strict=True)] == [
        (2048, 3071),
        (1024, 2047),
    ]


@pytest.mark.parametrize(
    ("shape", "strides", "why"),
    [
        # heads outside blocks: a block is one piece per head
        ((4, 2, 8, 6), (48, 192, 6, 1), "fragmented block"),
        # another layer inside the heads
        ((4, 2, 8, 6), (192, 96, 6, 1), "fragmented block"),
        # padding after every slot
        ((4, 2, 8, 6), (128, 64, 8, 1), "padding or other data inside a page"),
        # blocks that share bytes
        ((4, 2, 8, 6), (48, 48, 6, 1), "overlapping strides"),
        # every block is the same block
        ((4, 2, 8, 6), (0, 48, 6, 1), "overlapping strides"),
        # content that is not contiguous
        ((4, 2, 8, 6), (192, 96, 12, 2), "content of a head is not contiguous"),
    ],
)
def test_strides_that_cannot_be_served_are_named(
    shape: tuple[int, ...], strides: tuple[int, ...], why: str
) -> None:
    pool = torch.zeros(4096).as_strided(shape, strides)
    caches, formats = normalize_and_discover_per_layer_formats(
        [pool], [], "vllm", {"kv_layout": "HND", "slots_per_block": 8}
    )
    with pytest.raises(UnsupportedLayoutError, match=f"layer 0.*{why}"):
        KVLayerGroupsManager(caches, formats, (), 8)


def test_negative_strides_are_named() -> None:
    backwards = SimpleNamespace(shape=(4, 8, 6), stride=lambda: (48, -6, 1))
    with pytest.raises(UnsupportedLayoutError, match=r"layer 3 .* negative stride -6 on axis BS"):
        check_plane_strides(backwards, ("NB", "BS", "HS"), (2,), "layer 3")  # type: ignore[arg-type]


def test_layers_of_one_kind_that_lie_differently_are_named() -> None:
    caches = [torch.zeros(4, 8, 6), torch.zeros(4 * 64).as_strided((4, 8, 6), (64, 6, 1))]
    layers, formats = normalize_and_discover_per_layer_formats(caches, [], "vllm")
    with pytest.raises(GroupMismatchError, match=r"layers 0 and 1 .* lie differently"):
        KVLayerGroupsManager(layers, formats, (), 8)
