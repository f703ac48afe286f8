"""Engines that share a server: the same model meets, anything else does not.

Every single difference, without engines: `test_tenants.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.engine_cases import check_equal
from support.engine_families import prompt
from support.engine_rig import Rig

llama = pytest.mark.parametrize("rig", ["llama"], indirect=True)


@llama
def test_two_engines_at_once(rig: Rig) -> None:
    asked = [prompt(1301, seed=90), prompt(777, seed=91)]
    plain = rig.expected(asked)
    with rig.start_ours() as other:
        rig.ours.generate(asked[:1])
        other.generate(asked[1:])
        rig.ours.reset_prefix_cache()
        other.reset_prefix_cache()
        rig.ours.send("generate", asked, False, {})
        theirs = other.generate(asked)
        ours = rig.ours.answer()

    assert [one.cached_tokens for one in ours] == [1280, 768]
    assert [one.cached_tokens for one in theirs] == [1280, 768]
    check_equal(rig, ours, plain)
    check_equal(rig, theirs, plain)


@llama
@pytest.mark.parametrize(
    ("changes", "environment"),
    [
        pytest.param({"dtype": "float32"}, {}, id="dtype"),
        pytest.param({"kv_cache_dtype": "fp8"}, {}, id="kv dtype", marks=pytest.mark.long),
        pytest.param({"block_size": 64}, {}, id="block", marks=pytest.mark.long),
        pytest.param(
            {"hf_overrides": {"rope_theta": 20000.0}}, {}, id="override", marks=pytest.mark.long
        ),
        pytest.param({}, {"PYTHONHASHSEED": "7"}, id="hash seed", marks=pytest.mark.long),
    ],
)
def test_engines_that_differ_never_meet(
    rig: Rig, changes: dict[str, Any], environment: dict[str, str]
) -> None:
    asked = [prompt(1301, seed=92)]
    rig.ours.generate(asked)
    with rig.start_ours(environment=environment, **changes) as other:
        assert other.generate(asked)[0].cached_tokens == 0
        other.reset_prefix_cache()
        assert other.generate(asked)[0].cached_tokens == 1280


@llama
@pytest.mark.long
def test_random_hash_seeds_are_told_and_kept_apart(rig: Rig) -> None:
    asked = [prompt(700, seed=93)]
    for _ in range(2):
        with rig.start_ours(prefix_caching_hash_algo="xxhash") as engine:
            assert "seeded at random in every process" in engine.log()
            assert engine.generate(asked)[0].cached_tokens == 0
            engine.reset_prefix_cache()
            assert engine.generate(asked)[0].cached_tokens == 512


@llama
def test_weights_replaced_in_place_are_another_model(rig: Rig) -> None:
    asked = [prompt(700, seed=94)]
    with rig.start_ours() as engine:
        engine.generate(asked)
    weights = rig.model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    with rig.start_ours() as engine:
        assert engine.generate(asked)[0].cached_tokens == 0
