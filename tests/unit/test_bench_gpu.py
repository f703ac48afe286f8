"""`bench gpu` as a command: what it needs, its plan, how stages end, exit statuses, the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hma_triton.cli import (
    bench_gpu,
    gpu_report,
    gpu_stage,
)
from hma_triton.cli.gpu_stage import StageContext, StageReport
from hma_triton.errors import TransferError
from hma_triton.kernels.paths import Path as CopyPath

# Refuses everything but what the command may need, and then runs it.
_ONLY_FOUR = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Refuse())
from hma_triton.cli.bench_gpu import STAGES, app
for stage in STAGES:
    stage.load()
from hma_triton.torch_driver import TorchDriver, open_driver
try:
    assert isinstance(open_driver(), TorchDriver)
except Exception as error:
    print(f"{{type(error).__name__}}: {{error}}")
app(["--dry-run"])
"""
_UNWANTED = (
    "typer", "rich", "xxhash", "zmq", "prometheus_client", "numba", "vllm", "lmcache", "cuda",
    "matplotlib", "transformers", "safetensors", "pytest", "hypothesis",
)  # fmt: skip


def test_the_dry_run_needs_torch_triton_numpy_and_msgspec_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ONLY_FOUR.format(names=_UNWANTED)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout
    if not torch.cuda.is_available():
        assert text.startswith("ConfigError: CUDA device 0 of 0 devices is not there (torch")
    for stage in bench_gpu.STAGES:
        assert f"  {stage.name:12}" in text
    assert "196 cases (model, variant, object layout) by 3 paths" in text
    assert "qwen3.5-0.8b/cuda90_noprefix" in text


def test_all_stages_together_take_less_than_eight_minutes() -> None:
    assert sum(stage.seconds for stage in bench_gpu.STAGES) < 8 * 60


def test_every_stage_has_a_function() -> None:
    for stage in bench_gpu.STAGES:
        assert callable(stage.load())


def test_without_a_gpu_the_command_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """On a machine with one, CUDA_VISIBLE_DEVICES hides it."""
    done = subprocess.run(
        [sys.executable, "-m", "hma_triton.cli.bench_gpu", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == bench_gpu.NO_GPU
    assert "no GPU that can be used" in done.stdout
    assert not list(tmp_path.iterdir())


def _stage(name: str, seconds: int = 60) -> bench_gpu.Stage:
    return bench_gpu.Stage(name, f"{name}:run", seconds, "")


def test_an_error_with_a_name_is_an_outcome_and_the_next_stage_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(context: StageContext) -> StageReport:
        raise TransferError("no bytes")

    monkeypatch.setattr(bench_gpu.Stage, "load", lambda stage: run)
    found = bench_gpu.run_stage(_stage("machine"), StageContext(0, 0.0, "."))
    assert found["ok"] is False
    assert found["lines"] == ["TransferError: no bytes"]


_LATE = "did not finish: ran past its 1 s and was ended"
_ANSWER = 'open(".x.json", "w").write(\'{"ok": true, "lines": ["so far"], "missing": []}\'); '


@pytest.mark.parametrize(
    ("program", "checks", "ok", "lines"),
    [
        ("import os, signal; os.kill(os.getpid(), 11)", False, False, ["status -11"]),
        ("pass", False, False, ["without an answer"]),
        ("import time; time.sleep(600)", True, False, [_LATE]),
        # a measurement that was cut off is no wrong byte
        ("import time; time.sleep(600)", False, None, [_LATE]),
        # what was known before stays, but a check that was cut off is not right
        (_ANSWER + "import time; time.sleep(600)", False, True, ["so far", _LATE]),
        (_ANSWER + "import time; time.sleep(600)", True, False, ["so far", _LATE]),
        (_ANSWER, True, True, ["so far"]),
    ],
)
def test_a_stage_that_dies_or_hangs_is_an_outcome(
    program: str,
    checks: bool,
    ok: bool | None,
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **kwargs: real([sys.executable, "-c", program], cwd=tmp_path, **kwargs),
    )
    stage = bench_gpu.Stage("x", "x:run", 1, "", checks)
    seconds = 1.0 if _LATE in lines else 60.0
    found = bench_gpu._run_apart(stage, 0, tmp_path, seconds)
    assert found["ok"] is ok
    assert len(found["lines"]) == len(lines)
    assert all(wanted in line for wanted, line in zip(lines, found["lines"], strict=True))
    assert not list(tmp_path.iterdir())


def test_a_stage_s_deadline_counts_from_the_start_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that counted from the end of its imports would be ended before it answers."""
    seen: list[StageContext] = []

    def load(stage: bench_gpu.Stage) -> Any:
        return lambda context: seen.append(context) or StageReport(ok=True)

    monkeypatch.setattr(bench_gpu.Stage, "load", load)
    bench_gpu.app(["--stage", "ipc", "--out", str(tmp_path), "--until", "123.5"])
    assert [(context.deadline, context.stage) for context in seen] == [(123.5, "ipc")]
    assert json.loads((tmp_path / ".ipc.json").read_text())["ok"] is True


def test_the_last_stage_has_what_the_others_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def run(stage: Any, device: int, out: Path, seconds: float) -> dict[str, Any]:
        given.append(seconds)
        return {"ok": None, "lines": [], "missing": [], "data": {}, "seconds": 0.1}

    monkeypatch.setattr(bench_gpu, "_run_apart", run)
    bench_gpu.run_all(0, tmp_path, ["machine", "beside", "tests"])
    assert given[:2] == [25, 30]
    assert 460 < given[2] < 471


def test_what_a_stage_keeps_is_an_answer(tmp_path: Path) -> None:
    StageContext(0, 0.0, str(tmp_path)).keep(StageReport(ok=True))
    assert not list(tmp_path.iterdir()), "a stage called as a function leaves nothing"
    StageContext(0, 0.0, str(tmp_path), "paths").keep(StageReport(ok=True, lines=["half"]))
    assert [path.name for path in tmp_path.iterdir()] == [".paths.json"]
    assert json.loads((tmp_path / ".paths.json").read_text())["lines"] == ["half"]


def test_repeats_end_when_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def run() -> None:
        clock[0] += 1.5

    monkeypatch.setattr(gpu_stage.time, "perf_counter", lambda: clock[0])
    assert gpu_stage.median_seconds(run, 5) == 1.5
    assert clock[0] == 3 * 1.5, "one to warm up, two that count"


@pytest.mark.parametrize(("ok", "status"), [(True, 0), (None, 0), (False, 1)])
def test_the_exit_status_is_about_right_and_wrong(
    ok: bool | None,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answer = {"ok": ok, "lines": ["a line"], "missing": ["a part: why"], "data": {}, "seconds": 1.0}
    monkeypatch.setattr(bench_gpu, "_run_apart", lambda stage, device, out, seconds: dict(answer))
    monkeypatch.setattr(bench_gpu, "plot", lambda stages, out: [])
    if ok is False:
        answer["ok"] = None
        real = bench_gpu._run_apart
        monkeypatch.setattr(
            bench_gpu,
            "_run_apart",
            lambda *args: {**real(*args), "ok": args[0].name != "ipc"},
        )
    assert bench_gpu.run_all(0, tmp_path, [stage.name for stage in bench_gpu.STAGES]) == status
    document = json.loads((tmp_path / "bench-gpu.json").read_text())
    assert list(document["stages"]) == [stage.name for stage in bench_gpu.STAGES]
    assert "did not run: a part: why" in capsys.readouterr().out


def test_marks_are_shares_of_ceilings_of_the_same_run() -> None:
    def cell(direction: str, run_bytes: int, rate: float, path: str) -> dict[str, Any]:
        return {"direction": direction, "run_bytes": run_bytes, "gb_s": rate, "path": path}

    stages = {
        "ceilings": {
            "data": {
                "engine_store": 50.0,
                "engine_retrieve": 55.0,
                "kernel_read": 40.0,
                "device_copy": 2000.0,
                "device_gather": 1700.0,
            }
        },
        "requests": {
            "data": {
                "cells": [
                    cell("store", 32768, 47.5, "dma"),
                    cell("store", 32768, 20.0, "staged"),
                    cell("retrieve", 65536, 52.0, "dma"),
                    cell("store", 4096, 45.0, "zero_copy"),
                    cell("retrieve", 4096, 35.0, "zero_copy"),
                ]
            }
        },
        "beside": {
            "data": {
                "rows": [
                    {"path": "zero_copy", "programs": 32, "direction": "store", "slowdown": 1.05},
                    {"path": "zero_copy", "programs": 132, "direction": "store", "slowdown": 3.0},
                    {"path": "dma", "programs": None, "direction": "retrieve", "slowdown": 1.2},
                ]
            }
        },
    }
    found = {mark["what"]: (mark["share"], mark["met"]) for mark in gpu_report.marks(stages)}
    assert found == {
        "store, runs of 4 KiB, of the copy engine": (0.9, True),
        "retrieve, runs of 4 KiB, of a kernel's reads": (0.875, False),
        "store, runs of 32 KiB, of the copy engine": (0.95, True),
        "retrieve, runs of 64 KiB, of the copy engine": (0.945, False),
        "device gather, of a device copy": (0.85, False),
        "matrix product beside zero_copy store, times as long": (1.05, True),
        "matrix product beside dma retrieve, times as long": (1.2, False),
    }
    assert gpu_report.marks({}) == []


def test_a_plot_for_each_question_and_no_more_than_five(tmp_path: Path) -> None:
    cells = [
        {"direction": d, "run_bytes": n, "gb_s": 1.0, "path": p}
        for d in ("store", "retrieve")
        for n in (4096, 8192)
        for p in [path.value for path in CopyPath]
    ]
    rows = [{"programs": 8, "direction": "store", "gb_s_alone": 1.0, "slowdown": 1.0}]
    stages = {
        "requests": {"data": {"cells": cells}},
        "paths": {"data": {"cells": cells}},
        "ceilings": {"data": {"engine_store": 2.0}},
        "beside": {"data": {"rows": rows}},
    }
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError):
            gpu_report.plot(stages, tmp_path)
        return
    names = gpu_report.plot(stages, tmp_path)
    assert len(names) == 5
    assert all((tmp_path / name).stat().st_size > 0 for name in names)
