"""Requests of every shape on one hybrid engine: short, exact, salted, aborted, many, decoded."""

from __future__ import annotations

import pytest
from support.engine_cases import check_equal
from support.engine_families import TOKEN_BUDGET, prompt
from support.engine_probes import (
    reset_while_running,
    set_token_budget,
    tracked_requests,
    wait_for_lookups,
)
from support.engine_rig import Rig, audit_lines, check_audit

from hma_triton.client import HmaClient

gemma3 = pytest.mark.parametrize("rig", ["gemma3"], indirect=True)
lfm2 = pytest.mark.parametrize("rig", ["lfm2"], indirect=True)


def warm_up(rig: Rig, asked: list[list[int]], **sampling: object) -> None:
    rig.ours.generate(asked, **sampling)
    rig.ours.reset_prefix_cache()


@gemma3
@pytest.mark.parametrize(("length", "hit"), [(100, 0), (255, 0), (256, 256), (257, 256)])
def test_prompts_around_one_chunk(rig: Rig, length: int, hit: int) -> None:
    asked = [prompt(length, seed=60)]
    plain = rig.expected(asked)
    warm_up(rig, asked)

    warm = rig.ours.generate(asked)

    assert warm[0].cached_tokens == hit
    check_equal(rig, warm, plain)


@gemma3
def test_one_token(rig: Rig) -> None:
    asked = [prompt(700, seed=61), prompt(512, seed=61)]
    plain = rig.expected(asked, max_tokens=1)
    warm_up(rig, asked, max_tokens=1)

    warm = rig.ours.generate(asked, max_tokens=1)

    assert [one.cached_tokens for one in warm] == [512, 512]
    check_equal(rig, warm, plain)


@gemma3
def test_salts_keep_tenants_apart(rig: Rig) -> None:
    asked = [prompt(700, seed=62)]
    warm_up(rig, asked, cache_salt="one")

    assert rig.ours.generate(asked, cache_salt="two")[0].cached_tokens == 0
    rig.ours.reset_prefix_cache()
    assert rig.ours.generate(asked)[0].cached_tokens == 0
    rig.ours.reset_prefix_cache()
    assert rig.ours.generate(asked, cache_salt="one")[0].cached_tokens == 512


@gemma3
def test_a_prompt_that_changes_after_a_shared_prefix(rig: Rig) -> None:
    first = prompt(1301, seed=63)
    second = [*first[:1000], *prompt(301, seed=64)]
    plain = rig.expected([second])
    warm_up(rig, [first])

    warm = rig.ours.generate([second])

    assert warm[0].cached_tokens == 768
    check_equal(rig, warm, plain)


@gemma3
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_aborts_at_every_moment(rig: Rig, steps: int) -> None:
    asked = prompt(1301, seed=65)
    plain = rig.expected([asked])
    warm_up(rig, [asked])
    with HmaClient(rig.server.url) as client:
        client.connect()
        rig.ours.call("add", f"abort-{steps}", asked, {"max_tokens": 6})
        rig.ours.call("step", steps)
        rig.ours.call("abort", [f"abort-{steps}"])
        # another request drives the engine on, whatever the aborted one left in flight
        other = rig.ours.generate([prompt(300, seed=66 + steps)])

        assert len(other[0].tokens) == 6
        assert rig.ours.run(tracked_requests) == 0
        assert client.status()["leases"] == 0
    warm = rig.ours.generate([asked])
    check_equal(rig, warm, plain)


@gemma3
def test_many_requests_with_priorities(rig: Rig) -> None:
    shared = prompt(512, seed=70)
    asked = [prompt(520 + 40 * index, seed=71 + index, after=shared) for index in range(8)]
    plain = rig.expected(asked)
    warm_up(rig, asked[:1])
    engine = rig.start_ours(scheduling_policy="priority", max_num_seqs=4)
    engine.run(set_token_budget, 200)
    for index, one in enumerate(asked):
        engine.call("add", f"r{index}", one, {"max_tokens": 6}, 8 - index)
    finished = engine.call("step", 2000)

    assert sorted(finished) == [f"r{index}" for index in range(8)]
    given = [finished[f"r{index}"] for index in range(8)]
    assert all(one.cached_tokens >= 512 for one in given)
    assert [one.tokens for one in given] == [one.tokens for one in plain]
    assert check_audit(rig.audit_path, 256) > 0
    engine.stop()


@gemma3
def test_decoded_chunks_are_stored_when_asked_for(rig: Rig) -> None:
    first = prompt(500, seed=80)
    plain = rig.expected([first], max_tokens=20)
    follow_up = [*first, *plain[0].tokens, *prompt(50, seed=81)]
    with rig.start_ours({"hma.store_decode": True, "hma.namespace": "decode"}) as engine:
        engine.generate([first], max_tokens=20)
        engine.reset_prefix_cache()
        # the second chunk ends at 512, twelve generated tokens behind the prompt
        assert engine.generate([follow_up])[0].cached_tokens == 512
    warm_up(rig, [first], max_tokens=20)
    assert rig.ours.generate([follow_up])[0].cached_tokens == 256


@lfm2
def test_a_decoded_boundary_of_recurrent_state(rig: Rig) -> None:
    first = prompt(500, seed=82)
    plain = rig.expected([first], max_tokens=20)
    follow_up = [*first, *plain[0].tokens, *prompt(50, seed=83)]
    with rig.start_ours({"hma.store_decode": True, "hma.namespace": "decode"}) as engine:
        engine.generate([first], max_tokens=20)
        engine.reset_prefix_cache()
        warm = engine.generate([follow_up])
    assert warm[0].cached_tokens == 512


@gemma3
def test_reset_with_the_connector_forgets_everything(rig: Rig) -> None:
    asked = [prompt(700, seed=84)]
    rig.ours.generate(asked)
    assert rig.ours.reset_prefix_cache(connector=True)
    assert rig.ours.generate(asked)[0].cached_tokens == 0


@gemma3
@pytest.mark.long
def test_a_reset_under_running_requests(rig: Rig) -> None:
    asked = [prompt(1301, seed=86), prompt(700, seed=87)]
    plain = rig.expected(asked)
    warm_up(rig, asked[:1])
    engine = rig.ours
    engine.run(set_token_budget, 256)
    for index, one in enumerate(asked):
        engine.call("add", f"reset-{index}", one, {"max_tokens": 6})
    # one has loaded or is about to, one is being computed
    engine.run(wait_for_lookups)
    finished = engine.call("step", 6)
    assert not finished
    stored = len(audit_lines(rig.audit_path, "store"))
    assert engine.run(reset_while_running)
    finished = engine.call("step", 2000)
    engine.run(set_token_budget, TOKEN_BUDGET)

    given = [finished[f"reset-{index}"] for index in range(2)]
    assert [one.tokens for one in given] == [one.tokens for one in plain]
    assert engine.run(tracked_requests) == 0
    with HmaClient(rig.server.url) as client:
        client.connect()
        assert client.status()["leases"] == 0
    # all of it was stored again, from the beginning
    again = audit_lines(rig.audit_path, "store")[stored:]
    assert {line["first_token"] for line in again} >= {0}
    engine.reset_prefix_cache()
    assert [one.cached_tokens for one in engine.generate(asked)] == [1280, 512]
    assert check_audit(rig.audit_path, 256) > 0


# without an engine: test_70_roles
@gemma3
@pytest.mark.long
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_roles(rig: Rig, role: str) -> None:
    asked = [prompt(700, seed=85)]
    namespace = {"hma.namespace": role}
    with (
        rig.start_ours(namespace, kv_transfer_config={"kv_role": role}) as engine,
        rig.start_ours(namespace) as both,
    ):
        engine.generate(asked)
        seen = both.generate(asked)[0].cached_tokens
        engine.reset_prefix_cache()
        taken = engine.generate(asked)[0].cached_tokens
    assert (seen, taken) == ((512, 0) if role == "kv_producer" else (0, 512))
