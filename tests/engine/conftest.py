"""Engines on demand: one nursery per session, one rig per family."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.engine_families import FAMILIES
from support.engine_process import Nursery
from support.engine_rig import Rig


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
