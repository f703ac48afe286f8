"""Stages `ceilings`, `paths`, `requests` and `beside`: how fast the link is, and how close we come.

Times are wall times from the call to the end of the copy, as a request sees them: medians.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hma_triton.cli.gpu_stage import StageContext, StageReport, median_seconds
from hma_triton.cuda_driver import CudaDriver
from hma_triton.host_memory import HostMemory, PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.triton_copier import TritonCopier

KIB, MIB = 1 << 10, 1 << 20
RUN_SIZES = (1 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB)
COUNTS = (1, 4, 16, 64, 256, 1024, 4096)
CELL_BYTES = 1 << 30
REQUEST_BYTES = 512 * MIB
REQUEST_RUNS = (4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, 1 * MIB)
REQUEST_ROWS = 32
CAPS = (4, 8, 16, 32, 64, 132)
_CEILING_BYTES = 512 * MIB
_REPEATS = 5
_MATRIX = 8192
_PRODUCTS = 10
# most copies that are posted one by one
_PLAIN_COPIES = 4096


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured copy."""

    stage: str
    path: str
    direction: str
    run_bytes: int
    count: int
    nbytes: int
    seconds: float
    taken: str

    @property
    def gigabytes_per_second(self) -> float:
        """Payload over the median."""
        return self.nbytes / self.seconds / 1e9

    def row(self) -> dict[str, Any]:
        """For the JSON."""
        return {
            "stage": self.stage,
            "path": self.path,
            "direction": self.direction,
            "run_bytes": self.run_bytes,
            "count": self.count,
            "nbytes": self.nbytes,
            "us": round(self.seconds * 1e6, 2),
            "gb_s": round(self.gigabytes_per_second, 3),
            "taken": self.taken,
        }


class Bench:
    """A pool on the device and as much pinned host memory, used by every cell in turn."""

    def __init__(self, context: StageContext, nbytes: int) -> None:
        self.driver = context.driver()
        self.device = context.device
        torch.cuda.set_device(self.device)
        self.pool = torch.zeros(2 * nbytes, dtype=torch.uint8, device=self.device)
        self.memory = HostMemory(nbytes)
        self.pinned = PinnedHost(self.driver, self.memory.address, self.memory.pieces)
        self.stream = self.driver.create_stream()

    def copier(self, path: Path | None, program_cap: int | None = None) -> DeviceCopier:
        """A copier of its own; close it."""
        kernel = TritonCopier(self.device, program_cap=program_cap)
        settings = DeviceSettings(path, program_cap=program_cap)
        return DeviceCopier(self.device, self.pinned, kernel=kernel, settings=settings)

    def job(self, run_bytes: int, count: int, rows: int = 1) -> CopyJob:
        """`count` pages in `rows` rows, every second block of the pool, in random order.

        No two runs can be joined, so a cell measures what its run length says. Objects hold 16
        blocks, `[row][block]`, as those of pools with a tensor for each layer.
        """
        per_object = min(16, count)
        num_blocks = 2 * count
        spec = CopySpec(
            kernel_group_index=0,
            row_addresses=tuple(
                self.pool.data_ptr() + row * num_blocks * run_bytes for row in range(rows)
            ),
            block_stride_bytes=run_bytes,
            num_blocks=num_blocks,
            region_offset_bytes=0,
            object_row_stride_bytes=per_object * run_bytes,
            object_block_stride_bytes=run_bytes,
            blocks_per_object=per_object,
            n0=1,
            pool_stride0_bytes=run_bytes,
            object_stride0_bytes=run_bytes,
            n1=1,
            pool_stride1_bytes=run_bytes,
            object_stride1_bytes=run_bytes,
            run_bytes=run_bytes,
        )
        ids = 2 * np.random.default_rng(0).permutation(count).astype(np.int64)
        items = np.arange(count, dtype=np.int64)
        places = items // per_object * (rows * per_object * run_bytes)
        places += items % per_object * run_bytes
        return CopyJob(spec, ids, places + self.memory.address)

    def time(self, copier: DeviceCopier, direction: Direction, job: CopyJob) -> tuple[float, str]:
        """Median seconds and the path taken."""
        taken = ""

        def run() -> None:
            nonlocal taken
            pending = copier.start(direction, (job,))
            pending.synchronize()
            taken = pending.backend

        return median_seconds(run, _REPEATS), taken

    def wait(self, stream: int) -> None:
        """Until the work on `stream` is done."""
        event = self.driver.create_event()
        self.driver.record_event(event, stream)
        while not self.driver.query_event(event):
            time.sleep(0)
        self.driver.destroy_event(event)

    def close(self) -> None:
        """Release everything."""
        self.driver.destroy_stream(self.stream)
        self.pinned.close()
        self.memory.close()


def engine_seconds(driver: CudaDriver, bench: Bench, moves: list[tuple[int, int, int]]) -> float:
    """Median seconds of copies by the copy engine, each on a stream of its own."""
    streams = [driver.create_stream() for _ in moves]

    def run() -> None:
        for stream, (target, source, nbytes) in zip(streams, moves, strict=True):
            driver.copy_async(target, source, nbytes, stream)
        for stream in streams:
            bench.wait(stream)

    seconds = median_seconds(run, _REPEATS)
    for stream in streams:
        driver.destroy_stream(stream)
    return seconds


def run_ceilings(context: StageContext) -> StageReport:
    """The copy engine both ways and together, the device's own copy and gather, kernel reads."""
    bench = Bench(context, 2 * _CEILING_BYTES)
    host, pool, size = bench.memory.address, bench.pool.data_ptr(), _CEILING_BYTES
    store, retrieve = (host, pool, size), (pool + size, host + size, size)
    rates = {
        "engine_store": size / engine_seconds(bench.driver, bench, [store]),
        "engine_retrieve": size / engine_seconds(bench.driver, bench, [retrieve]),
        "engine_both": 2 * size / engine_seconds(bench.driver, bench, [store, retrieve]),
        "device_copy": size / _device_copy_seconds(bench, size),
        "device_gather": size / _gather_seconds(bench, size),
    }
    copier = bench.copier(Path.ZERO_COPY)
    job = bench.job(64 * KIB, size // (64 * KIB))
    copier.prepare((job.spec,))
    for direction, name in ((Direction.STORE, "kernel_store"), (Direction.RETRIEVE, "kernel_read")):
        rates[name] = size / bench.time(copier, direction, job)[0]
    copier.close()
    bench.close()
    report = StageReport(data={name: round(rate / 1e9, 3) for name, rate in rates.items()})
    report.lines.append(
        "GB/s: " + ", ".join(f"{name} {rate / 1e9:.1f}" for name, rate in rates.items())
    )
    return report


def _device_copy_seconds(bench: Bench, size: int) -> float:
    source, target = bench.pool[:size], bench.pool[size : 2 * size]

    def run() -> None:
        target.copy_(source)
        bench.wait(torch.cuda.current_stream(bench.device).cuda_stream)

    return median_seconds(run, _REPEATS)


def _gather_seconds(bench: Bench, size: int) -> float:
    """The kernel from the pool into device memory, as the staged path uses it, without a cap."""
    kernel = TritonCopier(bench.device, program_cap=4096)
    job = bench.job(16 * KIB, size // (16 * KIB))
    target = torch.empty(size, dtype=torch.uint8, device=bench.device)
    places = job.object_addresses - bench.memory.address + target.data_ptr()
    kernel.prepare((job.spec,))

    def run() -> None:
        kernel.enqueue(job.spec, Direction.STORE, job.block_ids, places, bench.stream)
        bench.wait(bench.stream)

    seconds = median_seconds(run, _REPEATS)
    kernel.close()
    return seconds


def run_paths(context: StageContext) -> StageReport:
    """Every path over run lengths and counts, and the one that is chosen by itself."""
    bench = Bench(context, CELL_BYTES)
    report = StageReport()
    cells: list[Cell] = []
    left = 0
    for run_bytes in RUN_SIZES:
        for count in COUNTS:
            if run_bytes * count > CELL_BYTES:
                report.missing.append(f"{count} runs of {run_bytes} bytes: over {CELL_BYTES} bytes")
                continue
            if context.seconds_left < 5:
                left += 1
                continue
            cells += _cells(bench, "paths", bench.job(run_bytes, count), report)
        report.data["cells"] = [cell.row() for cell in cells]
        context.keep(report)
    bench.close()
    if left:
        report.missing.append(f"{left} combinations of run length and count: no time left")
    report.lines.append(f"{len(cells)} cells of path, direction, run length and count")
    return report


def run_requests(context: StageContext) -> StageReport:
    """Requests of 512 MiB over 32 layers: what the marks are about."""
    bench = Bench(context, REQUEST_BYTES)
    report = StageReport()
    cells: list[Cell] = []
    for run_bytes in REQUEST_RUNS:
        if context.seconds_left < 10:
            report.missing.append(f"requests with runs of {run_bytes} bytes: no time left")
            continue
        count = REQUEST_BYTES // REQUEST_ROWS // run_bytes
        cells += _cells(bench, "requests", bench.job(run_bytes, count, REQUEST_ROWS), report)
        report.data["cells"] = [cell.row() for cell in cells]
        context.keep(report)
    bench.close()
    for direction in Direction:
        name = direction.name.lower()
        best = [
            max(
                (c for c in cells if (c.run_bytes, c.direction) == (size, name)),
                key=lambda c: c.gigabytes_per_second,
                default=None,
            )
            for size in REQUEST_RUNS
        ]
        report.lines.append(
            f"{name}, best path GB/s: "
            + ", ".join(
                f"{c.run_bytes // KIB}K {c.gigabytes_per_second:.1f} ({c.path})" for c in best if c
            )
        )
    return report


def _cells(bench: Bench, stage: str, job: CopyJob, report: StageReport) -> list[Cell]:
    cells = []
    spec = job.spec
    runs = job.block_ids.shape[0] * spec.num_rows
    for path in (*Path, None):
        if path is Path.DMA and runs > _PLAIN_COPIES and not bench.driver.supports_batch:
            report.missing.append(f"{runs} runs of {spec.run_bytes} bytes by dma: no batch call")
            continue
        copier = bench.copier(path)
        copier.prepare((spec,))
        for direction in Direction:
            seconds, taken = bench.time(copier, direction, job)
            cells.append(
                Cell(
                    stage=stage,
                    path=path.value if path else "auto",
                    direction=direction.name.lower(),
                    run_bytes=spec.run_bytes,
                    count=runs,
                    nbytes=job.block_ids.shape[0] * spec.block_bytes,
                    seconds=seconds,
                    taken=taken,
                )
            )
        copier.close()
    return cells


def run_beside(context: StageContext) -> StageReport:
    """A matrix product alone, and with copies beside it, by path and program budget."""
    bench = Bench(context, REQUEST_BYTES)
    report = StageReport()
    matrix = torch.randn(_MATRIX, _MATRIX, device=bench.device, dtype=torch.bfloat16)
    alone = _product_seconds(matrix)
    rows: list[dict[str, Any]] = []
    budgets: list[tuple[Path, int | None]] = [(Path.ZERO_COPY, cap) for cap in CAPS]
    budgets += [(Path.STAGED, None), (Path.DMA, None)]
    for path, cap in budgets:
        if context.seconds_left < 4:
            name = path.value + (f" with {cap} programs" if cap else "")
            report.missing.append(f"a matrix product beside {name}: no time left")
            continue
        run_bytes = 256 * KIB if path is Path.DMA else 16 * KIB
        job = bench.job(run_bytes, REQUEST_BYTES // REQUEST_ROWS // run_bytes, REQUEST_ROWS)
        copier = bench.copier(path, cap)
        copier.prepare((job.spec,))
        for direction in Direction:
            seconds, _ = bench.time(copier, direction, job)
            # more copies than the products take, so that one is always running
            copies = int(4 * _PRODUCTS * alone / seconds) + 4
            pending = [copier.start(direction, (job,)) for _ in range(copies)]
            beside = _product_seconds(matrix)
            for copy in pending:
                copy.synchronize()
            rows.append(
                {
                    "path": path.value,
                    "programs": cap,
                    "direction": direction.name.lower(),
                    "gb_s_alone": round(REQUEST_BYTES / seconds / 1e9, 3),
                    "slowdown": round(beside / alone, 4),
                }
            )
        copier.close()
    bench.close()
    report.data = {"product_ms_alone": round(alone * 1e3, 4), "rows": rows}
    for path, cap in budgets:
        found = [r for r in rows if (r["path"], r["programs"]) == (path.value, cap)]
        text = ", ".join(f"{r['direction']} {r['gb_s_alone']} GB/s x{r['slowdown']}" for r in found)
        report.lines.append(f"{path.value}{f' {cap} programs' if cap else ''}: {text}")
    return report


def _product_seconds(matrix: torch.Tensor) -> float:
    """Seconds of one product, by device events over several."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    matrix @ matrix
    begin.record()
    for _ in range(_PRODUCTS):
        matrix @ matrix
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _PRODUCTS
