"""Start-up and end of an engine with the connector: its own server, refusals, bounds, settings."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from support.engine_cases import check_equal
from support.engine_families import prompt
from support.engine_process import EngineError
from support.engine_rig import Rig
from support.leftovers import session_processes
from support.replay_tools import eventually, serve_at

from hma_triton.config import ServerConfig
from hma_triton.server.launch import start_embedded

llama = pytest.mark.parametrize("rig", ["llama"], indirect=True)
lfm2 = pytest.mark.parametrize("rig", ["lfm2"], indirect=True)
NO_SERVER: dict[str, Any] = {"hma.server_url": "", "hma.host_gb": 0.0625}


def own_servers() -> list[int]:
    """Processes of embedded servers that watch an engine process of this session."""
    token = os.environ["HMA_TEST_SESSION"]
    return [
        pid
        for pid in session_processes(token)
        if b"hma_triton.server.child" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@llama
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_its_own_server_ends_with_the_engine(rig: Rig, tmp_path: Path, end: str) -> None:
    asked = [prompt(700, seed=40)]
    before = set(own_servers())
    engine = rig.start_ours(NO_SERVER, environment={"XDG_RUNTIME_DIR": str(tmp_path)})
    plain = rig.expected(asked)
    engine.generate(asked)
    engine.reset_prefix_cache()
    warm = engine.generate(asked)
    assert warm[0].cached_tokens == 512
    check_equal(rig, warm, plain)
    assert len(set(own_servers()) - before) == 1

    engine.stop() if end == "stop" else engine.kill()

    eventually(lambda: set(own_servers()) <= before, 15.0)
    eventually(lambda: not list(tmp_path.rglob("*.sock")), 5.0)


@llama
def test_without_a_server_the_engine_starts_in_time(rig: Rig, tmp_path: Path) -> None:
    asked = [prompt(700, seed=41)]
    tmp_path.chmod(0o700)
    address = f"ipc://{tmp_path}/none.sock"
    extra = {
        "hma.server_url": address,
        "hma.start_timeout_s": 1.0,
        "hma.lookup_timeout_s": 2.0,
        "hma.breaker_s": 0.5,
    }
    started = time.monotonic()
    engine = rig.start_ours(extra)
    assert time.monotonic() - started < 60
    log = engine.log()
    assert "no cache server, the engine runs without it" in log
    plain = rig.expected(asked)
    cold = engine.generate(asked)
    check_equal(rig, cold, plain)

    # it comes later: the engine takes it up by itself
    server = serve_at(address)
    try:
        eventually(lambda: engine.log().count("rank 0 registered") == 1, 30.0)
        engine.reset_prefix_cache()
        engine.generate(asked)
        engine.reset_prefix_cache()
        warm = engine.generate(asked)
        assert warm[0].cached_tokens == 512
        check_equal(rig, warm, plain)
        engine.stop()
    finally:
        server.terminate()
        server.wait()


@llama
@pytest.mark.parametrize(
    ("extra", "changes", "message"),
    [
        pytest.param(
            {"hma.chunk_token": 256},
            {},
            "did you mean 'hma.chunk_tokens'?",
            marks=pytest.mark.long,
        ),
        ({"hma.chunk_tokens": 100}, {}, "the nearest valid chunk is 128"),
        pytest.param(
            {"hma.timeout_s": "soon"},
            {},
            "hma.timeout_s: 'soon' is not a number",
            marks=pytest.mark.long,
        ),
        (
            {},
            {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                }
            },
            "never run with this connector: speculative decoding",
        ),
    ],
    ids=["typo", "chunk", "value", "speculation"],
)
def test_settings_that_end_the_start(
    rig: Rig, extra: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=r"ConfigError|GroupMismatchError") as raised:
        rig.start_ours(extra, **changes)
    assert message in str(raised.value)


@llama
def test_a_refused_registration_ends_the_start_with_its_reason(rig: Rig) -> None:
    small = start_embedded(
        ServerConfig(url="ipc:///replaced", host_bytes=64 << 20, max_registrations=1)
    )
    try:
        first = rig.start_ours({"hma.server_url": small.url})
        started = time.monotonic()
        with pytest.raises(EngineError, match="--max-registrations is 1"):
            rig.start_ours({"hma.server_url": small.url})
        assert time.monotonic() - started < 60
        first.stop()
    finally:
        small.close()


@lfm2
def test_recurrent_state_without_prefix_caching_is_refused(rig: Rig) -> None:
    with pytest.raises(EngineError) as raised:
        rig.start_ours(enable_prefix_caching=False)
    assert "UnsupportedLayoutError" in str(raised.value)
    assert "group 0" in str(raised.value)


@llama
def test_what_an_operator_is_told(rig: Rig) -> None:
    engine = rig.start_ours(
        kv_transfer_config={"kv_load_failure_policy": "fail"}, environment={"PYTHONHASHSEED": "7"}
    )
    log = engine.log()
    assert "kv_load_failure_policy is 'fail'" in log
    assert "a chunk is 256 tokens and 262144 bytes on this rank" in log
    engine.stop()
