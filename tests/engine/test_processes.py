"""Engines in vLLM's usual form, several processes: one rank, and two tensor-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
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


def hit_and_compare(rig: Rig, engine: Any, plain: Any, lengths: tuple[int, int]) -> list[int]:
    """Two prompts cold and from the cache: hits, equal to the engine's own cold run and to none."""
    asked = [prompt(length, seed=50) for length in lengths]
    without = plain.generate(asked)
    cold = engine.generate(asked)
    engine.reset_prefix_cache()
    warm = engine.generate(asked)
    assert max(difference(one, other) for one, other in zip(cold, without, strict=True)) == 0
    assert max(difference(one, other) for one, other in zip(warm, without, strict=True)) == 0
    return [one.cached_tokens for one in warm]


@pytest.mark.parametrize("rig", ["gemma3"], indirect=True)
def test_an_engine_of_three_processes(rig: Rig, tmp_path: Path) -> None:
    environment = PROCESSES | {"XDG_RUNTIME_DIR": str(tmp_path)}
    own_server = {"hma.server_url": "", "hma.host_gb": 0.0625}
    with (
        rig.start_ours(own_server, environment=environment) as engine,
        rig.start_plain(environment=PROCESSES) as plain,
    ):
        assert hit_and_compare(rig, engine, plain, (1301, 777)) == [1280, 768]
    assert not list(tmp_path.rglob("*.sock"))


@pytest.mark.parametrize("rig", ["gpt_oss"], indirect=True)
def test_two_ranks(rig: Rig) -> None:
    with (
        rig.start_ours(tensor_parallel_size=2, environment=TWO_RANKS) as engine,
        rig.start_plain(tensor_parallel_size=2, environment=TWO_RANKS) as plain,
    ):
        assert hit_and_compare(rig, engine, plain, (1301, 777)) == [1280, 768]
    assert {line["rank"] for line in audit_lines(rig.audit_path, "load")} == {0, 1}
    assert check_audit(rig.audit_path, 256) > 0


@pytest.mark.long
@pytest.mark.parametrize("rig", ["deepseek_v2"], indirect=True)
def test_two_ranks_share_replicated_kv(rig: Rig) -> None:
    asked = [prompt(700, seed=51)]
    with rig.start_ours(tensor_parallel_size=2, environment=TWO_RANKS) as engine:
        engine.generate(asked)
        first = engine.generate(asked)
        second = engine.generate(asked)
    assert [first[0].cached_tokens, second[0].cached_tokens] == [512, 512]
    assert difference(first[0], second[0]) <= 0.1
    lines = audit_lines(rig.audit_path, "load")
    assert {line["rank"] for line in lines} == {0, 1}
    # one object for both: what rank 1 loaded is what rank 0 had stored
    stored = {tuple(sorted(line["pages"].items())) for line in lines if line["rank"] == 0}
    assert {tuple(sorted(line["pages"].items())) for line in lines if line["rank"] == 1} == stored
