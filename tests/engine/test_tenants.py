"""Who shares a hit and who does not: vLLM's own requests and hashes, against a real server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.replay_tools import tokens_of
from support.toy_config import full
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from hma_triton.integration.vllm.engine_identity import EngineIdentity, engine_identity
from hma_triton.keys import EngineFacts

BLOCK = 16
TABLE = [[1, 2, 3]]


@pytest.fixture(scope="module")
def hasher() -> Callable[[Request], Any]:
    function = get_hash_fn_by_name("sha256")
    init_none_hash(function)
    made: Callable[[Request], Any] = get_request_block_hasher(BLOCK, function)
    return made


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, Path]:
    """Two folders as an adapter has them."""
    folders = {}
    for name in ("one", "two"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        (folders[name] / "adapter_config.json").write_text("{}")
        (folders[name] / "adapter_model.safetensors").write_bytes(name.encode())
    return folders


class Traffic:
    """Requests of vLLM's own kind, all with the same tokens, through one replayed engine."""

    def __init__(self, engine: Any, hasher: Callable[[Request], Any]) -> None:
        self._engine = engine
        self._hasher = hasher
        self._count = 0

    def _arrive(self, **who: Any) -> Request:
        self._count += 1
        request = Request(
            f"r{self._count}",
            tokens_of(3 * BLOCK),
            SamplingParams(max_tokens=4),
            None,
            block_hasher=self._hasher,
            **who,
        )
        assert len(request.block_hashes) == 3
        self._engine.scheduler.on_new_request(request)
        return request

    def store(self, **who: Any) -> None:
        request = self._arrive(**who)
        self._engine.allocate(request, TABLE, 0)
        self._engine.step({request.request_id: (request, 3 * BLOCK, TABLE)})
        self._engine.finish(request)

    def found(self, **who: Any) -> int:
        """Tokens that a request of this kind would load."""
        request = self._arrive(**who)
        found: int = self._engine.matched(request)
        self._engine.finish(request)
        return found


@pytest.fixture
def traffic(engine_of: Any, hasher: Callable[[Request], Any]) -> Traffic:
    return Traffic(engine_of(full(BLOCK), chunk=BLOCK), hasher)


def test_salts_and_adapters_are_kept_apart(traffic: Traffic, adapters: dict[str, Path]) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"cache_salt": "one"},
        {"cache_salt": "two"},
        {"lora_request": LoRARequest("a", 1, str(adapters["one"]))},
        {"lora_request": LoRARequest("b", 2, str(adapters["one"]))},
        # one name for two adapters, in two engines for example
        {"lora_request": LoRARequest("a", 1, str(adapters["two"]))},
        {"lora_request": LoRARequest("hub", 3, "someone/adapter")},
        {"lora_request": LoRARequest("a", 1, str(adapters["one"])), "cache_salt": "one"},
    ]
    for index, kind in enumerate(kinds):
        assert traffic.found(**kind) == 0, kind
        traffic.store(**kind)
        assert [traffic.found(**one) for one in kinds[: index + 1]] == [48] * (index + 1)


def test_an_adapter_replaced_in_place_is_another(
    traffic: Traffic, adapters: dict[str, Path]
) -> None:
    adapter = LoRARequest("a", 1, str(adapters["one"]))
    traffic.store(lora_request=adapter)
    assert traffic.found(lora_request=adapter) == 48
    weights = adapters["one"] / "adapter_model.safetensors"
    weights.write_bytes(b"new")
    os.utime(weights, ns=(1, 1))

    assert traffic.found(lora_request=adapter) == 0


def test_who_may_not_read_the_cache_asks_for_nothing(traffic: Traffic, engine_of: Any) -> None:
    traffic.store()
    reading = SamplingParams(max_tokens=4, skip_reading_prefix_cache=True)
    request = Request("quiet", tokens_of(3 * BLOCK), reading, None, block_hasher=traffic._hasher)
    traffic._engine.scheduler.on_new_request(request)

    assert traffic._engine.scheduler.matched_tokens(request, 0) == (0, False)
    assert not traffic._engine.scheduler_client._lookups


def config_of(**changes: Any) -> Any:
    """What the identity reads of a vLLM config."""
    name = changes.get("backend", "CPU_ATTN")
    backend = type("Backend", (), {"get_name": staticmethod(lambda: name)})
    hf = SimpleNamespace(
        to_json_string=lambda: changes.get("hf", "{}"), _commit_hash=changes.get("commit")
    )
    return SimpleNamespace(
        instance_id=changes.get("instance", "i"),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        model_config=SimpleNamespace(
            model=changes.get("model", "org/model"),
            dtype=changes.get("dtype", torch.bfloat16),
            hf_config=hf,
            revision=changes.get("revision"),
            quantization=changes.get("quantization"),
            hf_overrides=changes.get("overrides", {}),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=changes.get("kv", "auto"),
            mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype=changes.get("ssm", "auto"),
            prefix_caching_hash_algo=changes.get("hash", "sha256"),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1,
            cp_kv_cache_interleave_size=changes.get("interleave", 1),
            world_size=1,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(attn_backend=backend)}
        ),
    )


def meets(engine_of: Any, one: EngineIdentity, other: EngineIdentity) -> bool:
    """Whether an engine of the second identity finds what one of the first has stored."""
    first, second = (
        engine_of(full(BLOCK), chunk=BLOCK, identity=each, name=str(each.instance_id))
        for each in (one, other)
    )
    request = first.request("a", tokens_of(BLOCK))
    first.allocate(request, [[1]], 0)
    first.compute(request, BLOCK, [[1]])
    found = second.matched(second.request("b", tokens_of(BLOCK)))
    return bool(found == BLOCK)


CHANGES: list[dict[str, Any]] = [
    {"model": "org/other"},
    {"dtype": torch.float32},
    {"hf": '{"rope_theta": 2}'},
    {"commit": "abc"},
    {"revision": "main"},
    {"quantization": "fp8"},
    {"overrides": {"rope_theta": 2}},
    {"kv": "fp8_e4m3"},
    {"kv": "fp8_e5m2"},
    {"ssm": "float32"},
    {"hash": "sha256_cbor"},
    {"hash": "xxhash"},
    {"interleave": 2},
    {"backend": "FLASH_ATTN"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=lambda one: "-".join(map(str, one.items())))
def test_engines_that_differ_in_one_thing_never_meet(
    engine_of: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    one = engine_identity(config_of(instance="1"))
    other = engine_identity(config_of(instance="2", **changes))

    assert not meets(engine_of, one, other)


def test_equal_engines_meet_and_other_hash_seeds_do_not(
    engine_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    seven = engine_identity(config_of(instance="1"))
    assert meets(engine_of, seven, engine_identity(config_of(instance="2")))
    monkeypatch.setenv("PYTHONHASHSEED", "8")
    assert not meets(engine_of, seven, engine_identity(config_of(instance="3")))
    # a seed makes random hashes repeat, so that their engines meet
    fast = [engine_identity(config_of(instance=name, hash="xxhash")) for name in ("4", "5")]
    assert meets(engine_of, *fast)
    assert fast[0].facts != EngineFacts()
