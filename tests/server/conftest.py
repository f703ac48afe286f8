"""Processes for tests that kill and stop them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server_nursery import Nursery, nursery


@pytest.fixture(scope="session")
def shared_nursery() -> Iterator[Nursery]:
    with nursery() as made:
        yield made


@pytest.fixture
def processes(shared_nursery: Nursery) -> Iterator[Nursery]:
    """The nursery, emptied after the test."""
    yield shared_nursery
    shared_nursery.release()


@pytest.fixture
def url(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"ipc://{tmp_path / 's.sock'}"
