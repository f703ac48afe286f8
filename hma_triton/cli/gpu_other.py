"""Stages `machine`, `tune` and `tests` of `bench gpu`."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hma_triton.autotune import (
    Recording,
    candidates,
    decide,
    measure,
    path_candidates,
    write_recording,
)
from hma_triton.autotune_scratch import ScratchSampler
from hma_triton.cli.gpu_stage import StageContext, StageReport
from hma_triton.cuda_driver import has_bindings
from hma_triton.geometries.scratch_copies import scratch_copies
from hma_triton.host_memory import available_bytes, device_numa_node
from hma_triton.kernels.addressing import ObjectLayout
from hma_triton.kernels.launch_environment import environment
from hma_triton.tuning import KernelConfig, TuneKey, TuneTable, write_values

_TUNE_MODEL = "gemma-3-27b"
_TUNE_BYTES = 128 << 20
_ROUNDS = 7
_PACKAGES = ("numpy", "msgspec", "cuda-bindings", "pytest", "hypothesis", "matplotlib", "numba")
_ROOT = Path(__file__).parents[2]


class _TimeIsUp(Exception):
    """A stage's deadline came in the middle of a measurement."""


def run_machine(context: StageContext) -> StageReport:
    """What this machine is."""
    driver = context.driver()
    info = driver.device_info()
    node = device_numa_node(info.pci_bus_id)
    packages: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    report = StageReport(
        data={
            "device": asdict(info),
            "driver_cuda": driver.driver_version(),
            "batched_copies": driver.supports_batch,
            "numa_node": node,
            "host_bytes": available_bytes(),
            "torch": torch.__version__,
            "triton": version("triton"),
            "python": platform.python_version(),
            "packages": packages,
        }
    )
    report.lines.append(
        f"{info.name} ({info.architecture}, {info.multiprocessors} multiprocessors), driver for "
        f"CUDA {driver.driver_version()}, torch {torch.__version__}, triton {version('triton')}, "
        f"NUMA node {'unknown' if node is None else node}"
    )
    if not has_bindings():
        report.missing.append(
            "pools of other processes and batched copies: cuda-bindings is not installed, torch's "
            "own calls are used, and path dma posts each copy from Python"
        )
    elif not driver.supports_batch:
        report.missing.append("batched copies: the driver has no batch call, plain ones are used")
    return report


def run_tune(context: StageContext) -> StageReport:
    """Launch configs for the pages of one model; written beside the JSON, not into the package."""
    report = StageReport()
    copies = scratch_copies(_TUNE_MODEL, "main", ObjectLayout.OPAQUE, (_TUNE_BYTES,))
    sampler = ScratchSampler(context.device, copies)
    where = environment(context.device)
    out = Path(context.out)
    table = TuneTable(where)
    warp = torch.cuda.get_device_properties(context.device).warp_size

    def configs(key: TuneKey) -> Sequence[KernelConfig]:
        current = table.lookup(key)
        others = path_candidates(current, copies[key].other_paths)
        return [current, *candidates(key.word_bytes, warp), *others]

    def sample(key: TuneKey, config: KernelConfig) -> float:
        if context.seconds_left < 2:
            raise _TimeIsUp
        return sampler(key, config)

    found = []
    for key, copy in copies.items():
        nbytes = {key: copy.num_blocks * copy.spec.block_bytes}
        try:
            found += list(measure(nbytes, configs, sample, _ROUNDS))
        except _TimeIsUp:
            report.missing.append(f"tuning {key}: no time left")
    sampler.close()
    write_recording(Recording(where, tuple(found)), out / "tune-recording.json")
    choices = decide(found, table.lookup)
    folder = out / "autotune_configs"
    folder.mkdir(exist_ok=True)
    if choices:
        values = [choice.tuned_value(where) for choice in choices]
        report.data["file"] = write_values(values, where, folder).name
    report.data["choices"] = [asdict(choice) for choice in choices]
    for choice in choices:
        report.lines.append(
            f"{choice.key.direction}, runs of {choice.key.run_bytes}: {choice.config.path}, "
            f"{choice.config.tile_words} words, {choice.config.warps} warps, "
            f"{choice.config.program_cap} programs: {choice.gigabytes_per_second:.1f} GB/s "
            f"({choice.reason})"
        )
    return report


def run_tests(context: StageContext) -> StageReport:
    """The test suite on the device, where its files and its packages are."""
    report = StageReport()
    # the stages that check have run what else is in tests/gpu
    names = ("gpu/test_device_copy.py", "gpu/test_torch_driver.py", "interpreted")
    files = [str(_ROOT / "tests" / name) for name in names]
    lacking = [name for name in ("pytest", "hypothesis") if not importlib.util.find_spec(name)]
    lacking += [] if has_bindings() else ["cuda-bindings"]
    if lacking or not Path(files[0]).exists():
        why = f"without {' and '.join(lacking)}" if lacking else "no tests beside the package"
        report.missing.append(f"the test suite on the device: {why}")
        return report
    log = Path(context.out) / "tests.log"
    command = [sys.executable, "-m", "pytest", *files, "--device", "cuda", "-q", "--tb=short"]
    command += ["-p", "no:cacheprovider", "-o", "timeout=0"]
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                command,
                cwd=_ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=max(5.0, context.seconds_left),
                check=False,
            )
            status: int | None = done.returncode
        except subprocess.TimeoutExpired:
            status = None
    text = log.read_text(encoding="utf-8", errors="replace")
    if status is None:
        passed = len(
            re.findall(r"\.", "".join(re.findall(r"^[.FEsx]+(?= |$)", text, re.MULTILINE)))
        )
        report.missing.append(
            f"the rest of the test suite did not finish: {passed} tests passed, then time was up"
        )
        report.expect(not re.search(r"^[.sx]*[FE]", text, re.MULTILINE), "a test failed: tests.log")
    else:
        report.expect(status == 0, f"pytest ended with status {status}: see tests.log")
        report.lines.append(text.strip().splitlines()[-1] if text.strip() else "no output")
    report.data = {"status": status, "seconds": round(time.monotonic() - started, 1)}
    return report
