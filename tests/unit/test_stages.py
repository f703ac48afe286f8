"""The test command itself: what it runs, counts and answers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/stages.py as a module of its own, logging into a temporary folder."""
    spec = importlib.util.spec_from_file_location("stages_under_test", ROOT / "scripts/stages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    # What main() sets for the processes of a run.
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    return module


def shell(stages: ModuleType, name: str, does: str, limit_s: int = 60) -> object:
    return stages.Stage(name, ("-c", does), limit_s)


CLOSING = "print('== 3 passed, 1 deselected in 0.10s ==')"


def test_all_pass(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = (shell(stages, "one", CLOSING), shell(stages, "two", CLOSING), shell(stages, "lint", ""))
    monkeypatch.setattr(stages, "STAGES", made)
    assert stages.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "6 passed, 0 failed"
    for name in ("one", "two", "lint"):
        assert any(line.startswith(f"{name} ") and " passed " in line for line in lines)


def test_a_failure_fails_the_run_and_its_output_is_shown(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "print('the reason'); print('== 2 failed, 1 passed, 1 error in 75.10s (0:01:15) =='); "
    made = (shell(stages, "one", CLOSING), shell(stages, "bad", fails + "raise SystemExit(1)"))
    monkeypatch.setattr(stages, "STAGES", made)
    assert stages.main([]) == 1
    out = capsys.readouterr().out
    assert "bad: FAILED (exit status 1)" in out
    assert "the reason" in out
    assert out.splitlines()[-1] == "4 passed, 3 failed"


def test_a_stage_without_a_test_fails_by_its_exit_status(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (shell(stages, "empty", "raise SystemExit(5)"),)
    monkeypatch.setattr(stages, "STAGES", made)
    assert stages.main([]) == 1


def test_a_stage_over_its_limit_ends_with_all_that_it_started(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    hangs = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', "
    hangs += "'import time; time.sleep(600)']); "
    hangs += f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    monkeypatch.setattr(stages, "STAGES", (shell(stages, "hangs", hangs, limit_s=2),))
    monkeypatch.setattr(stages, "FAREWELL_S", 1)
    assert stages.main([]) == 1
    assert "over its limit of 2 s" in (stages.LOGS / "hangs.log").read_text()
    stat = Path(f"/proc/{child.read_text()}/stat")
    for _ in range(100):
        if not stat.exists() or ") Z " in stat.read_text():
            return
        time.sleep(0.1)
    pytest.fail("the stage's child lives on")


def test_only_what_is_named_runs_and_a_wrong_name_is_refused(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = (shell(stages, "one", CLOSING), shell(stages, "bad", "raise SystemExit(1)"))
    monkeypatch.setattr(stages, "STAGES", made)
    assert stages.main(["one"]) == 0
    assert stages.main(["onne"]) == 2
    assert "no such stage: onne; there are one, bad" in capsys.readouterr().err


def test_every_test_folder_is_in_a_stage(stages: ModuleType) -> None:
    ran = {arg for stage in stages.STAGES for arg in stage.args if arg.startswith("tests/")}
    folders = {f"tests/{p.parent.name}" for p in (ROOT / "tests").glob("*/test_*.py")}
    files = {f"tests/{p.name}" for p in (ROOT / "tests").glob("test_*.py")}
    assert ran == folders | files


def test_ci_runs_the_command_of_the_readme() -> None:
    command = (ROOT / ".ci/run").read_text().splitlines()[-1].removeprefix("exec ")
    assert f"```\n{command}\n```" in (ROOT / "README.md").read_text()
    for script in (".ci/run", "scripts/demo", "scripts/test"):
        assert os.access(ROOT / script, os.X_OK)


def test_a_machine_without_the_right_python_is_told_so(tmp_path: Path) -> None:
    old = tmp_path / "python3.6"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(
        [str(ROOT / "scripts/test")],
        env=os.environ | {"PYTHON": str(old)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3
    assert "needs a Python == (3, 11) with its venv module" in done.stderr
    assert str(old) in done.stderr
