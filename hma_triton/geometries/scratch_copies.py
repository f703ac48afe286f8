"""What to time for a model: its distinct copies, each over a scratch pool of its own."""

from __future__ import annotations

from hma_triton.autotune_scratch import ScratchCopy
from hma_triton.geometries.copy_specs import geometry_specs
from hma_triton.kernels.addressing import CopySpec, Direction, ObjectLayout
from hma_triton.kernels.specialize import arena_alignment_bytes, tune_key
from hma_triton.tuning import TuneKey
from hma_triton.units import cdiv


def scratch_copies(
    model: str, variant: str, object_layout: ObjectLayout, sizes_bytes: tuple[int, ...]
) -> dict[TuneKey, ScratchCopy]:
    """What to time for one model: each distinct copy, direction and size bucket once."""
    found: dict[TuneKey, ScratchCopy] = {}
    for small in geometry_specs(model, variant, object_layout):
        for size in sizes_bytes:
            num_blocks = cdiv(size, small.spec.block_bytes)
            for direction in Direction:
                alignment = arena_alignment_bytes(small.spec)
                key = tune_key(small.spec, direction, alignment, num_blocks)
                if key not in found:
                    found[key] = _scratch_copy(small.spec, direction, num_blocks)
    return found


def _scratch_copy(spec: CopySpec, direction: Direction, num_blocks: int) -> ScratchCopy:
    """The same pages in a pool of `num_blocks` blocks: rows apart by a pool's whole length."""
    page_step = max(spec.pool_extent_bytes, spec.block_stride_bytes)
    row_step = num_blocks * page_step
    interleaved = max(spec.row_addresses) - min(spec.row_addresses) < spec.block_stride_bytes
    first = min(spec.row_addresses)
    rows = tuple(
        row - first if interleaved else index * row_step
        for index, row in enumerate(spec.row_addresses)
    )
    moved = CopySpec(
        **{
            **{name: getattr(spec, name) for name in spec.__slots__},
            "row_addresses": rows,
            "num_blocks": num_blocks,
        }
    )
    return ScratchCopy(moved, max(rows) + row_step, direction, num_blocks)
