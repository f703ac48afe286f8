"""Heads-first pages in a pool, token rows in objects: the transposes that copies do on the way."""

from __future__ import annotations

from collections.abc import Sequence

from support.copy_cases import CopyCase

from hma_triton.kernels.addressing import CopySpec


def transposed_case(
    slots: int,
    heads: int,
    run_bytes: int,
    block_ids: Sequence[int],
    *,
    rows: int = 2,
    num_blocks: int = 7,
    padding: int = 0,
    row_gap: int = 0,
    pool_misalign: int = 0,
    object_misalign: int = 0,
    at_end: bool = False,
) -> CopyCase:
    """Pages `[heads][slots][run]` against token rows `[slots][heads * run]`.

    Args:
        padding: bytes between pages of the pool.
        row_gap: bytes between token rows of an object, where other planes have theirs.
    """
    page = slots * heads * run_bytes
    stride = page + padding
    token_row = heads * run_bytes + row_gap
    place_step = slots * token_row
    count = len(block_ids)
    spec = CopySpec(
        kernel_group_index=0,
        row_addresses=tuple(row * num_blocks * stride for row in range(rows)),
        block_stride_bytes=stride,
        num_blocks=num_blocks,
        region_offset_bytes=0,
        object_row_stride_bytes=max(1, count) * place_step,
        object_block_stride_bytes=place_step,
        blocks_per_object=max(1, count),
        n0=slots,
        pool_stride0_bytes=run_bytes,
        object_stride0_bytes=token_row,
        n1=heads,
        pool_stride1_bytes=slots * run_bytes,
        object_stride1_bytes=run_bytes,
        run_bytes=run_bytes,
    )
    return CopyCase(
        spec=spec,
        pool_bytes=rows * num_blocks * stride,
        block_ids=tuple(block_ids),
        places=tuple(index * place_step for index in range(count)),
        object_bytes=rows * max(1, count) * place_step,
        pool_misalign=pool_misalign,
        object_misalign=object_misalign,
        at_end=at_end,
    )
