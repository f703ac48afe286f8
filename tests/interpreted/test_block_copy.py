"""The Triton copy against the reference, bit for bit, over poisoned and guarded memory."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.copy_cases import CopyCase, check_copy, copy_cases, single_run_case
from support.guarded_memory import Memory

from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.tuning import KernelConfig

DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.name.lower())
ALIGNMENTS = (16, 8, 4, 2, 1)
TILES = st.sampled_from((64, 256, 1024))


def check(device: torch.device, case: CopyCase, direction: Direction, tile_words: int) -> None:
    memory = Memory(device)
    config = KernelConfig(tile_words, warps=1, stages=1, program_cap=3)
    copier = TritonCopier(device, config, object_alignments=ALIGNMENTS)
    try:
        check_copy(copier, case, direction, memory)
    finally:
        memory.close()


@settings(max_examples=120)
@given(case=copy_cases(), tile_words=TILES)
def test_any_layout_is_stored(device: torch.device, case: CopyCase, tile_words: int) -> None:
    check(device, case, Direction.STORE, tile_words)


@settings(max_examples=120)
@given(case=copy_cases(unique_ids=True), tile_words=TILES)
def test_any_layout_is_retrieved(device: torch.device, case: CopyCase, tile_words: int) -> None:
    check(device, case, Direction.RETRIEVE, tile_words)


@DIRECTIONS
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65])
def test_counts(copier: TritonCopier, memory: Memory, direction: Direction, count: int) -> None:
    ids = random.Random(count).sample(range(70), count)
    check_copy(copier, single_run_case(132, ids), direction, memory)
    assert copier.launch_count == (1 if count else 0)


@DIRECTIONS
@pytest.mark.parametrize("at_end", [False, True], ids=["at_start", "at_end"])
@pytest.mark.parametrize("run_bytes", [1, 3, 96, 131, 132, 576, 656])
def test_row_bytes(
    copier: TritonCopier, memory: Memory, direction: Direction, run_bytes: int, at_end: bool
) -> None:
    """Case 107: no row length needs a power of two, no tail is lost, nothing overruns."""
    case = single_run_case(run_bytes, (5, 0, 69, 7), at_end=at_end)
    check_copy(copier, case, direction, memory)


@DIRECTIONS
@pytest.mark.parametrize("offset", [0, 4, 8, 16, 132, 8640])
def test_base_offsets(
    copier: TritonCopier, memory: Memory, direction: Direction, offset: int
) -> None:
    """Case 106: the bytes are right at any base, and the width follows the alignment."""
    case = single_run_case(256, (3, 1, 2), pool_misalign=offset)
    check_copy(copier, case, direction, memory)
    assert copier.last_launch is not None
    assert copier.last_launch.word_bytes == {0: 16, 4: 4, 8: 8, 16: 16, 132: 4, 8640: 16}[offset]


@pytest.mark.parametrize("misalign", [0, 8, 4, 2, 1])
def test_objects_at_any_address(copier: TritonCopier, memory: Memory, misalign: int) -> None:
    case = single_run_case(256, (3, 1, 2), object_misalign=misalign)
    check_copy(copier, case, Direction.STORE, memory)
    assert copier.last_launch is not None
    # unless told otherwise, an object off the arena's alignment takes the narrowest variant
    assert copier.last_launch.word_bytes == (1 if misalign else 16)


@pytest.mark.parametrize("offset", [0, 4, 8, 16, 132, 8640])
def test_nothing_is_left_to_compile(device: torch.device, memory: Memory, offset: int) -> None:
    """Case 106: a launch takes a kernel of those made ready, wherever its objects are."""
    copier = TritonCopier(device)
    case = single_run_case(256, (3, 1, 2), pool_misalign=offset)
    for misalign in (0, 16, 8, 4, 2, 1):
        check_copy(copier, replace(case, object_misalign=misalign), Direction.STORE, memory)
        launch = copier.last_launch
        assert launch is not None
        ready = copier.specializations(launch.spec)
        assert launch.kernel in ready
        assert {kernel.word_bytes for kernel in ready} == {
            {0: 16, 4: 4, 8: 8, 16: 16, 132: 4, 8640: 16}[offset],
            1,
        }


def test_ids_repeat_on_store(copier: TritonCopier, memory: Memory) -> None:
    check_copy(copier, single_run_case(656, (4, 4, 1, 4)), Direction.STORE, memory)


@DIRECTIONS
def test_run_with_a_tail(copier: TritonCopier, memory: Memory, direction: Direction) -> None:
    """131 bytes on 144-byte steps: eight 16-byte words and a tail of three single bytes."""
    case = single_run_case(131, (2, 0, 1), rows=1, num_blocks=3, padding=13, place_step=144)
    check_copy(copier, case, direction, memory)
    assert copier.last_launch is not None
    assert copier.last_launch.word_bytes == 16


@DIRECTIONS
def test_padding_of_the_pool_is_never_touched(
    copier: TritonCopier, memory: Memory, direction: Direction
) -> None:
    """Case 16: pages of 8,448 live bytes on steps of 8,544."""
    case = single_run_case(8448, (2, 0), rows=1, num_blocks=4, padding=96)
    check_copy(copier, case, direction, memory)


def test_two_views_of_one_buffer(copier: TritonCopier, device: torch.device) -> None:
    """Case 17: views at bytes 0 and 8640 of one buffer; writing the second spares the first."""
    memory = Memory(device)
    try:
        case = single_run_case(8448, (1, 0), rows=1, num_blocks=4, padding=8832)
        second = replace(case.spec, row_addresses=(8640,))
        check_copy(
            copier,
            replace(case, spec=second, pool_bytes=4 * 17280),
            Direction.RETRIEVE,
            memory,
        )
    finally:
        memory.close()


def test_launches_of_a_batch(copier: TritonCopier, memory: Memory) -> None:
    """Case 109: 60 layers x 16 chunks are one launch, whatever the count."""
    case = single_run_case(64, tuple(range(16)), rows=60, num_blocks=16)
    check_copy(copier, case, Direction.STORE, memory)
    assert copier.launch_count == 1
    assert copier.last_launch is not None
    assert copier.last_launch.nbytes == 60 * 16 * 64


def test_programs_are_capped(copier: TritonCopier, memory: Memory) -> None:
    case = single_run_case(4096, tuple(range(8)), rows=3, num_blocks=8)
    check_copy(copier, case, Direction.STORE, memory)
    assert copier.last_launch is not None
    assert copier.last_launch.programs == 3


def test_store_and_retrieve_take_the_same_way(copier: TritonCopier, memory: Memory) -> None:
    """Case 26: one rule for both directions, and the choice is reported."""
    for run_bytes in (512, 576, 640, 656):
        seen = []
        for direction in Direction:
            check_copy(copier, single_run_case(run_bytes, (1, 0)), direction, memory)
            assert copier.last_launch is not None
            seen.append((copier.last_launch.word_bytes, copier.last_launch.programs))
        assert seen == [(16, {512: 2, 576: 3, 640: 3, 656: 3}[run_bytes])] * 2


def test_the_numbers_are_those_of_the_spec(copier: TritonCopier) -> None:
    empty = np.empty(0, dtype=np.int64)
    copier.copy_blocks(single_run_case(16, (0,)).spec, Direction.STORE, empty, empty)
    assert copier.last_launch is None
