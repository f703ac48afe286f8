"""Path `dma`: contiguous runs posted to the copy engine, joined first."""

from __future__ import annotations

from hma_triton.cuda_driver import CudaDriver
from hma_triton.host_memory import DeviceView
from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.runs import Items, Runs, expand


def post_runs(driver: CudaDriver, runs: Runs, direction: Direction, stream: int) -> None:
    """Enqueue `runs` on `stream`; returns without waiting for them."""
    pool, objects, sizes = runs.pool.tolist(), runs.objects.tolist(), runs.nbytes.tolist()
    targets, sources = (objects, pool) if direction is Direction.STORE else (pool, objects)
    if len(sizes) == 1:
        driver.copy_async(targets[0], sources[0], sizes[0], stream)
    elif sizes:
        driver.copy_batch_async(targets, sources, sizes, stream)


def enqueue_dma(
    driver: CudaDriver,
    spec: CopySpec,
    direction: Direction,
    items: Items,
    view: DeviceView,
    stream: int,
) -> int:
    """Enqueue the copies of joined `items` on `stream`; how many were posted."""
    runs = expand(spec, items, view)
    post_runs(driver, runs, direction, stream)
    return len(runs)
