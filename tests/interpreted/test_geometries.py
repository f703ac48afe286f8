"""Every geometry of the model file, page shapes as they are, over pools of three blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.copy_cases import CopyCase, check_copy
from support.guarded_memory import Memory

from hma_triton.geometries import list_geometries
from hma_triton.geometries.copy_specs import GeometrySpec, all_geometry_specs
from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.tuning import KernelConfig

_BIG_PAGE_BYTES = 1 << 20
# from this size on, tiles are large: the interpreter's cost is by tile
_LARGE_TILE_FROM_BYTES = 64 << 10


def scaled(spec: CopySpec) -> CopyCase:
    """The same pages with fewer rows and blocks 2 and 1, one block of one row where huge."""
    huge = spec.page_bytes > _BIG_PAGE_BYTES
    rows = spec.row_addresses[: 1 if huge else 2]
    rows = tuple(row - min(rows) for row in rows)
    ids = (1,) if huge else (2, 1)
    step = spec.object_block_stride_bytes
    if len(ids) > spec.blocks_per_object:
        step = spec.object_extent_bytes
    places = tuple(step * index for index in range(len(ids)))
    # what plays no part here is made equal, so that equal copies are told
    spec = replace(
        spec,
        kernel_group_index=0,
        row_addresses=rows,
        num_blocks=max(ids) + 1,
        region_offset_bytes=0,
        object_row_stride_bytes=spec.object_row_stride_bytes if len(rows) > 1 else 0,
        object_block_stride_bytes=0,
        blocks_per_object=1,
    )
    return CopyCase(
        spec=spec,
        pool_bytes=max(rows) + max(ids) * spec.block_stride_bytes + spec.pool_extent_bytes,
        block_ids=ids,
        places=places,
        object_bytes=places[-1] + spec.object_extent_bytes,
    )


@cache
def distinct_cases() -> dict[str, list[CopyCase]]:
    """By model: the cases that no model before it has."""
    seen = set()
    by_model: dict[str, list[CopyCase]] = {model: [] for model in list_geometries()}
    for entry in all_geometry_specs():
        if isinstance(entry, GeometrySpec):
            case = scaled(entry.spec)
            if case not in seen:
                seen.add(case)
                by_model[entry.model].append(case)
    return by_model


@pytest.mark.parametrize("model", list_geometries())
def test_every_page_shape_comes_back(device: torch.device, model: str) -> None:
    for case in distinct_cases()[model]:
        large = case.spec.page_bytes >= _LARGE_TILE_FROM_BYTES
        config = KernelConfig(65536 if large else 512, warps=1, stages=1, program_cap=3)
        for direction in Direction:
            memory = Memory(device)
            try:
                check_copy(TritonCopier(device, config), case, direction, memory)
            finally:
                memory.close()


def test_the_file_is_covered() -> None:
    """No model is without a case unless an earlier one has all of its page shapes."""
    cases = distinct_cases()
    assert len(cases) == 36
    assert sum(map(len, cases.values())) == 141
