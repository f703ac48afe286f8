"""Engines in vLLM's usual form, several processes: one rank, and two tensor-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_cases import check_equal
from support.engine_families import prompt
from support.engine_rig import Rig, audit_lines, check_audit, difference

SHM = Path("/dev/shm")
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
TWO_RANKS = PROCESSES | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(autouse=True)
def leavings_of_vllm() -> Iterator[None]:
    """vLLM 0.32 leaves the segments of its own tensor-parallel collectives behind, with or without
    a connector; they are removed here so that anything of ours would be seen."""
    before = set(SHM.iterdir())
    yield
    for path in set(SHM.iterdir()) - before:
        if re.fullmatch(r"vllm_dist_.*-cpushm_\d+", path.name):
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("rig", ["gemma3"], indirect=True)
def test_an_engine_of_three_processes(rig: Rig, tmp_path: Path) -> None:
    asked = [prompt(1301, seed=50), prompt(777, seed=50)]
    plain = rig.expected(asked)
    own_server = {"hma.server_url": "", "hma.host_gb": 0.0625}
    environment = PROCESSES | {"XDG_RUNTIME_DIR": str(tmp_path)}
    with rig.start_ours(own_server, environment=environment) as engine:
        cold = engine.generate(asked)
        engine.reset_prefix_cache()
        warm = engine.generate(asked)
    assert [one.cached_tokens for one in warm] == [1280, 768]
    check_equal(rig, cold, plain)
    check_equal(rig, warm, plain)
    assert not list(tmp_path.rglob("*.sock"))


@pytest.mark.parametrize("rig", ["gpt_oss"], indirect=True)
def test_two_ranks(rig: Rig) -> None:
    asked = [prompt(1301, seed=52), prompt(777, seed=52)]
    loads = len(audit_lines(rig.audit_path, "load"))
    with rig.start_ours(tensor_parallel_size=2, environment=TWO_RANKS) as engine:
        cold = engine.generate(asked)
        engine.reset_prefix_cache()
        warm = engine.generate(asked)
    assert [one.cached_tokens for one in warm] == [1280, 768]
    check_equal(rig, warm, cold)
    lines = audit_lines(rig.audit_path, "load")[loads:]
    assert sorted(line["rank"] for line in lines) == [0, 0, 1, 1]
    assert check_audit(rig.audit_path, 256) > 0


@pytest.mark.long
@pytest.mark.parametrize("rig", ["gpt_oss"], indirect=True)
def test_two_ranks_compute_as_without_the_connector(rig: Rig) -> None:
    asked = [prompt(1301, seed=53), prompt(777, seed=53)]
    with (
        rig.start_ours(tensor_parallel_size=2, environment=TWO_RANKS) as engine,
        rig.start_plain(tensor_parallel_size=2, environment=TWO_RANKS) as plain,
    ):
        check_equal(rig, engine.generate(asked), plain.generate(asked))


@pytest.mark.long
@pytest.mark.parametrize("rig", ["deepseek_v2"], indirect=True)
def test_two_ranks_share_replicated_kv(rig: Rig) -> None:
    asked = [prompt(700, seed=51)]
    loads = len(audit_lines(rig.audit_path, "load"))
    with rig.start_ours(tensor_parallel_size=2, environment=TWO_RANKS) as engine:
        engine.generate(asked)
        first = engine.generate(asked)
        second = engine.generate(asked)
    assert [first[0].cached_tokens, second[0].cached_tokens] == [512, 512]
    assert difference(first[0], second[0]) <= 0.1
    lines = audit_lines(rig.audit_path, "load")[loads:]
    assert {line["rank"] for line in lines} == {0, 1}
    # one object for both: what rank 1 loaded is what rank 0 had stored
    stored = {tuple(sorted(line["pages"].items())) for line in lines if line["rank"] == 0}
    assert {tuple(sorted(line["pages"].items())) for line in lines if line["rank"] == 1} == stored
