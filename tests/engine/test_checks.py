"""What start-up says about versions, settings and groups, and where a whole prompt is no hit."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from support.engine_rig import Rig
from support.toy_config import full, local, state, toy, window
from vllm.config import KVTransferConfig

from hma_triton.errors import ConfigError, UnsupportedLayoutError
from hma_triton.geometries import stand_ins
from hma_triton.integration.vllm.config import ConnectorSettings
from hma_triton.integration.vllm.engine_checks import (
    check_version,
    reuse_warnings,
    start_warnings,
)
from hma_triton.integration.vllm.engine_shape import EngineShape, engine_shape


def test_versions() -> None:
    assert check_version("0.32.0") is None
    assert check_version("0.32.1+cpu") is None
    message = check_version("0.33.0")
    assert message is not None
    assert "0.33.0" in message
    assert "0.32" in message


def test_a_vllm_without_what_we_build_on_is_named() -> None:
    program = (
        "import vllm.distributed.kv_transfer.kv_connector.v1.base as base\n"
        "del base.KVConnectorTransferResults\n"
        "import hma_triton.integration.vllm.connector\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: HMATritonConnector needs vLLM 0.32.x; vLLM 0.32")
    assert "KVConnectorTransferResults" in last


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("hma.sever_url", "hma.server_url"),
        ("server_url", "hma.server_url"),
        ("hma_host_gb", "hma.host_gb"),
        ("hma.chunk-tokens", "hma.chunk_tokens"),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, guess: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{guess}'"):
        ConnectorSettings.from_extra_config({key: 1})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("chunk_tokens", "auto", 0),
        ("chunk_tokens", "512", 512),
        ("host_gb", 2, 2.0),
        ("store_decode", "true", True),
        ("store_decode", False, False),
        ("server_url", None, ""),
    ],
)
def test_values(key: str, value: Any, wanted: Any) -> None:
    assert getattr(ConnectorSettings.from_extra_config({f"hma.{key}": value}), key) == wanted


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_tokens", 0),
        ("chunk_tokens", "many"),
        ("host_gb", -1),
        ("timeout_s", float("inf")),
        ("timeout_s", float("nan")),
        ("timeout_s", True),
        ("store_decode", "maybe"),
        ("server_url", 5),
    ],
)
def test_values_that_do_not_fit(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"hma.{key}: "):
        ConnectorSettings.from_extra_config({f"hma.{key}": value})


@pytest.mark.parametrize(
    ("specs", "tokens", "servable"),
    [
        ((full(16),), 512, 512),
        ((full(16), state(16)), 512, 511),
        # the last token of a chunk needs that chunk; the engine asks for none of it
        ((full(16), local(16, 128)), 512, 511),
        ((full(16), local(16, 128)), 528, 528),
        # position 511 sees 448..511, position 512 would see 449..512: another block's edge
        ((full(16), window(16, 64)), 511 + 64, 511 + 64 - 1),
        ((full(16), window(16, 64)), 512, 512),
        ((full(16), window(16, 65)), 512, 511),
        ((full(16), window(16, 1024)), 512, 512),
    ],
    ids=["full", "state", "local edge", "local inside", "edge", "inside", "one more", "wide"],
)
def test_what_of_a_whole_prompt_may_be_a_hit(
    specs: tuple[Any, ...], tokens: int, servable: int
) -> None:
    config, _ = toy(*specs)
    assert engine_shape(config).servable_tokens(tokens) == servable


def test_a_window_asks_for_one_block_less_than_the_last_token_needs() -> None:
    """The rule above, recounted: blocks from the first that a position sees."""
    for width in (2, 16, 17, 63, 64, 65, 100):
        config, _ = toy(full(16), window(16, width))
        shape = engine_shape(config)
        for tokens in range(16, 400, 16):
            given = max(0, tokens - width + 1) // 16
            needed = max(0, (tokens - 1) - width + 1) // 16
            expected = tokens if given <= needed else tokens - 1
            assert shape.servable_tokens(tokens) == expected, (width, tokens)


def test_unserved_groups_are_named() -> None:
    class CrossAttentionSpec(stand_ins.AttentionSpec):
        pass

    plain = full(16)
    cross = CrossAttentionSpec(
        **{name: getattr(plain, name) for name in stand_ins.AttentionSpec.__dataclass_fields__}
    )
    config, _ = toy(plain, cross, state(16, mode="none"))
    with pytest.raises(UnsupportedLayoutError) as raised:
        engine_shape(config)
    # which group, and why
    lines = str(raised.value)
    assert re.search(r"group 1[^;]*cross", lines, re.IGNORECASE)
    assert re.search(r"group 2[^;]*(snapshot|prefix)", lines, re.IGNORECASE)


def config_of(**changes: Any) -> Any:
    values = {"block": 256, "given": True, "budget": 2048, "longest": 2048, "device": "cpu"}
    values |= changes
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=values["longest"]),
        cache_config=SimpleNamespace(
            block_size=values["block"], user_specified_block_size=values["given"]
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=values["budget"]),
        device_config=SimpleNamespace(device_type=values["device"]),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"given": False}, ["--block-size 256"]),
        ({"given": False, "device": "cuda"}, []),
        ({"block": 128}, ["--block-size 256"]),
        # steps end inside blocks and again on their edges: test_chunked_prefill has all hits
        ({"budget": 160}, []),
        ({"longest": 200}, ["no hit is possible"]),
        # prompts of 256 tokens at most, of which one is always computed
        ({"longest": 257}, ["no hit is possible"]),
        ({"longest": 258}, []),
    ],
    ids=["fine", "default cpu", "default cuda", "small", "budget", "short", "equal", "enough"],
)
def test_settings_that_make_hits_rare(changes: dict[str, Any], said: list[str]) -> None:
    shape = EngineShape(256, 256, {0: 256, 1: 256}, frozenset({1}), 1)
    warnings = reuse_warnings(config_of(**changes), shape)
    assert len(warnings) == len(said)
    assert all(part in text for part, text in zip(said, warnings, strict=True))


def started(role: str = "kv_both", **changes: Any) -> Any:
    values = {"policy": "recompute", "asynchronous": False, "ranks": 1, "hash": "sha256"} | changes
    transfer = KVTransferConfig(
        kv_connector="HMATritonConnector", kv_role=role, kv_load_failure_policy=values["policy"]
    )
    return SimpleNamespace(
        kv_transfer_config=transfer,
        scheduler_config=SimpleNamespace(async_scheduling=values["asynchronous"]),
        parallel_config=SimpleNamespace(data_parallel_size=values["ranks"]),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=values["hash"]),
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"policy": "fail"}, ["kv_load_failure_policy is 'fail': a request whose load fails"]),
        ({"asynchronous": True}, ["asynchronous scheduling was never run"]),
        ({"ranks": 2}, ["data parallelism was never run"]),
        ({"hash": "xxhash"}, ["(xxhash) are seeded at random in every process"]),
        ({"hash": "xxhash_cbor"}, ["(xxhash_cbor) are seeded at random in every process"]),
        ({"hash": "sha256_cbor"}, []),
        ({"role": "kv_consumer"}, ["nobody stores what it could load"]),
        ({"role": "kv_producer"}, ["nobody loads what it stores"]),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else "",
)
def test_what_start_up_says_by_name(
    changes: dict[str, Any], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    warnings = start_warnings(started(**changes), own_server=True)
    assert len(warnings) == len(said)
    assert all(part in text for part, text in zip(said, warnings, strict=True))


def test_a_seed_or_a_shared_server_needs_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert start_warnings(started(hash="xxhash"), own_server=True) == []
    assert start_warnings(started(role="kv_consumer"), own_server=False) == []


@pytest.mark.parametrize("rig", ["qwen3_next"], indirect=True)
def test_an_engine_whose_steps_end_between_states_says_so(rig: Rig) -> None:
    with rig.start_ours(block_size=None) as engine:
        assert "few hits are possible: the scheduler ends its steps on" in engine.log()
    assert "few hits are possible" not in rig.ours.log()
