"""Path `dma`: contiguous runs posted to the copy engine, joined first."""

from __future__ import annotations

from hma_triton.cuda_driver import CudaDriver
from hma_triton.host_memory import DeviceView
from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.runs import Items, Runs, expand


def post_runs(
    driver: CudaDriver, runs: Runs, direction: Direction, stream: int, batched: bool
) -> None:
    """Enqueue `runs` on `stream`; returns without waiting for them.

    `batched` only where every object is pinned: the batch call promises nothing for others.
    """
    pool, objects, sizes = runs.pool.tolist(), runs.objects.tolist(), runs.nbytes.tolist()
    targets, sources = (objects, pool) if direction is Direction.STORE else (pool, objects)
    if batched and len(sizes) > 1:
        driver.copy_batch_async(targets, sources, sizes, stream)
        return
    for target, source, nbytes in zip(targets, sources, sizes, strict=True):
        driver.copy_async(target, source, nbytes, stream)


def enqueue_dma(
    driver: CudaDriver,
    spec: CopySpec,
    direction: Direction,
    items: Items,
    view: DeviceView,
    stream: int,
    batched: bool,
) -> int:
    """Enqueue the copies of joined `items` on `stream`; how many were posted."""
    runs = expand(spec, items, view)
    post_runs(driver, runs, direction, stream, batched)
    return len(runs)
