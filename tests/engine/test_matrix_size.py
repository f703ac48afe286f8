"""The matrix of families and situations is complete, and CI runs at least 24 cells of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from engine import test_families, test_matrix
from support.engine_families import FAMILIES, MLA

SITUATIONS: dict[str, Callable[..., None]] = {
    "whole prompt": test_families.test_a_prefix_comes_back,
    "partial hit": test_matrix.test_a_shared_prefix_comes_back,
    "own cache beside ours": test_matrix.test_own_cache_and_ours_together,
    "chunked prefill": test_families.test_chunked_prefill,
    "two requests": test_matrix.test_two_requests_at_once,
    "preemption": test_matrix.test_preempted_requests_resume,
    "restart of the engine": test_families.test_a_fresh_engine_finds_the_server,
    "server killed": test_matrix.test_the_server_is_killed_in_between,
}
# the build has neither for MLA
NOT_FOR_MLA = ("own cache beside ours", "chunked prefill")


def cells(test: Any) -> dict[str, bool]:
    """The families of a test, and whether CI runs them."""
    (mark,) = [one for one in test.pytestmark if one.args[0] == "rig"]
    return {
        param.values[0]: all(each.name != "long" for each in param.marks) for param in mark.args[1]
    }


@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_family_meets_every_situation(situation: str) -> None:
    left_out = set(MLA) if situation in NOT_FOR_MLA else set()
    assert set(cells(SITUATIONS[situation])) == set(FAMILIES) - left_out


def test_ci_runs_at_least_24_cells_and_every_situation() -> None:
    in_ci = {name: sum(cells(test).values()) for name, test in SITUATIONS.items()}
    assert min(in_ci.values()) >= 1
    assert sum(in_ci.values()) >= 24


def test_every_family_has_a_negative_control() -> None:
    assert set(cells(test_families.test_a_wrong_page_shows)) == set(FAMILIES)
