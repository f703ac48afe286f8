"""Options, hypothesis profiles and the check that a run leaves nothing behind."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.leftovers import SHM_OF_ENGINES, TOKEN_VARIABLE, find_leftovers, take_snapshot

# The same examples on every machine, and no verdict that depends on how busy it is.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("ci"), derandomize=False, max_examples=5000)
settings.load_profile("ci")

_HERE = Path(__file__).parent
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_TOKEN = uuid.uuid4().hex
_skipped: list[str] = []
_without_device: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where `device` is")
    parser.addoption("--forbid-skips", action="store_true", help="a skipped test fails the run")


def pytest_configure(config: pytest.Config) -> None:
    """A temporary folder for this session alone, so that what it leaves is known to be its own."""
    os.environ[TOKEN_VARIABLE] = _TOKEN
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.TemporaryDirectory(prefix="hma-t-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    for name in ("TMPDIR", "XDG_RUNTIME_DIR"):
        os.environ[name] = folder.name
    tempfile.tempdir = None


def pytest_report_header() -> str:
    away = "compiled" if _INTERPRETED else "interpreted"
    return f"TRITON_INTERPRET={int(_INTERPRETED)}: tests/{away} is collected by another run"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Triton reads TRITON_INTERPRET once, so both ways cannot share a process.

    On a device the tests of tests/interpreted run compiled.
    """
    if config.getoption("--device") == "cuda":
        return None
    away = _HERE / ("compiled" if _INTERPRETED else "interpreted")
    return True if collection_path == away else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unwanted = set()
    if config.getoption("--device") == "cpu":
        unwanted.add("gpu")
    if not config.getoption("-m"):
        unwanted.add("long")
    dropped = [item for item in items if any(item.get_closest_marker(mark) for mark in unwanted)]
    _without_device.extend(item.nodeid for item in dropped if item.get_closest_marker("gpu"))
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in set(dropped)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _skipped and session.config.getoption("--forbid-skips"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if _without_device:
        terminalreporter.line(
            f"{len(_without_device)} tests need a GPU and DID NOT RUN; --device cuda runs them"
        )
    if _skipped and config.getoption("--forbid-skips"):
        terminalreporter.section("skipped, which this run forbids")
        for nodeid in _skipped:
            terminalreporter.line(nodeid)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """The device under test: `cpu`, or the first CUDA device with `--device cuda`."""
    return torch.device("cuda:0" if pytestconfig.getoption("--device") == "cuda" else "cpu")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the run when a process, socket or entry of /dev/shm outlives the tests."""
    before = take_snapshot()
    yield
    folders = {item.path.parent.name for item in request.session.items}
    engines_ran = bool(folders & {"engine", "lmcache"})
    found = find_leftovers(before, _TOKEN, foreign_shm=() if engines_ran else SHM_OF_ENGINES)
    if found:
        pytest.fail("the tests left behind:\n" + "\n".join(found), pytrace=False)
