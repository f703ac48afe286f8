"""Pool layouts that other systems got wrong, with their numbers (kind K2 of the field cases)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.copy_cases import CopyCase, check_copy, single_run_case
from support.guarded_memory import Memory

from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.triton_copier import TritonCopier

DIRECTIONS = pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.name.lower())


@DIRECTIONS
def test_padded_state_pages(copier: TritonCopier, memory: Memory, direction: Direction) -> None:
    """Case 19: 8,000 bfloat16 of a state on steps of 8,064."""
    case = single_run_case(16000, (2, 0), rows=1, num_blocks=3, padding=128)
    check_copy(copier, case, direction, memory)
    assert copier.last_launch is not None
    assert copier.last_launch.word_bytes == 16


def test_layers_keep_the_order_of_their_registration(copier: TritonCopier, memory: Memory) -> None:
    """Case 20: layers at offsets 2N, 0, N that hold 2, 0, 1 are stored as 2, 0, 1."""
    page = 256
    spec = single_run_case(page, (0,), rows=3, num_blocks=1).spec
    pool, host = memory.buffer(3 * page), memory.buffer(3 * page, host=True)
    pool.write(0, np.repeat(np.arange(3, dtype=np.uint8), page))
    rows = tuple(pool.address + place * page for place in (2, 0, 1))
    copier.copy_blocks(
        replace(spec, row_addresses=rows),
        Direction.STORE,
        np.array([0]),
        np.array([host.address]),
    )
    assert host.window(0, 3 * page).tolist() == np.repeat([2, 0, 1], page).tolist()


@DIRECTIONS
def test_the_k_half_of_a_block(copier: TritonCopier, memory: Memory, direction: Direction) -> None:
    """Case 23: K of a `[4, 2, 8, 2, 4]` pool; the step is twice the page, V is never touched."""
    case = single_run_case(128, (3,), rows=1, num_blocks=4, padding=128)
    check_copy(copier, case, direction, memory)


@DIRECTIONS
def test_groups_that_share_a_buffer(
    copier: TritonCopier, memory: Memory, direction: Direction
) -> None:
    """Case 29: block 2 of 16 x 64 bytes is bytes 2,048 to 3,071 of the buffer that block 1 of
    32 x 32 bytes shares: pages are addressed by their bytes, whatever their slots."""
    for run_bytes, slots, block, first in ((64, 16, 2, 2048), (32, 32, 1, 1024)):
        spec = single_run_case(run_bytes, (block,), rows=1, num_blocks=6).spec
        spec = replace(
            spec,
            block_stride_bytes=1024,
            n0=slots,
            pool_stride0_bytes=run_bytes,
            # slots apart in the object: the runs of a page stay runs
            object_stride0_bytes=96,
        )
        case = CopyCase(spec, 6 * 1024, (block,), (0,), spec.object_extent_bytes)
        check_copy(copier, case, direction, memory)
        assert block * spec.block_stride_bytes == first
