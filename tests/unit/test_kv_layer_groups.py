"""Kernel groups, object groups and the manager's refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.errors import AlignmentError, GroupMismatchError
from hma_triton.group_view import EXCLUDED_ENGINE_GROUP, EngineGroupInfo
from hma_triton.kv_format import EngineKVFormat
from hma_triton.kv_layer_groups import (
    KernelGroupIdentity,
    KernelGroupInfo,
    KVLayerGroupInfo,
    KVLayerGroupsManager,
    ObjectGroupInfo,
    PageBufferShapeDesc,
    group_layers_by_identity,
)


def manager(
    caches: list[torch.Tensor], infos: list[EngineGroupInfo], chunk: int, **options: Any
) -> KVLayerGroupsManager:
    layers, formats = normalize_and_discover_per_layer_formats(caches, [], "vllm", "HND")
    return KVLayerGroupsManager(layers, formats, infos, chunk, **options)


def page(slots: int = 8, width: int = 4, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(5, slots, width, dtype=dtype)


def test_identity_is_seven_fields_and_each_one_splits() -> None:
    fmt = EngineKVFormat.NL_X_NB_BS_NH_CS
    base = torch.zeros(5, 8, 2, 4)
    others = [
        torch.zeros(5, 8, 3, 4),
        torch.zeros(5, 8, 2, 5),
        torch.zeros(5, 4, 2, 4),
        torch.zeros(5, 8, 2, 4, dtype=torch.int32),
    ]
    caches, formats = [base, *others, base], [fmt] * 6
    parts = group_layers_by_identity(caches, formats)
    assert [layers for _, layers in parts] == [[0, 5], [1], [2], [3], [4]]
    assert parts[0][0] == KernelGroupIdentity(1, 2, 4, 8, 0, torch.float32, fmt)
    # the engine group and the format split, too
    by_group = group_layers_by_identity([base, base], [fmt] * 2, [0, 1])
    assert [layers for _, layers in by_group] == [[0], [1]]
    other = EngineKVFormat.NL_X_NB_BS_NH_HS
    assert len(group_layers_by_identity([base, base], [fmt, other])) == 2
    # kv_size splits
    both = torch.zeros(5, 2, 8, 2, 4)
    kv = EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
    assert [i.kv_size for i, _ in group_layers_by_identity([base, both], [fmt, kv])] == [1, 2]


def test_excluded_layers_are_left_out() -> None:
    fmt = EngineKVFormat.NL_X_NB_BS_HS
    parts = group_layers_by_identity([page()] * 3, [fmt] * 3, [0, EXCLUDED_ENGINE_GROUP, 0])
    assert [layers for _, layers in parts] == [[0, 2]]
    with pytest.raises(GroupMismatchError, match="2 layers, formats for 3 layers"):
        group_layers_by_identity([page()] * 3, [fmt] * 3, [0, 0])


def test_what_a_kernel_group_knows() -> None:
    pool = torch.zeros(5 * 100, dtype=torch.float16)
    cache = pool.as_strided((5, 2, 8, 4), (100, 32, 4, 1))
    infos = [EngineGroupInfo(0, (0, 1), 32, 100)]
    group = manager([cache, cache], infos, 64).kernel_groups[0]
    assert group == KernelGroupInfo(
        layer_indices=(0, 1),
        shape_desc=PageBufferShapeDesc(1, 2, 5, 8, 2, 4, 2, 100),
        dtype=torch.float16,
        engine_kv_format=EngineKVFormat.NL_X_NB_NH_BS_CS,
        tokens_per_block=32,
        engine_group_idx=0,
        sw_size_tokens=100,
    )
    assert KVLayerGroupInfo is KernelGroupInfo
    assert (group.slots_per_block, group.num_layers, group.hidden_dim_size) == (8, 2, 8)
    assert (group.layer_page_bytes, group.block_bytes, group.window_tokens) == (128, 256, 100)
    assert group.calculate_slots(64) == 16
    assert group.calculate_slots(4) == 1
    with pytest.raises(AlignmentError, match="slots of 6 tokens"):
        group.calculate_slots(6)


def test_counts_are_exact_or_refused() -> None:
    found = manager([page()], [EngineGroupInfo(0, (0,), 32, 40)], 128)
    assert found.calculate_num_blocks(0, 96) == 3
    with pytest.raises(AlignmentError, match="blocks of kernel group 0: 100"):
        found.calculate_num_blocks(0, 100)
    # a window of 40 tokens keeps two blocks of 8 slots; windows need not divide
    assert found.get_slots_per_chunk_in_sw(0) == 16
    assert found.get_shape_desc(0).bs == 8
    assert found.chunk_tokens == 128
    with pytest.raises(IndexError):
        found.get_shape_desc(1)


def test_object_groups_by_recurrence_and_window_with_extras_last() -> None:
    caches = [page(width=4 + i) for i in range(7)]
    infos = [
        EngineGroupInfo(0, (0,), 8, -1, 2),
        EngineGroupInfo(1, (1,), 8, 16),
        EngineGroupInfo(2, (2,), 8),
        EngineGroupInfo(3, (3,), 8, 16),
        EngineGroupInfo(4, (4,), 8, 16, 0, True),
        EngineGroupInfo(5, (5,), 8, 24, 1),
        EngineGroupInfo(6, (6,), 8, 16, 2),
    ]
    found = manager(caches, infos, 16, separate_object_groups=True)
    assert found.object_groups == (
        ObjectGroupInfo((1, 3), 16, False, 0),
        ObjectGroupInfo((2,), None, False, 0),
        ObjectGroupInfo((4,), 16, True, 0),
        # a tag's members need what the neediest of them needs
        ObjectGroupInfo((0, 6), None, False, 2),
        ObjectGroupInfo((5,), 24, False, 1),
    )
    assert found.num_object_groups == 5
    # the ids of the others are those of a registration without extras
    rest = manager(
        caches[1:5],
        [
            EngineGroupInfo(
                i.engine_group_id,
                (i.layer_indices[0] - 1,),
                8,
                i.sw_size_tokens,
                0,
                i.recurrent_state,
            )
            for i in infos[1:5]
        ],
        16,
        separate_object_groups=True,
    )
    assert [g.window_tokens for g in rest.object_groups] == [16, None, 16]
    together = manager(caches, infos, 16)
    assert together.object_groups == (ObjectGroupInfo(tuple(range(7))),)


def test_an_engine_without_groups_is_one_group_of_the_tensors_slots() -> None:
    found = manager([page(), page(width=5)], [], 24)
    assert [g.tokens_per_block for g in found.kernel_groups] == [8, 8]
    assert [g.engine_group_idx for g in found.kernel_groups] == [0, 0]


@pytest.mark.parametrize(
    ("infos", "chunk", "why"),
    [
        ([EngineGroupInfo(0, (0, 1), 8)], 16, "1 infos for 2 kernel groups.*the tensors group as"),
        ([EngineGroupInfo(0, (1,), 8), EngineGroupInfo(0, (0,), 8)], 16, "info 0 .* names layers"),
        (
            [EngineGroupInfo(0, (0,), 12), EngineGroupInfo(0, (1,), 8)],
            24,
            "12 tokens per block are",
        ),
        ([EngineGroupInfo(0, (0,), 4), EngineGroupInfo(0, (1,), 8)], 16, "4 tokens per block are"),
        ([EngineGroupInfo(0, (0,), -8), EngineGroupInfo(0, (1,), 8)], 16, "-8 tokens per block"),
        ([EngineGroupInfo(0, (0,), 8), EngineGroupInfo(0, (1,), 24)], 40, "nearest valid chunk is"),
        ([EngineGroupInfo(0, (0,), 8), EngineGroupInfo(0, (1,), 8)], 0, "nearest valid chunk is 8"),
        ([EngineGroupInfo(0, (0,)), EngineGroupInfo(0, (7,))], 16, "layer 7; 2 layers"),
    ],
)
def test_infos_and_chunks_that_do_not_fit_are_refused(
    infos: list[EngineGroupInfo], chunk: int, why: str
) -> None:
    with pytest.raises(GroupMismatchError, match=why):
        manager([page(), page(width=5)], infos, chunk)


def test_nothing_registered_is_refused() -> None:
    with pytest.raises(GroupMismatchError, match="no caches are registered"):
        KVLayerGroupsManager([], [])


@pytest.mark.parametrize("chunk", [544, 1088])
def test_blocks_of_any_size_make_chunks(chunk: int) -> None:
    found = manager([page(slots=544), page(slots=272, width=9)], [], chunk)
    assert found.calculate_num_blocks(1, chunk) == chunk // 272


def test_pools_of_one_kind_with_different_block_counts_are_named() -> None:
    caches = [page(), torch.zeros(6, 8, 4, dtype=torch.float16)]
    with pytest.raises(GroupMismatchError, match="layers 0 and 1 of engine group 0"):
        manager(caches, [], 8)
