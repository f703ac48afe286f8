"""LMCache's server and its vLLM connector on a real engine, with and without our operations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engine_process import Completion, EngineError, Nursery
from support.lmcache_stack import (
    CHUNK_TOKENS,
    OUR_SERVER,
    OWN_SERVER,
    SWAP_SERVER,
    ConnectedEngine,
    Server,
    copy_without_core,
)
from support.tiny_models import tiny_config

from hma_triton.integration.vllm.random_model import write_random_model

PROMPT_TOKENS = 1301
HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
SERVED = "hma_triton serves the KV transfers of LMCache"


def prompt(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 500) for _ in range(PROMPT_TOKENS)]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


def make_model(folder: Path, name: str, **changes: Any) -> Path:
    return write_random_model(tiny_config(name, **changes), folder / name)


def ask(engine: ConnectedEngine, wanted: list[int], hit_tokens: int = HIT_TOKENS) -> Completion:
    """The answer, of which `hit_tokens` came from the server; the engine keeps nothing."""
    answer = engine.ask(wanted)
    engine.forget()
    assert answer.cached_tokens == hit_tokens
    return answer


def assert_equal(left: Completion, right: Completion) -> None:
    assert left.tokens == right.tokens
    assert left.logprobs == right.logprobs


def test_operations_swapped_inside_a_running_server(nursery: Nursery, tmp_path: Path) -> None:
    """Whichever operations stored, whichever read back: the same log-probabilities."""
    model = make_model(tmp_path, "gemma3")
    first, second = prompt(1), prompt(2)
    with (
        Server(SWAP_SERVER, tmp_path / "server") as server,
        ConnectedEngine(nursery, tmp_path, model, server.wait_ready()) as engine,
    ):
        assert SERVED in server.log()
        cold = ask(engine, first, hit_tokens=0)
        assert_equal(ask(engine, first), cold)
        report = server.report()
        assert report["installed"] and report["fallthrough"] == []
        assert report["stored"] > 0 and report["retrieved"] == report["stored"]

        assert not server.swap()["installed"]
        assert_equal(ask(engine, first), cold)
        cold_second = ask(engine, second, hit_tokens=0)

        assert server.swap() == {"installed": True, "stored": 0, "retrieved": 0, "fallthrough": []}
        assert_equal(ask(engine, second), cold_second)
        assert server.report()["retrieved"] > 0


MODELS = [
    pytest.param("llama", {}, (), 5, id="one-group"),
    pytest.param("gemma3", {}, (), 5, id="hybrid-one-object"),
    pytest.param("gemma3", {}, ("--separate-object-groups",), 10, id="hybrid-two-objects"),
    pytest.param(
        "gemma3",
        {"sliding_window": 128},
        ("--separate-object-groups",),
        10,
        id="hybrid-window-inside-a-chunk",
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "changes", "options", "objects"), MODELS)
def test_two_servers_and_their_tiers(
    nursery: Nursery,
    tmp_path: Path,
    name: str,
    changes: dict[str, Any],
    options: tuple[str, ...],
    objects: int,
) -> None:
    """Equal answers, equal objects, and each server reads what the other has stored."""
    model = make_model(tmp_path, name, **changes)
    wanted = prompt(3)
    answers: list[Completion] = []
    tiers: list[dict[str, bytes]] = []
    for label, command in (("own", OWN_SERVER), ("ours", OUR_SERVER)):
        with (
            Server(command, tmp_path / label, *options) as server,
            ConnectedEngine(nursery, tmp_path / label, model, server.wait_ready()) as engine,
        ):
            assert (SERVED in server.log()) == (label == "ours")
            answers += [ask(engine, wanted, hit_tokens=0), ask(engine, wanted)]
            tiers.append(server.wait_objects(objects))
    for answer in answers[1:]:
        assert_equal(answer, answers[0])
    own, ours = tiers
    assert own.keys() == ours.keys()
    for key in own:
        assert own[key] == ours[key], key
    for label, command, other in (("own", OWN_SERVER, "ours"), ("ours", OUR_SERVER, "own")):
        folder, tier = tmp_path / f"{label}-reads", tmp_path / other / "tier"
        with (
            Server(command, folder, *options, tier=tier) as server,
            ConnectedEngine(nursery, folder, model, server.wait_ready()) as engine,
        ):
            assert_equal(ask(engine, wanted), answers[0])


@pytest.mark.long
@pytest.mark.parametrize("broken", [False, True], ids=["missing", "not-loadable"])
def test_a_server_without_lmcaches_compiled_core(
    nursery: Nursery, tmp_path: Path, broken: bool
) -> None:
    """LMCache's own command gives up; ours serves an engine whose LMCache is whole."""
    place = copy_without_core(tmp_path / "site", broken)
    here = {"PYTHONPATH": str(place)}
    with pytest.raises(EngineError, match="install the full lmcache package"):
        Server(OWN_SERVER, tmp_path / "own", environment=here).wait_ready()
    model = make_model(tmp_path, "gemma3")
    wanted = prompt(4)
    with (
        Server(SWAP_SERVER, tmp_path / "ours", environment=here) as server,
        ConnectedEngine(nursery, tmp_path, model, server.wait_ready()) as engine,
    ):
        assert "(core: stand-in, because" in server.log()
        cold = ask(engine, wanted, hit_tokens=0)
        assert_equal(ask(engine, wanted), cold)
        report = server.report()
        assert report["retrieved"] == report["stored"] > 0
        ours = server.wait_objects(5)
    with (
        Server(OWN_SERVER, tmp_path / "whole") as server,
        ConnectedEngine(nursery, tmp_path / "whole", model, server.wait_ready()) as engine,
    ):
        assert_equal(ask(engine, wanted, hit_tokens=0), cold)
        assert server.wait_objects(5) == ours
