"""`hma-triton bench gpu`: everything that needs a device, in one command of under 8 minutes.

Needs torch, triton, numpy and msgspec; runs as `python -m hma_triton.cli.bench_gpu` where typer is
not installed. What needs more is left out by name: two processes need cuda-bindings, the tests
pytest too, the plots matplotlib. Every stage is a process of its own, so that one that dies or
hangs takes nothing else with it.

Exit status: 0 everything that ran was right; 1 something was wrong; 2 bad usage; 3 no GPU to use.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from hma_triton.cli.gpu_report import marks, plot, table
from hma_triton.cli.gpu_stage import StageContext, StageReport, answer_path, write_answer
from hma_triton.errors import HmaError

OK, WRONG, NO_GPU = 0, 1, 3
# left to a stage to write its report after its own deadline
_GRACE_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run: what it does, and the most seconds it takes.

    `checks`: it says right or wrong, so that not finishing is not right.
    """

    name: str
    function: str
    seconds: int
    what: str
    checks: bool = False

    def load(self) -> Callable[[StageContext], StageReport]:
        """Its function, imported only in the process that runs it."""
        module, _, name = self.function.partition(":")
        found: Callable[[StageContext], StageReport] = getattr(
            import_module(f"hma_triton.cli.{module}"), name
        )
        return found


STAGES = (
    Stage("machine", "gpu_other:run_machine", 25, "device, driver, versions, NUMA node", True),
    Stage("correctness", "gpu_correctness:run", 130, "every geometry by every path, bitwise", True),
    Stage("ipc", "gpu_ipc:run", 50, "two processes over IPC with events; a kill", True),
    Stage("ceilings", "gpu_speed:run_ceilings", 25, "copy engine, device copy and gather, reads"),
    Stage("requests", "gpu_speed:run_requests", 45, "requests of 512 MiB by every path"),
    Stage("paths", "gpu_speed:run_paths", 65, "every path, runs of 1 KiB to 4 MiB, 1 to 4096"),
    Stage("beside", "gpu_speed:run_beside", 30, "a matrix product beside the copy"),
    Stage("tune", "gpu_other:run_tune", 45, "launch configs for this device"),
    # last: it also has what the others leave
    Stage("tests", "gpu_other:run_tests", 55, "the test suite on the device", True),
)


def plan_lines() -> list[str]:
    """What a run would do, from what this machine can work out without a device."""
    from hma_triton.cli import gpu_correctness, gpu_speed

    total = sum(stage.seconds for stage in STAGES)
    lines = [f"at most {total} s in {len(STAGES)} stages, each a process of its own:"]
    lines += [f"  {stage.name:12} {stage.seconds:4} s  {stage.what}" for stage in STAGES]
    cases, refused, pool_bytes = gpu_correctness.cases(), [], 0
    for case in cases:
        try:
            pool_bytes += gpu_correctness.make_request(case).pool_bytes
        except HmaError:
            refused.append(f"{case.model}/{case.variant}")
    served = len(cases) - len(refused)
    lines += [
        f"correctness: {served} cases (model, variant, object layout) by 3 paths, stores and "
        f"retrieves, {pool_bytes / 1e9:.1f} GB of pools; {len(set(refused))} variants are refused "
        f"by name: {', '.join(dict.fromkeys(refused))}",
    ]
    cells = [
        (size, count)
        for size in gpu_speed.RUN_SIZES
        for count in gpu_speed.COUNTS
        if size * count <= gpu_speed.CELL_BYTES
    ]
    lines += [
        f"paths: {len(cells)} pairs of run length and count (those up to {gpu_speed.CELL_BYTES} "
        "bytes), by 3 paths and the one chosen, both directions",
        f"requests: {len(gpu_speed.REQUEST_RUNS)} run lengths over {gpu_speed.REQUEST_ROWS} layers",
        f"beside: program budgets {', '.join(map(str, gpu_speed.CAPS))}, staged and dma",
    ]
    return lines


def run_stage(stage: Stage, context: StageContext) -> dict[str, Any]:
    """Run a stage in this process; an error that it names is an outcome, not an end."""
    try:
        report = stage.load()(context)
    except (HmaError, RuntimeError, OSError, EOFError, ImportError) as error:
        report = StageReport(ok=False, lines=[f"{type(error).__name__}: {error}"])
    return asdict(report)


def _run_apart(stage: Stage, device: int, out: Path, seconds: float) -> dict[str, Any]:
    """Run a stage in a process of its own; its death or its lateness is its outcome."""
    answer = answer_path(out, stage.name)
    answer.unlink(missing_ok=True)
    started = time.monotonic()
    command = [sys.executable, "-m", "hma_triton.cli.bench_gpu", "--stage", stage.name]
    command += ["--device", str(device), "--out", str(out)]
    command += ["--until", str(started + seconds - _GRACE_SECONDS)]
    # a session of its own, so that what the stage started can be ended with it
    process = subprocess.Popen(command, start_new_session=True)
    why, late = "", False
    try:
        status = process.wait(seconds)
        if status:
            why = f"the process ended with status {status}"
    except subprocess.TimeoutExpired:
        why, late = f"did not finish: ran past its {seconds:.0f} s and was ended", True
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Any] = asdict(StageReport())
    if answer.exists():
        found |= json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
    elif not why:
        why = "the process ended without an answer"
    if why:
        found["lines"].append(why)
        if stage.checks or not late:
            found["ok"] = False
    found["seconds"] = round(time.monotonic() - started, 2)
    return found


def run_all(device: int, out: Path, wanted: Sequence[str]) -> int:
    """Run the stages, write `bench-gpu.json` and plots into `out`, print the table."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + sum(stage.seconds for stage in STAGES)
    stages: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        if stage.name not in wanted:
            continue
        seconds = float(stage.seconds)
        if stage is STAGES[-1]:
            seconds = max(seconds, end - time.monotonic())
        print(f"[{stage.name}] {stage.what}, at most {seconds:.0f} s", flush=True)
        stages[stage.name] = _run_apart(stage, device, out, seconds)
        if stage.name == "machine" and stages[stage.name]["ok"] is False:
            print("\n".join(stages[stage.name]["lines"]))
            print("no GPU that can be used: nothing was run")
            return NO_GPU
    try:
        pictures = plot(stages, out)
    except ImportError:
        pictures = []
        print("no plots: matplotlib is not installed")
    document = {"stages": stages, "marks": marks(stages), "plots": pictures}
    path = out / "bench-gpu.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print("\n".join(table(stages)))
    print(f"written: {path}")
    return WRONG if any(stage["ok"] is False for stage in stages.values()) else OK


def _parser(prog_name: str) -> argparse.ArgumentParser:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog=prog_name, description="Check and measure everything on one GPU, in under 8 minutes."
    )
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--out", type=Path, default=Path("bench-gpu"), help="folder of results")
    parser.add_argument("--dry-run", action="store_true", help="say what would run; needs no GPU")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="stages to run")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    return parser


def app(args: Sequence[str] | None = None, prog_name: str = "hma-triton bench gpu") -> None:
    """The command; ends the process with its exit status."""
    options = _parser(prog_name).parse_args(args)
    if options.dry_run:
        print("\n".join(plan_lines()))
        sys.exit(OK)
    if options.stage is None:
        # without the machine's stage nobody knows whether there is a device
        sys.exit(run_all(options.device, options.out, ["machine", *options.only]))
    stage = next(stage for stage in STAGES if stage.name == options.stage)
    deadline = options.until or time.monotonic() + stage.seconds - _GRACE_SECONDS
    context = StageContext(options.device, deadline, str(options.out), stage.name)
    write_answer(answer_path(options.out, stage.name), run_stage(stage, context))


if __name__ == "__main__":
    app()
