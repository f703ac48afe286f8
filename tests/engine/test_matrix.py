"""What serving does to a cache, for every family: shared prefixes, mixed sources, batches, loss."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.engine_cases import check_equal, check_tokens, families
from support.engine_families import MLA, TOKEN_BUDGET, prompt
from support.engine_probes import (
    count_preemptions,
    preemptions,
    set_token_budget,
    tracked_requests,
    usage_together,
    wait_for_lookups,
)
from support.engine_process import Completion, Engine
from support.engine_rig import Rig, audit_lines, check_audit, difference
from support.replay_tools import eventually

from hma_triton.config import ServerConfig
from hma_triton.server.launch import EmbeddedServer, start_embedded
from hma_triton.units import align_up

PREEMPTED_TOKENS = 90


@families("gemma3", "gemma4", "llama")
def test_a_shared_prefix_comes_back(rig: Rig) -> None:
    first = prompt(1301, seed=20)
    second = prompt(900, seed=21, after=first[:777])
    budget = 256 if rig.family.is_recurrent else TOKEN_BUDGET
    plain = rig.expected([second], budget)
    # recurrent state is kept where a step ends: small steps keep it at every block
    rig.ours.run(set_token_budget, budget)
    try:
        rig.ours.generate([first])
        rig.ours.reset_prefix_cache()
        warm = rig.ours.generate([second])
    finally:
        rig.ours.run(set_token_budget, TOKEN_BUDGET)

    assert warm[0].cached_tokens == 768
    check_equal(rig, warm, plain)


# MLA has no cache of its own on this build
@families("gemma3", "qwen3_next", "llama4", but=MLA)
def test_own_cache_and_ours_together(rig: Rig) -> None:
    asked = prompt(1301, seed=22)
    plain = rig.expected([asked])
    rig.ours.generate([asked])
    rig.ours.reset_prefix_cache()
    rig.ours.generate([asked[:600]])
    loads_before = len(audit_lines(rig.audit_path, "load"))

    mixed = rig.ours.generate([asked])

    assert mixed[0].cached_tokens == rig.family.hits[0]
    # an engine whose own cache alone gives another output than a cold run has no one output
    rig.plain.reset_prefix_cache()
    rig.plain.generate([asked[:600]])
    (own,) = rig.plain.generate([asked])
    if difference(own, plain[0]) == 0:
        check_equal(rig, mixed, plain)
    (load,) = audit_lines(rig.audit_path, "load")[loads_before:]
    positions = {int(place.split(":")[1]) for place in load["pages"]}
    assert min(positions) >= 512
    assert check_audit(rig.audit_path, rig.family.chunk_tokens) > 0


@families("gpt_oss", "lfm2", "deepseek_v2")
def test_two_requests_at_once(rig: Rig) -> None:
    first = prompt(1301, seed=23)
    second = prompt(1000, seed=24, after=first[:512])
    plain = rig.expected([first, second])
    rig.plain.reset_prefix_cache()
    together = rig.plain.generate([first, second], together=True)
    rig.ours.generate([first, second])
    rig.ours.reset_prefix_cache()

    warm = rig.ours.generate([first, second], together=True)

    assert [one.cached_tokens for one in warm] == [
        rig.family.hits[0],
        1000 // rig.family.chunk_tokens * rig.family.chunk_tokens,
    ]
    assert check_audit(rig.audit_path, rig.family.chunk_tokens) > 0
    check_tokens(rig, warm, plain, together)
    assert rig.ours.run(tracked_requests) == 0


@families("gemma3", "lfm2")
def test_preempted_requests_resume(rig: Rig) -> None:
    chunk = rig.family.chunk_tokens
    # of many lengths, so that some cross a block's edge while others hold all of their prompt
    asked = [prompt(2 * chunk - 60 - index * chunk // 7, seed=25 + index) for index in range(8)]
    rig.plain.reset_prefix_cache()
    most, together = rig.plain.run(usage_together, asked, PREEMPTED_TOKENS)
    alone = rig.expected(asked, max_tokens=PREEMPTED_TOKENS)

    pools = (most * 2 // 3, most * 3 // 5, most // 2)
    given = next(filter(None, (run_in_a_small_pool(rig, asked, blocks) for blocks in pools)), None)

    assert given, f"none of {pools} blocks was few enough"
    check_audit(rig.audit_path, chunk)
    for one, single, batched in zip(given, alone, together, strict=True):
        assert len(one.tokens) == PREEMPTED_TOKENS
        # a preempted request goes on from a prefill of its outputs, which this build computes
        # otherwise than the decode steps they came from: equal up to there, at the least
        assert one.tokens[0] in (single.tokens[0], batched[0])
        if rig.family.repeats_after_preemption and single.tokens == batched:
            assert one.tokens == single.tokens


def run_in_a_small_pool(rig: Rig, asked: list[list[int]], blocks: int) -> list[Completion]:
    """What an engine of so many blocks gives; nothing when it had to preempt nobody."""
    longest = align_up(len(asked[0]) + PREEMPTED_TOKENS, 256)
    # one block of the pool is the null block
    with rig.start_ours(num_gpu_blocks_override=1 + blocks, max_model_len=longest) as small:
        small.run(count_preemptions)
        given = run_in_step(small, asked)
        assert small.run(tracked_requests) == 0
        return given if small.run(preemptions) else []


def run_in_step(engine: Engine, asked: list[list[int]]) -> list[Completion]:
    """All requests begin in one step: no lookup is still under way when the first is admitted."""
    names = [f"p{index}" for index in range(len(asked))]
    for name, tokens in zip(names, asked, strict=True):
        engine.call("add", name, tokens, {"max_tokens": PREEMPTED_TOKENS})
    engine.run(wait_for_lookups)
    finished: dict[str, Completion] = {}
    eventually(
        lambda: finished.update(engine.call("step", 100)) or len(finished) == len(asked), 200.0
    )
    return [finished[name] for name in names]


@pytest.fixture
def lone_server() -> Iterator[EmbeddedServer]:
    """A server that the test may kill."""
    made = start_embedded(ServerConfig(url="ipc:///replaced", host_bytes=64 << 20))
    yield made
    made.close()


@families("gpt_oss")
def test_the_server_is_killed_in_between(rig: Rig, lone_server: EmbeddedServer) -> None:
    asked = [prompt(1301, seed=30), prompt(777, seed=31)]
    plain = rig.expected(asked)
    quick = {"hma.server_url": lone_server.url, "hma.breaker_s": 1.0}
    with rig.start_ours(quick) as engine:
        engine.generate(asked)
        os.kill(lone_server.pid, signal.SIGKILL)
        lone_server.process.wait()
        engine.reset_prefix_cache()

        alone = engine.generate(asked)
        again = [prompt(1301, seed=32)]
        more = engine.generate(again)

        assert [one.cached_tokens for one in alone + more] == [0, 0, 0]
        check_equal(rig, alone, plain)
        check_equal(rig, more, rig.expected(again))
        assert _warnings(engine).count("unavailable") <= 1


def _warnings(engine: Engine) -> str:
    lines = engine.log().splitlines()
    return "\n".join(line for line in lines if "WARNING" in line and "hma_triton:" in line)
