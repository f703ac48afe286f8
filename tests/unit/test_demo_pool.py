"""The demonstration's worker: what it writes it can check later, and nothing escapes it."""

from __future__ import annotations

import pytest

from hma_triton.cli.demo_pool import (
    NULL_BLOCK,
    DemoPool,
    blocks_needed,
    with_fewer_layers,
)
from hma_triton.cli.demo_scale import fit
from hma_triton.errors import ConfigError, GroupMismatchError
from hma_triton.geometries import list_geometries, load_geometry

STEP = 1024


def shallow_pool(model: str = "gemma-3-4b-it", tokens: int = 2048) -> DemoPool:
    geometry = with_fewer_layers(load_geometry(model), 1)
    return DemoPool(geometry, blocks_needed(geometry, tokens, STEP))


@pytest.fixture(scope="module")
def gemma() -> DemoPool:
    return shallow_pool()


def prefill(pool: DemoPool, tokens: int) -> None:
    pool.reset()
    for start in range(0, tokens, STEP):
        pool.allocate(start + STEP)
        pool.compute(start, start + STEP)
        pool.free_what_slid_out(start + STEP)


def test_tables_are_those_of_the_rules(gemma: DemoPool) -> None:
    prefill(gemma, 2048)
    full = [info.engine_group_id for info in gemma.infos if info.sw_size_tokens < 0]
    for group, table in gemma.tables.items():
        real = [block_id for block_id in table if block_id != NULL_BLOCK]
        assert len(table) == 128
        # 1023 tokens of a window of 1024, in blocks of 16
        assert len(real) == (128 if group in full else 64)
        assert table[-len(real) :] == real
    ids = [i for table in gemma.tables.values() for i in table if i != NULL_BLOCK]
    assert len(set(ids)) == len(ids)


def test_computed_pages_are_equal_and_a_flipped_bit_is_found(gemma: DemoPool) -> None:
    prefill(gemma, 2048)
    assert gemma.differences(2048) == []
    where = gemma.flip_a_bit(2048)
    (difference,) = gemma.differences(2048)
    assert difference.num_bytes == 1
    assert str(difference).startswith(where)


def test_a_byte_outside_the_pages_is_found(gemma: DemoPool) -> None:
    gemma.reset()
    gemma.allocate_hit(1024)
    gemma.compute(0, 1024)
    assert gemma.bytes_written_elsewhere(1024) == 0
    used = {i for table in gemma.tables.values() for i in table}
    spare = next(i for i in range(1, gemma.num_blocks) if i not in used)
    gemma.storage_bytes[spare] ^= 0xFF
    gemma.storage_bytes[-1] ^= 1
    assert gemma.bytes_written_elsewhere(1024) == 2


def test_pages_of_two_groups_and_positions_differ(gemma: DemoPool) -> None:
    prefill(gemma, 1024)
    gemma.tables[0][0], gemma.tables[1][0] = gemma.tables[1][0], gemma.tables[0][0]
    gemma.tables[2][3], gemma.tables[2][4] = gemma.tables[2][4], gemma.tables[2][3]
    assert {d.engine_group_id for d in gemma.differences(1024)} == {0, 1, 2}
    assert len(gemma.differences(1024)) == 4


def test_a_recurrent_group_keeps_its_last_state() -> None:
    pool = shallow_pool("qwen3-next-80b-a3b-instruct", 4096)
    pool.allocate_hit(3264)
    for info in pool.infos:
        table = pool.tables[info.engine_group_id]
        real = sum(block_id != NULL_BLOCK for block_id in table)
        assert len(table) == 6
        assert real == (1 if info.recurrent_state else 6)
        assert table[-1] != NULL_BLOCK


@pytest.mark.parametrize("name", list_geometries())
def test_every_model_fits_and_its_pool_can_be_filled(name: str) -> None:
    full = load_geometry(name)
    scale = fit(full, 2 << 30)
    assert scale.pool_bytes + scale.object_bytes <= 2 << 30
    assert scale.stored_tokens >= scale.chunk_tokens
    least = fit(full, scale.pool_bytes + scale.object_bytes)
    assert least == scale, "what fits exactly is kept"


def test_too_little_memory_and_a_wrong_chunk_are_named() -> None:
    with pytest.raises(ConfigError, match=r"one layer of each group .* 0\.01 are allowed"):
        fit(load_geometry("gemma-3-27b-it"), 10 << 20)
    with pytest.raises(GroupMismatchError, match=r"chunk of 100 tokens .* group 0"):
        fit(load_geometry("gemma-3-27b-it"), 2 << 30, chunk_tokens=100)
