"""Field cases of K5: recurrent state that is valid at some boundaries only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.replay_tools import connector_of, leases, tokens_of
from support.schedule_replay import bytes_of
from support.toy_config import full, state

from hma_triton.errors import ConfigError
from hma_triton.integration.vllm.engine_checks import refuse_untested
from hma_triton.server.launch import EmbeddedServer


def test_56_a_moved_scratch_block_is_no_state(engine_of: Any) -> None:
    engine = engine_of(full(4), state(4))
    request = engine.request("a", tokens_of(11))
    engine.allocate(request, [[1], [8]], 0)
    engine.compute(request, 4, [[1], [8, 9]])
    # the engine moved its scratch block to the tail; slot 1 was never written
    engine.compute(request, 7, [[1, 2, 3], [8, 0, 10, 9]])

    assert engine.matched(engine.request("b", tokens_of(11))) == 4


def feature_config(feature: str) -> Any:
    """What start-up reads of a vLLM config, with one feature that was never run."""
    parallel = SimpleNamespace(pipeline_parallel_size=1, decode_context_parallel_size=1)
    config = SimpleNamespace(
        parallel_config=parallel, speculative_config=None, cache_config=SimpleNamespace()
    )
    if feature == "speculative decoding":
        config.speculative_config = object()
    elif feature == "pipeline parallelism":
        parallel.pipeline_parallel_size = 2
    elif feature == "decode context":
        parallel.decode_context_parallel_size = 2
    elif feature == "prefill context":
        parallel.prefill_context_parallel_size = 2
    elif feature == "KV scales":
        config.cache_config.calculate_kv_scales = True
    return config


@pytest.mark.parametrize(
    "feature",
    [
        "speculative decoding",
        "pipeline parallelism",
        "decode context",
        "prefill context",
        "KV scales",
    ],
)
def test_56_61_what_never_ran_is_refused_by_name(feature: str) -> None:
    assert refuse_untested(feature_config(""), allow=False) == []

    with pytest.raises(ConfigError, match=feature):
        refuse_untested(feature_config(feature), allow=False)
    assert feature in refuse_untested(feature_config(feature), allow=True)[0]


@pytest.mark.parametrize("scratch", [3, 0])
def test_61_no_block_is_pinned_scratch_or_not(
    engine_of: Any, server: EmbeddedServer, scratch: int
) -> None:
    engine = engine_of(full(4), state(4))
    request = engine.request("a", tokens_of(24))
    tables = [[11, 12, 13, 14, 15, 16], [1, 2, 3, 4, 5, 6, 7, 8, 9][: 6 + scratch]]
    engine.allocate(request, tables, 0)
    result = engine.compute(request, 24, tables)
    # the copy has ended with its step; what the engine moves or frees next is nobody's but its own
    assert (result.finished, engine.worker._loading) == (set(), {})
    assert result.meta.stores[0].block_ids[1] == [0, 0, 0, 0, 0, 6]
    assert connector_of(engine).request_finished_all_groups(request, tuple(tables)) == (False, None)
    assert leases(server.url) == 0


def test_58_a_mixed_hit_takes_the_state_of_its_end(engine_of: Any) -> None:
    engine = engine_of(full(4), state(4))
    tokens = tokens_of(37)
    first = engine.request("a", tokens)
    engine.allocate(first, [[], []], 0)
    for end in range(9):
        tables = [list(range(1, end + 2)), [0] * end + [20 + end]]
        engine.compute(first, 4, tables)
    state_at_36 = bytes_of(engine.page(2, 28))
    state_at_24 = bytes_of(engine.page(2, 25))
    engine.wipe()

    second = engine.request("b", tokens)
    local = 24
    engine.fill(second, [list(range(1, 7)), [0] * 5 + [25]], 20, 24)
    assert bytes_of(engine.page(2, 25)) == state_at_24
    assert engine.matched(second, local) == 36 - local
    tables = [[1, 2, 3, 4, 5, 6, 40, 41, 42], [0] * 8 + [50]]
    before = [bytes_of(engine.page(0, block)) for block in range(1, 7)]
    engine.allocate(second, tables, 36 - local)
    assert engine.drain().finished == {"b"}

    assert bytes_of(engine.page(2, 50)) == state_at_36
    assert [bytes_of(engine.page(0, block)) for block in range(1, 7)] == before


def test_59_a_state_is_kept_only_where_a_step_ended_on_its_block(engine_of: Any) -> None:
    engine = engine_of(full(4), state(12))
    tokens = tokens_of(25)
    request = engine.request("a", tokens)
    engine.allocate(request, [[], []], 0)
    engine.compute(request, 8, [[1, 2], [9]])
    engine.compute(request, 4, [[1, 2, 3], [9]])
    # past the block's edge at 24: the block at its place holds the state of token 25
    engine.compute(request, 13, [[1, 2, 3, 4, 5, 6, 7], [0, 9, 10]])

    assert engine.matched(engine.request("b", tokens)) == 12


def test_59_a_state_that_the_engine_offers_is_kept(engine_of: Any) -> None:
    engine = engine_of(full(4), state(4))
    request = engine.request("a", tokens_of(22))
    engine.allocate(request, [[], []], 0)
    offers = {"a": [(1, 6, 20)]}
    engine.compute(request, 22, [[1, 2, 3, 4, 5, 7], [0, 0, 0, 0, 6, 8]], offers=offers)

    assert engine.matched(engine.request("b", tokens_of(22))) == 20


def test_62_a_null_state_is_neither_read_nor_written(engine_of: Any) -> None:
    engine = engine_of(full(4), state(4))
    first = engine.request("a", tokens_of(13))
    engine.allocate(first, [[], []], 0)
    engine.compute(first, 12, [[1, 2, 3], [0, 0, 5]])
    state_at_12 = bytes_of(engine.page(2, 5))
    engine.wipe()

    second = engine.request("b", tokens_of(13))
    assert engine.matched(second) == 12
    engine.allocate(second, [[6, 7, 8], [0, 0, 5]], 12)
    engine.drain()

    assert bytes_of(engine.page(2, 5)) == state_at_12
    for layer in range(4):
        assert set(bytes_of(engine.page(layer, 0))) == {0xEE}
