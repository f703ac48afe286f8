"""Block ids from engine groups to infos, and the tokens of a range to ids."""

from __future__ import annotations

from typing import Any

from bench.hybrid_request import CHUNK_TOKENS, INFOS, NUM_CHUNKS, ids_of_engine_groups
from hma_triton.group_view import expand_engine_block_ids, slice_block_ids_per_group


def test_expand_engine_block_ids(benchmark: Any) -> None:
    by_group = {group: ids.tolist() for group, ids in ids_of_engine_groups().items()}
    lists = benchmark(expand_engine_block_ids, INFOS, by_group)
    assert lists[3] == lists[4] == by_group[3]


def test_slice_of_one_step(benchmark: Any) -> None:
    """The 16 chunks that a prefill step of 8k tokens finishes, at the end of a long request."""
    by_group = {group: ids.tolist() for group, ids in ids_of_engine_groups().items()}
    tokens = [16, 16, 32, 544]
    end = NUM_CHUNKS * CHUNK_TOKENS
    sliced = benchmark(slice_block_ids_per_group, by_group, tokens, end - 16 * CHUNK_TOKENS, end)
    assert [len(ids) for ids in sliced] == [544, 544, 272, 16]
