"""Runs the stages of the test command, two at a time, and prints the output of each as it ends.

`stages.py [NAME...]` runs all stages, or those named. The last line counts the tests of all stages.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.leftovers import find_leftovers, take_snapshot  # noqa: E402

# Every pytest session looks for its own; here, what is left when all have ended.
_NO_SESSION = "none"
LOGS = ROOT / "build" / "stages"
LANES = 2
FAREWELL_S = 20
PYTEST = ("-m", "pytest", "-q", "--forbid-skips", "--durations=5", "-p", "no:cacheprovider")
HOUSE = ("tests/test_floors.py", "tests/test_structures.py")
# Real engines: no look-ups in a hub, no usage reports.
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class Stage:
    """One command of the environment's python, with what it adds to the process environment."""

    name: str
    args: tuple[str, ...]
    limit_s: int
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a stage ended: its exit status, seconds, and the tests that passed and did not."""

    name: str
    status: int
    seconds: float
    passed: int
    failed: int


# Longest first: the engines take one lane, nearly everything else the other.
STAGES = (
    Stage("engine", (*PYTEST, "tests/engine"), 1500, OFFLINE),
    Stage("ruff", ("-m", "ruff", "check"), 60),
    Stage("format", ("-m", "ruff", "format", "--check"), 60),
    Stage("mypy", ("-m", "mypy"), 300),
    Stage("unit", (*PYTEST, "tests/unit", *HOUSE), 900),
    # The measuring suites as plain tests, so that they do not rot.
    Stage("bench", ("-m", "pytest", "-q", "bench", "--benchmark-disable"), 300),
    # Those that need a device are collected, and deselected where there is none.
    Stage("kernels", (*PYTEST, "tests/kernels", "tests/gpu"), 600),
    Stage("interpreted", (*PYTEST, "tests/interpreted"), 600, {"TRITON_INTERPRET": "1"}),
    Stage("compiled", (*PYTEST, "tests/compiled"), 600),
    Stage("server", (*PYTEST, "tests/server"), 1200),
    Stage("lmcache", (*PYTEST, "tests/lmcache"), 1200, OFFLINE),
)


class Runner:
    """Takes stages off one list from several threads and says what happens, one stage at a time."""

    def __init__(self, stages: list[Stage]) -> None:
        self._waiting = list(stages)
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._began = time.monotonic()
        self.outcomes: list[Outcome] = []

    def run(self) -> None:
        """Returns when every stage has ended."""
        lanes = [threading.Thread(target=self._lane) for _ in range(LANES)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()

    def stop(self) -> None:
        """Ends what runs and drops what waits."""
        self._waiting.clear()
        for process in list(self._running):
            _end(process)

    def _lane(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                stage = self._waiting.pop(0)
            self._say(f"{stage.name}: started")
            outcome, output = self._one(stage)
            with self._lock:
                self.outcomes.append(outcome)
            word = "passed" if outcome.status == 0 else f"FAILED (exit status {outcome.status})"
            self._say(f"{stage.name}: {word} in {outcome.seconds:.0f} s", output)

    def _one(self, stage: Stage) -> tuple[Outcome, str]:
        log = LOGS / f"{stage.name}.log"
        began = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *stage.args],
                cwd=ROOT,
                env=os.environ | stage.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                status = process.wait(stage.limit_s)
            except subprocess.TimeoutExpired:
                _end(process)
                out.write(f"\nstopped: over its limit of {stage.limit_s} s\n".encode())
                status = 124
            self._running.discard(process)
        output = log.read_text(errors="replace")
        passed, failed = _counts(output)
        return Outcome(stage.name, status, time.monotonic() - began, passed, failed), output

    def _say(self, line: str, body: str = "") -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._began:5.0f} s] {line}", flush=True)
            if body:
                print(body.rstrip(), end="\n\n", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Lets pytest say what it has seen, then ends it and all that it started."""
    try:
        process.send_signal(signal.SIGINT)
        process.wait(FAREWELL_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _counts(output: str) -> tuple[int, int]:
    """(passed, failed or in error) of pytest's closing line; zeros where there is none."""
    closing = re.findall(
        r"^.*\b\d+ (?:passed|failed|errors?)\b.* in [\d.]+s.*$", output, re.MULTILINE
    )
    if not closing:
        return 0, 0
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", closing[-1])}
    return found.get("passed", 0), found.get("failed", 0) + found.get("error", 0)


def main(names: list[str]) -> int:
    """Runs the stages named, all where none is; 0 when every one passed and nothing was left."""
    unknown = set(names) - {stage.name for stage in STAGES}
    if unknown:
        known = ", ".join(stage.name for stage in STAGES)
        print(f"no such stage: {', '.join(sorted(unknown))}; there are {known}", file=sys.stderr)
        return 2
    LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hma-s-") as folder:
        # Temporary files of this run alone; pytest's own stay where they can be looked at.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        return _run_all([stage for stage in STAGES if not names or stage.name in names])


def _run_all(stages: list[Stage]) -> int:
    before = take_snapshot()
    runner = Runner(stages)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        runner.run()
    finally:
        runner.stop()
    left = find_leftovers(before, _NO_SESSION)
    outcomes = {outcome.name: outcome for outcome in runner.outcomes}
    for stage in stages:
        outcome = outcomes[stage.name]
        word = "passed" if outcome.status == 0 else "FAILED"
        print(f"{stage.name:12} {word}  {outcome.seconds:6.1f} s  {outcome.passed:6} tests passed")
    for what in left:
        print(f"left behind: {what}")
    print(f"all stages in {time.monotonic() - began:.0f} s")
    passed = sum(outcome.passed for outcome in runner.outcomes)
    failed = sum(outcome.failed for outcome in runner.outcomes)
    print(f"{passed} passed, {failed} failed", flush=True)
    return int(bool(left) or any(outcome.status for outcome in runner.outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
