"""Rows of `bench copy`: one measured direction of one kernel group, with its environment."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from hma_triton.errors import ConfigError

ALL_GROUPS = "all"
OURS = "hma-triton"
PLAIN = "memcpy"
LMCACHE = "lmcache"


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


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Times of one copy. `method` is what moved the bytes; percentiles are over `repeats`.

    `share_of_memcpy` and `times_lmcache` compare medians of the same interleaved run: our speed
    over the other's. None where the other was not measured.
    """

    case: str
    kernel_group: str
    format: str
    object_layout: str
    direction: str
    method: str
    implementation: str
    threads: int
    tokens: int
    blocks: int
    nbytes: int
    page_bytes: int
    runs_per_page: int
    run_bytes: int
    repeats: int
    p10_ms: float
    p50_ms: float
    p90_ms: float
    gb_per_s: float
    share_of_memcpy: float | None
    times_lmcache: float | None


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


def write_csv(path: Path, rows: Sequence[CopyRow], facts: MachineFacts) -> None:
    """Write `rows`, each with `facts`; a file that is there is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    names = [field.name for field in (*fields(CopyRow), *fields(MachineFacts))]
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            for row in rows:
                writer.writerow({**asdict(row), **asdict(facts)})
    except OSError as error:
        raise ConfigError(f"rows cannot be written to {path}: {error.strerror}") from error
