"""Which way bytes cross the link: by table, from run length, count, direction and device.

The written table is drawn from what others published (vLLM #42212 and #57555, the LMCache copy-path
document, nvbandwidth #24, ROCm/clr#273, ROCm/rocm-systems#11614); this project has measured none of
it. A value that `hma-triton tune` measured on the device comes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hma_triton.kernels.addressing import Direction


class Path(str, Enum):
    """How a copy is done."""

    # the kernel itself reads or writes mapped host memory
    ZERO_COPY = "zero_copy"
    # the kernel and a device buffer, then the copy engine
    STAGED = "staged"
    # the copy engine on the pages as they lie
    DMA = "dma"


@dataclass(frozen=True, slots=True)
class PathTable:
    """Edges of one kind of device.

    Args:
        dma_run_bytes: joined runs of this length and more go to the copy engine.
        few_runs: at most this many runs go there whatever their length: a launch costs more.
        few_long_runs, long_run_bytes: the same for runs of at least `long_run_bytes`.
        staged_bytes: copies of this size and more are staged, by direction; None for never. Reads
            of host memory by a kernel are slower than its writes.
    """

    dma_run_bytes: int
    few_runs: int
    few_long_runs: int
    long_run_bytes: int
    staged_bytes: tuple[int | None, int | None]

    def staged_from(self, direction: Direction) -> int | None:
        """Bytes from which a copy in `direction` is staged."""
        return self.staged_bytes[int(direction)]


NVIDIA = PathTable(
    dma_run_bytes=32 << 10,
    few_runs=16,
    few_long_runs=64,
    long_run_bytes=16 << 10,
    staged_bytes=(None, 8 << 20),
)
# A submission costs 9 to 13 us there, and the batch call loops inside.
AMD = PathTable(
    dma_run_bytes=1 << 20,
    few_runs=1,
    few_long_runs=4,
    long_run_bytes=256 << 10,
    staged_bytes=(None, None),
)


def path_table(architecture: str) -> PathTable:
    """The written table of `sm_90`, `gfx942`, ..."""
    return AMD if architecture.startswith("gfx") else NVIDIA


@dataclass(frozen=True, slots=True)
class CopyShape:
    """What a choice depends on. `runs` and `run_bytes` count what a copy engine would be given."""

    direction: Direction
    runs: int
    run_bytes: int
    nbytes: int
    # every object address is memory that a kernel on the device can reach
    reachable: bool
    # the object's stretches can be copied whole
    stageable: bool
    # the objects are device memory too: no byte crosses the link
    on_device: bool = False


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A path and why it was taken."""

    path: Path
    reason: str


def choose_path(
    shape: CopyShape, table: PathTable, tuned: str | None = None, forced: Path | None = None
) -> PathChoice:
    """The path of one copy.

    Args:
        tuned: the path of a value measured on this device, None without one.
        forced: what a setting asks for; it yields only where it cannot be done.
    """
    if shape.on_device and forced is not Path.DMA:
        # what is written and measured is about the link
        return PathChoice(Path.ZERO_COPY, "objects on the device")
    for wanted, reason in ((forced, "set"), (tuned and Path(tuned), "tuned")):
        if wanted and _possible(wanted, shape):
            return PathChoice(wanted, reason)
    if shape.run_bytes >= table.dma_run_bytes:
        return PathChoice(Path.DMA, f"runs of {table.dma_run_bytes} bytes and more")
    if shape.runs <= table.few_runs:
        return PathChoice(Path.DMA, f"at most {table.few_runs} runs")
    if shape.runs <= table.few_long_runs and shape.run_bytes >= table.long_run_bytes:
        return PathChoice(Path.DMA, f"at most {table.few_long_runs} long runs")
    staged_from = table.staged_from(shape.direction)
    if shape.stageable and staged_from is not None and shape.nbytes >= staged_from:
        return PathChoice(Path.STAGED, f"{staged_from} bytes and more of short runs")
    if shape.reachable:
        return PathChoice(Path.ZERO_COPY, "short runs")
    if shape.stageable:
        return PathChoice(Path.STAGED, "short runs, objects in memory that is not pinned")
    return PathChoice(Path.DMA, "objects in memory that is not pinned, and not stageable")


def _possible(path: Path, shape: CopyShape) -> bool:
    if path is Path.ZERO_COPY:
        return shape.reachable
    return shape.stageable if path is Path.STAGED else True
