"""`hma-triton bench gpu`: everything that needs a device, in one command of under 8 minutes.

Needs torch, triton, numpy and msgspec, and cuda-bindings, which torch's CUDA builds bring along;
also runs as `python -m hma_triton.cli.bench_gpu` where typer is not installed. Every stage is a
process of its own, so that one that dies or hangs takes nothing else with it.

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
from hma_triton.cli.gpu_stage import StageContext, StageReport
from hma_triton.errors import HmaError

OK, WRONG, NO_GPU = 0, 1, 3
# left to a stage to write its report after its own deadline
_GRACE_SECONDS = 8.0


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run: what it does, and the most seconds it takes."""

    name: str
    function: str
    seconds: int
    what: str

    def load(self) -> Callable[[StageContext], StageReport]:
        """Its function, imported only in the process that runs it."""
        module, _, name = self.function.partition(":")
        found: Callable[[StageContext], StageReport] = getattr(
            import_module(f"hma_triton.cli.{module}"), name
        )
        return found


STAGES = (
    Stage("machine", "gpu_other:run_machine", 25, "device, driver, versions, NUMA node"),
    Stage("correctness", "gpu_correctness:run", 130, "every geometry by every path, bit for bit"),
    Stage("ipc", "gpu_ipc:run", 50, "two processes over IPC with events; a new thread, a kill"),
    Stage("ceilings", "gpu_speed:run_ceilings", 25, "copy engine, device copy and gather, reads"),
    Stage("requests", "gpu_speed:run_requests", 45, "requests of 512 MiB by every path"),
    Stage("paths", "gpu_speed:run_paths", 65, "every path, runs of 1 KiB to 4 MiB, 1 to 4096"),
    Stage("beside", "gpu_speed:run_beside", 30, "a matrix product beside the copy"),
    Stage("tune", "gpu_other:run_tune", 45, "launch configs for this device"),
    Stage("tests", "gpu_other:run_tests", 55, "the test suite on the device"),
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
        f"paths: {len(cells)} pairs of run length and count, by 3 paths and the one chosen, both "
        "directions",
        f"requests: {len(gpu_speed.REQUEST_RUNS)} run lengths over {gpu_speed.REQUEST_ROWS} layers",
        f"beside: program budgets {', '.join(map(str, gpu_speed.CAPS))}, staged and dma",
    ]
    return lines


def run_stage(stage: Stage, context: StageContext) -> dict[str, Any]:
    """Run a stage in this process; an error that it names is an outcome, not an end."""
    started = time.monotonic()
    try:
        report = stage.load()(context)
    except (HmaError, RuntimeError, OSError, ImportError) as error:
        report = StageReport(ok=False, lines=[f"{type(error).__name__}: {error}"])
    return {**asdict(report), "seconds": round(time.monotonic() - started, 2)}


def _run_apart(stage: Stage, device: int, out: Path) -> dict[str, Any]:
    """Run a stage in a process of its own; its death or its lateness is its outcome."""
    answer = out / f".{stage.name}.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hma_triton.cli.bench_gpu", "--stage", stage.name]
    command += ["--device", str(device), "--out", str(out)]
    started = time.monotonic()
    # a session of its own, so that what the stage started can be ended with it
    process = subprocess.Popen(command, start_new_session=True)
    try:
        why = f"the process ended with status {process.wait(stage.seconds)}"
    except subprocess.TimeoutExpired:
        why = f"it ran past its {stage.seconds} s and was ended"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if answer.exists():
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        answer.unlink()
        return found
    seconds = round(time.monotonic() - started, 2)
    return {**asdict(StageReport(ok=False, lines=[why])), "seconds": seconds}


def run_all(device: int, out: Path, wanted: Sequence[str]) -> int:
    """Run the stages, write `bench-gpu.json` and plots into `out`, print the table."""
    out.mkdir(parents=True, exist_ok=True)
    stages: dict[str, dict[str, Any]] = {}
    for stage in STAGES:
        if stage.name not in wanted:
            continue
        print(f"[{stage.name}] {stage.what}, at most {stage.seconds} s", flush=True)
        stages[stage.name] = _run_apart(stage, device, out)
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
    deadline = time.monotonic() + stage.seconds - _GRACE_SECONDS
    found = run_stage(stage, StageContext(options.device, deadline, str(options.out)))
    (options.out / f".{stage.name}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    app()
