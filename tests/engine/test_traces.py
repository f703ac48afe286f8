"""Random traces on one hybrid model: lengths, shared prefixes, order, aborts, resets, budgets.

Every page that is loaded must have the bytes that were read when its chunk was stored; tokens must
be those of an engine without the connector, wherever that repeats itself.
"""

from __future__ import annotations

import random
import time

import pytest
from support.engine_families import TOKEN_BUDGET, prompt
from support.engine_probes import free_blocks, set_token_budget, tracked_requests
from support.engine_rig import Rig, check_audit

from hma_triton.client import HmaClient

ROUNDS = 10
TRACES_PER_ROUND = 20


def trace(source: random.Random, earlier: list[list[int]]) -> list[tuple[str, list[int]]]:
    """Requests of one trace: most share a prefix of any length with one of before."""
    requests: list[tuple[str, list[int]]] = []
    for index in range(source.randint(2, 5)):
        length = source.choice((90, 256, 300, 512, 700, source.randint(200, 900)))
        shared: list[int] = []
        if earlier and source.random() < 0.85:
            shared = source.choice(earlier)[: source.randint(length // 2, length)]
        requests.append((f"r{index}", prompt(length, source.randrange(1 << 30), after=shared)))
        earlier.append(requests[-1][1])
    source.shuffle(requests)
    return requests


@pytest.mark.parametrize("rig", ["gemma3"], indirect=True)
@pytest.mark.parametrize(
    "round_index",
    [pytest.param(index, marks=() if index == 0 else pytest.mark.long) for index in range(ROUNDS)],
)
def test_traces(rig: Rig, round_index: int) -> None:
    source = random.Random(round_index)
    engine = rig.ours
    earlier: list[list[int]] = []
    free_at_rest = engine.run(free_blocks)
    for number in range(TRACES_PER_ROUND):
        requests = trace(source, earlier)
        engine.run(set_token_budget, source.choice((TOKEN_BUDGET, 512, 200)))
        if source.random() < 0.9:
            engine.reset_prefix_cache()
        aborted: set[str] = set()
        finished = {}
        for name, tokens in requests:
            engine.call("add", f"{number}-{name}", tokens, {"max_tokens": 3})
            finished.update(engine.call("step", source.randint(0, 4)))
            if source.random() < 0.2:
                engine.call("abort", [f"{number}-{name}"])
                aborted.add(f"{number}-{name}")
        names = {f"{number}-{name}" for name, _ in requests}
        deadline = time.monotonic() + 60
        while set(finished) | aborted != names and time.monotonic() < deadline:
            finished.update(engine.call("step", 100))
        # an aborted load is driven to its end by whatever runs next
        engine.generate([prompt(40, seed=number)], max_tokens=1)
        expected = {f"{number}-{name}": tokens for name, tokens in requests}
        assert set(finished) | aborted == set(expected)
        if number % 5 == 0:
            alone = rig.expected([expected[name] for name in finished], max_tokens=3)
            for one, other in zip(finished.values(), alone, strict=True):
                assert one.tokens == other.tokens
    engine.run(set_token_budget, TOKEN_BUDGET)

    assert check_audit(rig.audit_path, rig.family.chunk_tokens) > 100
    assert engine.run(tracked_requests) == 0
    assert engine.run(free_blocks) == free_at_rest
    with HmaClient(rig.server.url) as client:
        client.connect()
        assert client.status()["leases"] == 0
