"""The `hma-triton` command: its sub-commands, and what it says when something is not right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hma_triton.cli.main import (
    BENCHMARKS,
    EXIT_BAD_INPUT,
    EXIT_NOT_INSTALLED,
    SUBCOMMANDS,
    Subcommand,
    app,
    run,
)
from hma_triton.errors import HmaError

LIMIT_S = 60


def hma_triton(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, without a terminal."""
    return subprocess.run(
        [sys.executable, "-m", "hma_triton.cli.main", *args],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def assert_one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The command refused its input: status 2, one line on stderr with all parts."""
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("hma-triton: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize("group", [[], ["bench"]])
def test_help_lists_every_command(group: list[str]) -> None:
    shown = CliRunner().invoke(app, [*group, "--help"])
    assert shown.exit_code == 0
    for command in BENCHMARKS if group else SUBCOMMANDS:
        assert f" {command.name} " in shown.output


# `lmcache-server --help` is LMCache's own, see tests/lmcache.
EXPLAINED = [c for c in SUBCOMMANDS + BENCHMARKS if c.name != "lmcache-server"]


@pytest.mark.parametrize("command", EXPLAINED, ids=lambda command: command.module)
def test_every_command_is_there_and_explains_itself(
    command: Subcommand, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.load()(args=["--help"], prog_name=f"hma-triton {command.name}")
    assert ended.value.code == 0
    assert f"hma-triton {command.name}" in capsys.readouterr().out


def test_options_after_the_name_reach_the_sub_command() -> None:
    done = hma_triton("doctor", "--mode", "no-such-mode")
    assert done.returncode == 2
    assert "'no-such-mode' is not one of" in done.stderr


def test_an_unknown_command_is_refused() -> None:
    done = hma_triton("dome")
    assert done.returncode == 2
    assert "dome" in done.stderr


def test_help_and_version_do_not_import_torch() -> None:
    look = "import sys; from hma_triton.cli.main import app; app(args=['--version'], "
    look += "standalone_mode=False); print('torch' in sys.modules)"
    seen = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert seen.stdout.splitlines()[-1] == "False", seen.stderr


def module_that(folder: Path, monkeypatch: pytest.MonkeyPatch, does: str) -> Subcommand:
    """A sub-command whose module is the real thing but for one statement."""
    source = f"import typer\napp = typer.Typer()\n@app.command()\ndef f():\n    {does}\n"
    (folder / "probe_command.py").write_text(source)
    monkeypatch.setattr(
        "hma_triton.cli.__path__", [*__import__("hma_triton.cli").cli.__path__, str(folder)]
    )
    monkeypatch.delitem(sys.modules, "hma_triton.cli.probe_command", raising=False)
    return Subcommand("probe", "probe_command", "")


@pytest.mark.parametrize(
    ("package", "install"),
    [("vllm", "hma-triton[vllm]"), ("numba", "hma-triton[cpu]"), ("cuda", "hma-triton[cuda]")],
)
def test_a_package_that_is_not_installed_is_named_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    install: str,
) -> None:
    command = module_that(tmp_path, monkeypatch, f"import {package}.something")
    # What Python does for a package that is not there.
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        run(command, "hma-triton probe", [])
    assert ended.value.code == EXIT_NOT_INSTALLED
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == (
        f"hma-triton: `hma-triton probe` needs the package {package}, which is not installed: "
        f"pip install '{install}'"
    )


def test_a_module_of_our_own_that_is_missing_is_no_excuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = module_that(tmp_path, monkeypatch, "import hma_triton.nowhere")
    with pytest.raises(ModuleNotFoundError, match=r"hma_triton\.nowhere"):
        run(command, "hma-triton probe", [])


def test_an_error_of_ours_is_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raises = "from hma_triton.errors import ConfigError; raise ConfigError('chunk 100, limit 16')"
    command = module_that(tmp_path, monkeypatch, raises)
    with pytest.raises(SystemExit) as ended:
        run(command, "hma-triton probe", [])
    assert ended.value.code == EXIT_BAD_INPUT
    assert capsys.readouterr().err == "hma-triton: chunk 100, limit 16\n"


def test_any_other_error_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = module_that(tmp_path, monkeypatch, "raise KeyError('a bug')")
    assert not issubclass(KeyError, HmaError)
    with pytest.raises(KeyError, match="a bug"):
        run(command, "hma-triton probe", [])


@pytest.mark.parametrize(
    ("name", "args", "why"),
    [
        ("serve", ["--host-gb", "100000"], "an arena of 107374182400000 bytes does not fit"),
        ("serve", ["--url", "tcp://0.0.0.0:7777"], "open to the network"),
        ("serve", ["--url", "ipc://relative"], "absolute path"),
        ("serve", ["--verify", "often"], "verify 'often' is unknown"),
        ("inspect", ["no-such-model"], "no-such-model"),
        ("inspect", ["--kvcache-shape-spec", "(2,4,16"], "(2,4,16"),
        ("copy", ["--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_of_a_command_is_one_line(
    name: str, args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = (c for c in SUBCOMMANDS + BENCHMARKS if c.name == name)
    with pytest.raises(SystemExit) as ended:
        run(command, f"hma-triton {name}", args)
    assert ended.value.code == EXIT_BAD_INPUT
    lines = [line for line in capsys.readouterr().err.splitlines() if "hma-triton: " in line]
    assert len(lines) == 1
    assert why in lines[0]
