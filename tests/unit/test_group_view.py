"""Infos on the wire, and block ids and layers by group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from hma_triton.errors import BlockIdError, GroupMismatchError
from hma_triton.group_view import (
    EngineGroupInfo,
    engine_group_layer_indices,
    expand_engine_block_ids,
    get_engine_group_indices,
    num_engine_group_infos,
    num_engine_groups,
    slice_block_ids_per_group,
)

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "engine_group_infos.json").read_text()
)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_recorded_payloads_decode_the_same_for_ever(case: dict[str, Any]) -> None:
    decode = msgspec.msgpack.decode if case["encoding"] == "msgpack" else msgspec.json.decode
    raw = bytes.fromhex(case["hex"])
    wanted = [
        EngineGroupInfo(**{**fields, "layer_indices": tuple(fields["layer_indices"])})
        for fields in case["infos"]
    ]
    assert decode(raw, type=list[EngineGroupInfo]) == wanted


def test_payloads_we_write_are_the_recorded_current_ones() -> None:
    current = [case for case in GOLDEN if case["current"]]
    assert current
    for case in current:
        infos = [
            EngineGroupInfo(**{**fields, "layer_indices": tuple(fields["layer_indices"])})
            for fields in case["infos"]
        ]
        encode = msgspec.msgpack.encode if case["encoding"] == "msgpack" else msgspec.json.encode
        assert encode(infos).hex() == case["hex"]


def test_fields_are_the_recorded_ones_in_their_order() -> None:
    assert EngineGroupInfo.__struct_fields__ == (
        "engine_group_id",
        "layer_indices",
        "tokens_per_block",
        "sw_size_tokens",
        "extra_object_group_tag",
        "recurrent_state",
    )
    assert EngineGroupInfo(3) == EngineGroupInfo(3, (), 0, -1, 0, False)
    with pytest.raises(AttributeError):
        EngineGroupInfo(0).engine_group_id = 1  # type: ignore[misc]


def test_counts() -> None:
    infos = [EngineGroupInfo(0), EngineGroupInfo(2), EngineGroupInfo(0)]
    assert (num_engine_groups(infos), num_engine_group_infos(infos)) == (3, 3)
    assert (num_engine_groups([]), num_engine_group_infos([])) == (1, 1)


def test_layers_of_groups_are_joined_and_ascend() -> None:
    infos = [EngineGroupInfo(1, (5, 1)), EngineGroupInfo(0, (2,)), EngineGroupInfo(1, (0,))]
    assert engine_group_layer_indices(infos) == [[2], [0, 1, 5]]
    assert engine_group_layer_indices([]) == []


def test_layers_to_groups() -> None:
    infos = [EngineGroupInfo(0, (0, 2)), EngineGroupInfo(1, (1,))]
    assert get_engine_group_indices(infos, 4) == [0, 1, 0, -1]
    assert get_engine_group_indices([], 4) is None
    assert get_engine_group_indices(infos, 0) is None
    with pytest.raises(GroupMismatchError, match="layer 2; 2 layers are registered"):
        get_engine_group_indices(infos, 2)
    with pytest.raises(GroupMismatchError, match="names layer -1"):
        get_engine_group_indices([EngineGroupInfo(0, (-1,))], 2)
    with pytest.raises(GroupMismatchError, match="layer 0 is named twice"):
        get_engine_group_indices([EngineGroupInfo(0, (0,)), EngineGroupInfo(1, (0,))], 2)
    with pytest.raises(GroupMismatchError, match="engine group id -1 is negative"):
        get_engine_group_indices([EngineGroupInfo(-1, (0,))], 2)


def test_expansion_takes_every_form_an_engine_has() -> None:
    infos = [EngineGroupInfo(0, (0, 2)), EngineGroupInfo(1, (1, 3)), EngineGroupInfo(0, (4,))]
    wanted = [[10, 11], [20, 21], [10, 11]]
    assert expand_engine_block_ids(infos, [[10, 11], [20, 21]]) == wanted
    assert expand_engine_block_ids(infos, ([10, 11], [20, 21])) == wanted
    assert expand_engine_block_ids(infos, {1: [20, 21], 0: [10, 11]}) == wanted
    arrays = [np.array([10, 11], dtype=np.int32), np.array([20, 21])]
    assert expand_engine_block_ids(infos, arrays) == wanted  # type: ignore[arg-type]
    one = [EngineGroupInfo(0, (0,)), EngineGroupInfo(0, (1,))]
    assert expand_engine_block_ids(one, [7, 8]) == [[7, 8], [7, 8]]
    assert expand_engine_block_ids(one, np.array([7, 8])) == [[7, 8], [7, 8]]  # type: ignore[arg-type]
    assert expand_engine_block_ids([], [7, 8]) == [[7, 8]]
    assert expand_engine_block_ids([], []) == [[]]
    # a group that no info names (it keeps nothing) may have ids
    assert expand_engine_block_ids([EngineGroupInfo(0, (0,))], [[7], [9]]) == [[7]]


def test_expansion_copies() -> None:
    mine = [[1, 2]]
    expanded = expand_engine_block_ids([EngineGroupInfo(0)], mine)
    expanded[0].append(3)
    assert mine == [[1, 2]]


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([[1]], r"no block ids for engine groups \[1\]"),
        ([1, 2], r"no block ids for engine groups \[1\]"),
        ({0: [1]}, r"no block ids for engine groups \[1\]"),
        ([[1], [2.5]], "engine group 1: block ids must be integers"),
        ([[1], ["2"]], "engine group 1: block ids must be integers"),
    ],
)
def test_ids_that_do_not_fit_are_refused(ids: Any, why: str) -> None:
    with pytest.raises(BlockIdError, match=why):
        expand_engine_block_ids([EngineGroupInfo(0), EngineGroupInfo(1)], ids)


def test_ids_are_never_taken_by_position() -> None:
    infos = [EngineGroupInfo(1, (0,)), EngineGroupInfo(0, (1,))]
    assert expand_engine_block_ids(infos, [[1], [2]]) == [[2], [1]]


def test_a_range_backwards_is_no_range() -> None:
    with pytest.raises(ValueError, match=r"\[32, 16\) is not a range"):
        slice_block_ids_per_group({0: [1, 2]}, [16], 32, 16)
