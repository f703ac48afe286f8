"""The CPU copy against the reference, bit for bit, over poisoned and guarded memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.copy_cases import CopyCase, Executor, check_copy, copy_cases, single_run_case
from support.guarded_memory import Memory
from support.prepared import Prepared
from support.transposed_cases import transposed_case

from hma_triton.errors import ConfigError, PlanError, TransferError
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kernels.cpu_fills import Fill, choose_fill

DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.name.lower())
COUNTS = pytest.mark.parametrize("count", [0, 1, 63, 64, 65])
RUN_BYTES = (1, 3, 4, 8, 12, 16, 32, 64, 96, 128, 132, 192, 256, 512, 576, 656, 1024, 2048, 2304)


def check(executor: Executor, case: CopyCase, direction: Direction) -> None:
    memory = Memory(torch.device("cpu"))
    try:
        check_copy(executor, case, direction, memory)
    finally:
        memory.close()


@settings(max_examples=150)
@given(case=copy_cases())
def test_any_layout_is_stored(copier: CpuCopier, case: CopyCase) -> None:
    check(copier, case, Direction.STORE)
    check(Prepared(copier), case, Direction.STORE)


@settings(max_examples=150)
@given(case=copy_cases(unique_ids=True))
def test_any_layout_is_retrieved(copier: CpuCopier, case: CopyCase) -> None:
    check(copier, case, Direction.RETRIEVE)
    check(Prepared(copier), case, Direction.RETRIEVE)


@st.composite
def transposes(draw: st.DrawFn) -> CopyCase:
    """Every fill, on lines and off them, with pieces that end inside a page or do not."""
    count = draw(st.integers(0, 6))
    return transposed_case(
        slots=draw(st.sampled_from((1, 2, 5, 16, 24))),
        heads=draw(st.sampled_from((1, 2, 3, 8))),
        run_bytes=draw(st.sampled_from(RUN_BYTES)),
        block_ids=draw(st.permutations(range(7)))[:count],
        padding=draw(st.sampled_from((0, 0, 64, 96, 4))),
        row_gap=draw(st.sampled_from((0, 0, 64, 4))),
        pool_misalign=draw(st.sampled_from((0, 0, 16, 4, 1))),
        object_misalign=draw(st.sampled_from((0, 0, 16, 4, 1))),
        at_end=draw(st.booleans()),
    )


@DIRECTIONS
@settings(max_examples=200)
@given(case=transposes())
def test_any_transpose(copier: CpuCopier, direction: Direction, case: CopyCase) -> None:
    check(Prepared(copier), case, direction)


@DIRECTIONS
@COUNTS
def test_counts(prepared: Prepared, memory: Memory, direction: Direction, count: int) -> None:
    ids = random.Random(count).sample(range(70), count)
    check_copy(prepared, single_run_case(132, ids), direction, memory)
    check_copy(prepared, single_run_case(8448, ids), direction, memory)
    check_copy(prepared, transposed_case(16, 4, 64, ids, num_blocks=70), direction, memory)


@DIRECTIONS
@pytest.mark.parametrize("at_end", [False, True], ids=["at_start", "at_end"])
@pytest.mark.parametrize("run_bytes", [*range(1, 70), 127, 131, 255, 511, 513, 576, 640, 656])
def test_row_bytes(
    prepared: Prepared, memory: Memory, direction: Direction, run_bytes: int, at_end: bool
) -> None:
    """No tail is lost and nothing overruns, whatever the length; five pages fill four streams."""
    case = single_run_case(run_bytes, (5, 0, 69, 7, 1), at_end=at_end)
    check_copy(prepared, case, direction, memory)


@DIRECTIONS
@pytest.mark.parametrize("pool_misalign", [0, 1, 4, 8, 16, 63, 132, 8640])
@pytest.mark.parametrize("object_misalign", [0, 1, 60])
def test_any_base(
    prepared: Prepared,
    memory: Memory,
    direction: Direction,
    pool_misalign: int,
    object_misalign: int,
) -> None:
    """Lines past the cache are written only where they are whole; the bytes are right anyway."""
    for case in (
        single_run_case(
            5000,
            (3, 1, 2, 6, 5),
            pool_misalign=pool_misalign,
            object_misalign=object_misalign,
        ),
        transposed_case(
            16,
            4,
            128,
            (3, 1, 2, 6, 5),
            pool_misalign=pool_misalign,
            object_misalign=object_misalign,
        ),
    ):
        check_copy(prepared, case, direction, memory)


@DIRECTIONS
@pytest.mark.parametrize("run_bytes", [65_535, 65_536, 65_537, 262_144, 1_000_003, 9_000_000])
def test_pages_that_several_threads_share(
    prepared: Prepared, memory: Memory, direction: Direction, run_bytes: int
) -> None:
    check_copy(prepared, single_run_case(run_bytes, (2, 0, 1), num_blocks=3), direction, memory)


@DIRECTIONS
@pytest.mark.parametrize("run_bytes", [16, 100, 256, 1024, 4096])
def test_large_transposes_that_several_threads_share(
    prepared: Prepared, memory: Memory, direction: Direction, run_bytes: int
) -> None:
    slots = 2_000_000 // (4 * run_bytes) + 1
    case = transposed_case(slots, 4, run_bytes, (1, 2), rows=1, num_blocks=3)
    check_copy(prepared, case, direction, memory)


def test_ids_repeat_on_store(prepared: Prepared, memory: Memory) -> None:
    check_copy(prepared, single_run_case(656, (4, 4, 1, 4, 4, 0)), Direction.STORE, memory)
    check_copy(prepared, transposed_case(16, 2, 64, (4, 4, 1, 4, 4)), Direction.STORE, memory)


@DIRECTIONS
def test_neighbours_in_both_places(
    prepared: Prepared, memory: Memory, direction: Direction
) -> None:
    """Consecutive ids at consecutive places, in both orders, with a break."""
    for ids in (range(20), range(19, -1, -1), (3, 4, 5, 9, 10, 2, 1, 0)):
        case = single_run_case(640, tuple(ids), rows=1, num_blocks=20)
        check_copy(prepared, case, direction, memory)


@pytest.mark.parametrize(
    ("run_bytes", "whole", "joined", "fill"),
    [
        (8, True, 8, Fill.JOIN8),
        (16, True, 4, Fill.JOIN16),
        (32, True, 16, Fill.JOIN32),
        (64, True, 1, Fill.LINE64),
        (128, True, 1, Fill.LINE128),
        (256, True, 1, Fill.LINE256),
        (192, True, 1, Fill.LINES),
        (512, True, 1, Fill.LINES),
        # rows of three runs of 16 bytes leave lines that two rows share
        (16, True, 3, Fill.ANY),
        (16, True, 1, Fill.ANY),
        (96, True, 2, Fill.ANY),
        (132, True, 1, Fill.ANY),
        (256, False, 1, Fill.ANY),
    ],
)
def test_the_loop_follows_run_and_alignment(
    run_bytes: int, whole: bool, joined: int, fill: Fill
) -> None:
    assert choose_fill(run_bytes, whole, joined) is fill


def test_lists_of_different_length_are_refused(copier: CpuCopier) -> None:
    spec = single_run_case(64, (0,)).spec
    with pytest.raises(PlanError, match=r"kernel group 0: block ids of shape \(2,\)"):
        copier.copy_blocks(spec, Direction.STORE, np.zeros(2, np.int64), np.zeros(1, np.int64))


@pytest.mark.parametrize("implementation", ["compiled", "numpy"])
def test_a_closed_copier_refuses(implementation: str) -> None:
    copier = CpuCopier(2, implementation)
    copier.close()
    copier.close()
    spec = single_run_case(64, (0,)).spec
    with pytest.raises(TransferError, match="closed"):
        copier.copy_blocks(spec, Direction.STORE, np.zeros(1, np.int64), np.zeros(1, np.int64))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one thread, not 0"):
        CpuCopier(0)
    with pytest.raises(ConfigError, match="'fast' is unknown; use one of auto, compiled, numpy"):
        CpuCopier(1, "fast")


def test_threads_are_those_of_the_process() -> None:
    assert CpuCopier().threads == torch.get_num_threads()
    assert CpuCopier().name == "cpu-compiled"
