"""Field cases of kind K4: windows, nulls and half-present chunks, with real bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.round_trips import POISON, RoundTrip, as_bytes, byte_storage, fill_with_noise

from hma_triton.errors import BlockIdError, IncompleteRetrieveError
from hma_triton.group_view import EngineGroupInfo, slice_block_ids_per_group
from hma_triton.objects.arena import Arena
from hma_triton.objects.leases import LeaseTable
from hma_triton.objects.namespace import NamespaceShape
from hma_triton.objects.store import ObjectStore
from hma_triton.plan import ReuseRule, chunks_needed, kept_blocks, longest_hit


def pools(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    """One `[NB, slots, 3]` pool per (blocks, slots), with noise in it."""
    made = [torch.zeros(blocks, slots, 3) for blocks, slots in sizes]
    for seed, pool in enumerate(made):
        fill_with_noise(pool, seed)
    return made


def test_case_47_a_sliding_window_does_not_stop_the_full_groups_stores() -> None:
    infos = [EngineGroupInfo(0, (0,), 16), EngineGroupInfo(1, (1,), 16, 64)]
    trip = RoundTrip(pools((40, 16), (40, 16)), infos, chunks=8, chunk_tokens=64, null_block_id=0)
    result = trip.store(list(range(1, 33)), [0] * 28 + [33, 34, 35, 36])
    assert result.skipped == tuple((1, chunk) for chunk in range(7))
    assert result.num_blocks == 32 + 4
    assert all(bool(obj.any()) for obj in trip.objects[0])
    assert [bool(obj.any()) for obj in trip.objects[1]] == [False] * 7 + [True]


def case_49() -> RoundTrip:
    """Seven layers; the windowed ones share an object only where their window is the same."""
    blocks = [64, 64, 256, 256, 256, 4, 8]
    slots = [64, 64, 64, 64, 2, 4, 8]
    windows = [128, 128, -1, -1, -1, 8, 128]
    groups = [0, 1, 2, 2, 2, 3, 4]
    widths = [1, 2, 3, 4, 5, 6, 7]
    tensors = [
        torch.ones(4 * 256 // block + 1, slot, width)
        for block, slot, width in zip(blocks, slots, widths, strict=True)
    ]
    infos = [
        EngineGroupInfo(group, (layer,), block, window)
        for layer, (group, block, window) in enumerate(zip(groups, blocks, windows, strict=True))
    ]
    return RoundTrip(tensors, infos, chunks=4, chunk_tokens=256, null_block_id=0)


def test_case_49_every_kept_block_must_be_real() -> None:
    trip = case_49()
    assert [g.kernel_group_indices for g in trip.engine.manager.object_groups] == [
        (0, 1, 6),
        (2, 3, 4),
        (5,),
    ]
    blocks = [info.tokens_per_block for info in trip.engine.engine_group_infos]
    ids = [np.arange(1, 4 * 256 // block + 1) for block in blocks]

    def drop(layer: int, chunk: int, first: int, last: int) -> None:
        per_chunk = 256 // blocks[layer]
        ids[layer][chunk * per_chunk + first : chunk * per_chunk + last] = 0

    for layer in (0, 1, 5, 6):
        # chunk 0: all windows absent
        drop(layer, 0, 0, 256 // blocks[layer])
    # chunk 1: the narrow window absent; chunk 2: one kept narrow block absent
    drop(5, 1, 0, 64)
    drop(5, 2, 63, 64)
    # chunk 3: only what its window does not keep
    drop(5, 3, 0, 62)
    drop(0, 3, 0, 2)
    drop(6, 3, 0, 16)
    result = trip.engine.store(ids, trip.objects)
    stored = [[bool(obj.any()) for obj in chunks] for chunks in trip.objects]
    assert stored == [[False, True, True, True], [True] * 4, [False, False, False, True]]
    assert set(result.skipped) == {(0, 0), (2, 0), (2, 1), (2, 2)}


def test_case_49_a_chunk_half_of_whose_window_is_null_is_skipped_whole() -> None:
    trip = RoundTrip(pools((10, 16)), chunks=2, chunk_tokens=32, null_block_id=0)
    result = trip.store([0, 0, 0, 9])
    assert result.skipped == ((0, 0), (0, 1))
    assert not any(bool(obj.any()) for obj in trip.objects[0])


def test_case_50_a_window_group_reads_its_last_chunk_only() -> None:
    full, window = pools((12, 16), (12, 16))
    infos = [EngineGroupInfo(0, (0,), 16), EngineGroupInfo(1, (1,), 16, 1)]
    trip = RoundTrip([full, window], infos, chunks=5, chunk_tokens=16, null_block_id=0)
    before = full.clone(), window.clone()
    trip.store([1, 2, 3, 4, 5], [0, 0, 0, 0, 9])
    byte_storage(full).fill_(POISON)
    byte_storage(window).fill_(POISON)
    # the lists stay equally long, with empty places
    objects = [trip.objects[0], [None, None, None, None, trip.objects[1][4]]]
    result = trip.engine.retrieve([[1, 2, 3, 4, 5], [0, 0, 0, 0, 9]], objects)
    assert result.num_blocks == 6
    assert torch.equal(as_bytes(full[1:6]), as_bytes(before[0][1:6]))
    assert torch.equal(as_bytes(window[9]), as_bytes(before[1][9]))
    assert bool((as_bytes(window[:9]) == POISON).all())
    assert [list(chunks_needed(rule, 5, 16)) for rule in trip.engine.layout.rules] == [
        [0, 1, 2, 3, 4],
        [4],
    ]
    alone = RoundTrip([full], chunks=3, chunk_tokens=16, null_block_id=0)
    alone.store([1, 2, 3])
    assert alone.retrieve([1, 2, 3]).num_blocks == 3


def test_case_52_blocks_that_the_engine_freed_in_the_middle_are_not_stored() -> None:
    # prompt 32, window 16, block 8, 48 decoded: the engine's own table, not a tracker's
    table = [1, 2, 3, 4, 0, 0, 0, 0, 9, 10]
    trip = RoundTrip(pools((11, 8)), chunks=5, chunk_tokens=16, null_block_id=0)
    result = trip.store(table)
    assert result.skipped == ((0, 2), (0, 3))
    assert [bool(obj.any()) for obj in trip.objects[0]] == [True, True, False, False, True]
    # no hit goes past the hole
    present = np.array([[True, True, False, False, True]])
    assert longest_hit([ReuseRule()], present, 16, 80).tokens == 32


def test_case_53_what_a_lookup_locked_is_released_with_it() -> None:
    shape = NamespaceShape(
        rules=(ReuseRule(), ReuseRule(window_tokens=512)),
        object_nbytes=(4096, 4096),
        replicated=(False, False),
        world_size=1,
        chunk_tokens=256,
        regions=(((0, 4096),), ((0, 4096),)),
    )
    store = ObjectStore(Arena(4 << 20))
    namespace = store.namespace(b"f" * 32, shape)
    digests = b"".join(bytes([chunk + 1]) * 32 for chunk in range(4))
    store.commit(store.reserve(namespace, 0, digests, b"", np.ones((2, 4), dtype=np.bool_)))
    hit, records = store.lookup(namespace, digests, 1024)
    assert hit.tokens == 1024
    leases = LeaseTable(store, lease_ns=10**12)
    leases.grant(("engine", "request"), namespace, records, b"peer", now_ns=0)
    assert store.pinned_bytes == 2 * 4 * 4096
    # 768 tokens are local, so one chunk is retrieved; the middle one of the window goes too
    leases.retrieved(("engine", "request"), rank=0)
    assert store.pinned_bytes == 0
    assert len(leases) == 0


@pytest.mark.parametrize(
    ("window", "block", "touched"), [(128, 32, 4), (1, 32, 0), (33, 32, 1), (34, 32, 2)]
)
def test_case_55_one_window_convention(window: int, block: int, touched: int) -> None:
    # a window counts the current token; a window of one token still keeps one block
    assert -(-(window - 1) // block) == touched
    assert kept_blocks(block, window, False, 32 * block) == max(1, touched)


def test_case_55_the_largest_end_whose_run_is_there_else_the_leading_run() -> None:
    rules = [ReuseRule(window_tokens=4 * 32)]
    # present {2, 3, 4, 5}: queries [2, 1, 3, 4, 5] and [1', 2, 3, 4, 5]
    assert longest_hit(rules, np.array([[True, False, True, True, True]]), 32, 160).chunks == 1
    assert longest_hit(rules, np.array([[False, True, True, True, True]]), 32, 160).chunks == 5


def test_every_real_id_is_written_or_the_retrieve_fails() -> None:
    pool = pools((8, 16))[0]
    infos = [EngineGroupInfo(0, (0,), 16, 17)]
    trip = RoundTrip([pool], infos, chunk_tokens=32, null_block_id=0)
    trip.store([5, 6])
    byte_storage(pool).fill_(POISON)
    # the window keeps one of two blocks; an id for the other has no bytes
    with pytest.raises(IncompleteRetrieveError, match="block id 3 at position 0"):
        trip.retrieve([3, 4])
    assert bool((as_bytes(pool) == POISON).all())
    assert trip.retrieve([0, 4]).num_blocks == 1


def test_disagreement_short_lists_are_empty_only_where_nothing_is_kept() -> None:
    assert slice_block_ids_per_group({0: [7]}, [16, 0], 0, 16) == [[7], []]
    with pytest.raises(BlockIdError, match="engine group 1: 0 block ids"):
        slice_block_ids_per_group({0: [7]}, [16, 16], 0, 16)


@pytest.mark.parametrize("null", [None, -1, 0, 7])
def test_disagreement_the_null_id_is_the_groups_own(null: int | None) -> None:
    pool = pools((9, 16))[0]
    trip = RoundTrip([pool], chunks=2, chunk_tokens=16, null_block_id=null)
    other = 1 if null is None else null
    result = trip.store([5, other])
    assert result.skipped == (() if null is None else ((0, 1),))
