"""Engines on demand: one nursery per session, one rig per family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engine_families import FAMILIES
from support.engine_process import Nursery
from support.engine_rig import Rig
from support.replay_tools import CONFIG
from support.schedule_replay import ReplayEngine
from support.toy_config import toy

from hma_triton.server.launch import EmbeddedServer, start_embedded


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("engines"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def rig(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    """The rig of the family that the test is parametrised with."""
    made = Rig(FAMILIES[request.param], nursery, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    made = start_embedded(CONFIG)
    yield made
    made.close()


@pytest.fixture
def engine_of(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes engines with keys of this test alone; all are closed at its end."""
    made: list[ReplayEngine] = []

    def make(*specs: Any, url: str = server.url, chunk: int = 0, **options: Any) -> ReplayEngine:
        config, caches = toy(*specs)
        settings = dict(options.pop("settings", {}))
        if chunk:
            settings["hma.chunk_tokens"] = chunk
        options.setdefault("model", request.node.name)
        options.setdefault("name", f"{request.node.name}-{len(made)}")
        made.append(ReplayEngine(url, config, caches, settings=settings, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
