"""Random traces through vLLM's real scheduler and both halves; an oracle checks every read.

No model runs, so that hundreds of traces with small pools, preemptions, aborts, resets, failed
loads and late results take seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.engine_scheduler import (
    BLOCK,
    FULL,
    SLIDING,
    STATE,
    BareEngine,
    next_token,
    vllm_config,
)
from support.replay_tools import CONFIG, eventually, leases

from hma_triton.server.launch import EmbeddedServer, start_embedded

KINDS = {"window": (FULL, SLIDING), "state": (FULL, STATE), "three": (FULL, SLIDING, STATE)}
CHUNKS = {"window": 32, "state": 16, "three": 16}
BLOCKS = 61
TRACES = 150


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    made = start_embedded(CONFIG)
    yield made
    made.close()


@pytest.fixture
def engine(
    server: EmbeddedServer, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[BareEngine]:
    groups = KINDS[request.param]
    config = vllm_config(
        tmp_path,
        server.url,
        recurrent=STATE in groups,
        **{"hma.chunk_tokens": CHUNKS[request.param], "hma.store_decode": True},
    )
    made = BareEngine(config, groups, BLOCKS)
    yield made
    made.close()


def prompt(source: random.Random, earlier: list[list[int]]) -> list[int]:
    """Tokens that mostly begin as an earlier prompt did."""
    length = source.choice((10, 32, 33, 64, 100, 128, source.randint(20, 150)))
    shared = []
    if earlier and source.random() < 0.9:
        shared = source.choice(earlier[-12:])
        length = source.choice((length, len(shared) // BLOCK * BLOCK or length))
        shared = shared[: source.choice((length, source.randint(length // 2, length)))]
    earlier.append(shared + [source.randrange(500) for _ in range(length - len(shared))])
    return earlier[-1]


def disturb(engine: BareEngine, source: random.Random, names: list[str]) -> set[str]:
    """Something that happens between two steps; the requests that it ended."""
    chance = source.random()
    if chance < 0.08 and names:
        ended = source.choice(names)
        engine.abort(ended)
        return {ended}
    if chance < 0.083:
        engine.scheduler.reset_prefix_cache(reset_connector=True)
    elif chance < 0.088:
        # vLLM refuses it where a waiting request holds blocks, when all others are preempted
        with suppress(RuntimeError):
            if source.random() < 0.5:
                engine.load_new_weights()
            else:
                engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    elif chance < 0.3:
        engine.scheduler.max_num_scheduled_tokens = source.choice((16, 24, 40, 100, 512))
    return set()


@pytest.mark.parametrize("engine", KINDS, indirect=True)
def test_traces(engine: BareEngine, server: EmbeddedServer) -> None:
    source = random.Random(7)
    earlier: list[list[int]] = []
    free = engine.free_blocks
    for number in range(TRACES):
        if source.random() < 0.8:
            engine.scheduler.reset_prefix_cache()
        requests: dict[str, Any] = {}
        aborted: set[str] = set()
        for index in range(source.randint(2, 8)):
            name = f"{number}-{index}"
            salt = source.choice(("", "", "", "tenant"))
            tokens = prompt(source, earlier)
            requests[name] = engine.add(name, tokens, salt=salt, priority=source.randint(0, 2))
            for _ in range(source.randint(0, 4)):
                engine.step(source)
                aborted |= disturb(engine, source, list(requests))
        for _ in range(3000):
            if not engine.scheduler.requests:
                break
            engine.step(source)
            aborted |= disturb(engine, source, list(requests)) if source.random() < 0.3 else set()
        assert not engine.scheduler.requests
        check_outputs(requests, aborted)
    assert engine.free_blocks == free
    assert engine.half._tracked == {}
    assert not engine.half._client._lookups
    eventually(lambda: leases(server.url) == 0)
    # the traces met what they are for
    assert engine.worker.worker.stats.data["loads"] > 10
    assert min(engine.preemptions, engine.failed_loads) > 0
    assert engine.pages_checked > 10000
    assert engine.weights > 0


def check_outputs(requests: dict[str, Any], aborted: set[str]) -> None:
    """Every request that was not aborted said what its prefix makes the model say."""
    for name, request in requests.items():
        if name in aborted:
            continue
        assert len(request.output_token_ids) == 8, name
        if len(request.numbers) > 1:
            continue  # begun with other weights
        (known,) = request.numbers.values()
        for index, token in enumerate(request.output_token_ids):
            assert token == next_token(known[request.num_prompt_tokens + index - 1])
