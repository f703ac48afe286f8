"""Every family on a real engine, prompt after prompt: hits, equal outputs, wrong pages seen."""

from __future__ import annotations

import pytest
from support.engine_cases import check_equal, families
from support.engine_families import CORE, LENGTHS, MLA, TOKEN_BUDGET, prompt, prompts
from support.engine_probes import overwrite_one_page_per_object, set_token_budget
from support.engine_rig import MLA_TOLERANCE, Rig, check_audit, chunk_digests_of, difference


@families(*CORE)
def test_a_prefix_comes_back(rig: Rig) -> None:
    asked = prompts()
    plain = rig.expected(asked)

    cold = rig.ours.generate(asked)
    rig.ours.reset_prefix_cache()
    warm = rig.ours.generate(asked)

    assert [one.cached_tokens for one in cold] == [0] * len(LENGTHS)
    assert tuple(one.cached_tokens for one in warm) == rig.family.hits
    check_equal(rig, cold, plain)
    check_equal(rig, warm, plain)
    assert check_audit(rig.audit_path, rig.family.chunk_tokens) > 0


@families(*CORE)
def test_hits_agree_with_hits(rig: Rig) -> None:
    asked = prompts(seed=1)
    rig.ours.generate(asked)
    warm = []
    for _ in range(2):
        rig.ours.reset_prefix_cache()
        warm.append(rig.ours.generate(asked))

    found = [difference(one, other) for one, other in zip(*warm, strict=True)]
    assert max(found) <= (MLA_TOLERANCE if rig.family.is_mla else 0.0)
    assert tuple(one.cached_tokens for one in warm[0]) == rig.family.hits


@families(*CORE)
def test_a_wrong_page_shows(rig: Rig) -> None:
    asked = [prompt(1301, seed=2)]
    rig.ours.generate(asked)
    rig.ours.reset_prefix_cache()
    right = rig.ours.generate(asked)
    chunks = rig.family.hits[0] // rig.family.chunk_tokens
    digests = chunk_digests_of(rig.audit_path, chunks)
    changed = rig.ours.run(overwrite_one_page_per_object, rig.server.url, digests)
    assert changed >= chunks

    rig.ours.reset_prefix_cache()
    warm = rig.ours.generate(asked)

    assert warm[0].cached_tokens == rig.family.hits[0]
    assert right[0].cached_tokens == rig.family.hits[0]
    assert difference(warm[0], right[0]) > MLA_TOLERANCE
    rig.ours.reset_prefix_cache(connector=True)
    # the wrong pages were loaded on purpose; what was stored before is gone from the server
    rig.audit_path.unlink()


@families("gemma3", "qwen3_next")
def test_a_fresh_engine_finds_the_server(rig: Rig) -> None:
    asked = prompts(seed=3)
    plain = rig.expected(asked)
    rig.ours.generate(asked)

    with rig.start_ours() as fresh:
        warm = fresh.generate(asked)

    assert tuple(one.cached_tokens for one in warm) == rig.family.hits
    check_equal(rig, warm, plain)


# the build turns chunked prefill off for MLA
@families("gpt_oss", "qwen3_next", "lfm2", but=MLA)
@pytest.mark.parametrize("budget", [512, 160])
def test_chunked_prefill(rig: Rig, budget: int) -> None:
    asked = prompts(seed=4 + budget)
    plain = rig.expected(asked, budget)
    rig.ours.run(set_token_budget, budget)
    try:
        cold = rig.ours.generate(asked)
        rig.ours.reset_prefix_cache()
        warm = rig.ours.generate(asked)
    finally:
        rig.ours.run(set_token_budget, TOKEN_BUDGET)

    assert tuple(one.cached_tokens for one in warm) == rig.family.hits
    check_equal(rig, cold, plain)
    check_equal(rig, warm, plain)
