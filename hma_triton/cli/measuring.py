"""What all benches share: taking turns, statistics, the environment, and rows in a file."""

from __future__ import annotations

import csv
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hma_triton.errors import ConfigError

Run = Callable[[], None]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Where a row was measured."""

    date: str
    machine: str
    cores: int
    memory_gib: float
    system: str
    python: str
    torch: str
    numpy: str
    numba: str
    lmcache: str
    hma_triton: str


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


def machine_facts() -> MachineFacts:
    """This machine and this process's packages."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        model = named[0] if named else model
    return MachineFacts(
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        machine=model,
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        numba=_version("numba"),
        lmcache=_version("lmcache"),
        hma_triton=_version("hma-triton"),
    )


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float, float]:
    """10th, 50th and 90th percentile, in milliseconds."""
    low, middle, high = np.percentile(np.asarray(seconds) * 1e3, [10, 50, 90])
    return float(low), float(middle), float(high)


def geometric_mean(values: Iterable[float]) -> float:
    """Geometric mean of positive numbers; nan of none."""
    logs = np.log(np.fromiter(values, dtype=np.float64))
    return float(np.exp(logs.mean())) if logs.size else float("nan")


def take_turns(runs: Mapping[str, Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, after one unmeasured; in turn, so that what disturbs one disturbs all.

    torch's number of threads is afterwards what it was.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    threads = torch.get_num_threads()
    try:
        for run in runs.values():
            run()
        for _ in range(repeats):
            for name, run in runs.items():
                started = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return seconds


def write_csv(path: Path, row_type: type[Any], rows: Sequence[Any], facts: MachineFacts) -> None:
    """Write `rows` of the dataclass `row_type`, each with `facts`; replaces a file that is there.

    Raises:
        ConfigError: the file cannot be written.
    """
    names = [field.name for field in (*fields(row_type), *fields(MachineFacts))]
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                writer.writerow({**asdict(row), **asdict(facts)})
    except OSError as error:
        raise ConfigError(f"rows cannot be written to {path}: {error.strerror}") from error
