"""Path choice: the written table at its edges, and what may override it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.paths import AMD, NVIDIA, CopyShape, Path, choose_path, path_table

KIB = 1024


def _shape(
    run_bytes: int,
    runs: int,
    direction: Direction = Direction.STORE,
    *,
    reachable: bool = True,
    stageable: bool = True,
) -> CopyShape:
    return CopyShape(direction, runs, run_bytes, run_bytes * runs, reachable, stageable)


@pytest.mark.parametrize(
    ("run_bytes", "runs", "direction", "path"),
    [
        # crossover between 28 and 34 KB a run (peers: vLLM #42212, the LMCache document)
        (32 * KIB, 4096, Direction.STORE, Path.DMA),
        (32 * KIB - 1, 4096, Direction.STORE, Path.ZERO_COPY),
        (32 * KIB, 4096, Direction.RETRIEVE, Path.DMA),
        (1 << 20, 1, Direction.RETRIEVE, Path.DMA),
        # few runs favour the copy engine
        (1 * KIB, 16, Direction.STORE, Path.DMA),
        (1 * KIB, 17, Direction.STORE, Path.ZERO_COPY),
        (16 * KIB, 64, Direction.STORE, Path.DMA),
        (16 * KIB, 65, Direction.STORE, Path.ZERO_COPY),
        (16 * KIB - 1, 64, Direction.STORE, Path.ZERO_COPY),
        # kernels read host memory more slowly than they write it: large retrieves are staged
        (4 * KIB, 2048, Direction.RETRIEVE, Path.STAGED),
        (4 * KIB, 2047, Direction.RETRIEVE, Path.ZERO_COPY),
        (4 * KIB, 1 << 20, Direction.STORE, Path.ZERO_COPY),
    ],
)
def test_the_written_table_of_nvidia(
    run_bytes: int, runs: int, direction: Direction, path: Path
) -> None:
    assert choose_path(_shape(run_bytes, runs, direction), path_table("sm_90")).path is path


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("run_bytes", "runs", "path"),
    [
        (32 * KIB, 4096, Path.ZERO_COPY),
        (1 << 20, 4096, Path.DMA),
        (1 * KIB, 2, Path.ZERO_COPY),
        (1 * KIB, 1, Path.DMA),
        (256 * KIB, 4, Path.DMA),
    ],
)
def test_the_written_table_of_amd(
    direction: Direction, run_bytes: int, runs: int, path: Path
) -> None:
    assert path_table("gfx942") is AMD
    assert choose_path(_shape(run_bytes, runs, direction), AMD).path is path


@pytest.mark.parametrize("run_bytes", [1 * KIB, 31 * KIB, 1 << 20])
@pytest.mark.parametrize("direction", Direction)
def test_memory_that_no_kernel_reaches_is_never_zero_copy(
    run_bytes: int, direction: Direction
) -> None:
    for stageable in (True, False):
        shape = _shape(run_bytes, 500, direction, reachable=False, stageable=stageable)
        for tuned in (None, "zero_copy"):
            for forced in (None, Path.ZERO_COPY):
                choice = choose_path(shape, NVIDIA, tuned, forced)
                assert choice.path is not Path.ZERO_COPY
                assert stageable or choice.path is Path.DMA


def test_a_setting_comes_first_then_a_measurement_then_the_table() -> None:
    shape = _shape(1 << 20, 100)
    assert choose_path(shape, NVIDIA, "zero_copy", Path.STAGED).path is Path.STAGED
    assert choose_path(shape, NVIDIA, "zero_copy", Path.STAGED).reason == "set"
    assert choose_path(shape, NVIDIA, "zero_copy").path is Path.ZERO_COPY
    assert choose_path(shape, NVIDIA, "zero_copy").reason == "tuned"
    assert choose_path(shape, NVIDIA).path is Path.DMA


def test_what_cannot_be_staged_falls_back() -> None:
    shape = replace(_shape(4 * KIB, 1 << 14, Direction.RETRIEVE), stageable=False)
    assert choose_path(shape, NVIDIA).path is Path.ZERO_COPY
    assert choose_path(shape, NVIDIA, forced=Path.STAGED).path is Path.ZERO_COPY
