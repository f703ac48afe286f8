"""Every kernel that LMCache's formats take in its object layout, compiled for four devices."""

from __future__ import annotations

import pytest

from hma_triton.integration.lmcache.geometry import build_geometry
from hma_triton.integration.lmcache.pools import (
    PagedShape,
    is_side_by_side,
    pages_from_pointers,
    pointer_count,
)
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.offline_compile import TARGETS, CompileJob, Target, compile_kernel
from hma_triton.kernels.specialize import KernelSpecialization, specialize
from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat
from hma_triton.tuning import default_config

BLOCKS, SLOTS, LAYERS = 1024, 16, 32
CHUNK_SLOTS = 256
# one of each kind: token rows, heads first, planes apart, planar fields
IN_CI = (
    EngineKVFormat.NL_X_NB_BS_HS,
    EngineKVFormat.NL_X_NB_NH_BS_CS,
    EngineKVFormat.NL_X_TWO_NB_NH_BS_HS,
    EngineKVFormat.NL_X_NB_BSV_BSS,
)
FORMATS = [
    pytest.param(fmt, id=fmt.name, marks=() if fmt in IN_CI else pytest.mark.long)
    for fmt in EngineKVFormat
    # its planes are tensors of their own; the kernels are those of other latents
    if not is_side_by_side(fmt)
]


def shape_of(fmt: EngineKVFormat) -> PagedShape:
    """Eight heads of 128, latents of 576, packed content of 256, indexer rows of 132 bytes."""
    row = FORMAT_ROWS[fmt]
    if row.planar_bytes:
        return PagedShape(LAYERS, BLOCKS, SLOTS, 1, 132, 1, 0)
    if row.is_single_latent:
        return PagedShape(LAYERS, BLOCKS, SLOTS, 1, 576, 2, 0)
    return PagedShape(LAYERS, BLOCKS, SLOTS, 8, 256 if row.is_packed else 128, 2, 0)


def kernels_of(fmt: EngineKVFormat, target: Target) -> set[KernelSpecialization]:
    """What a launch over pools and staging slots at whole lines compiles, both ways."""
    shape = shape_of(fmt)
    pointers = [(1 + i) << 32 for i in range(pointer_count(fmt, LAYERS))]
    geometry = build_geometry(
        pages_from_pointers(fmt, shape, pointers),
        object_slots=CHUNK_SLOTS,
        blocks_per_object=CHUNK_SLOTS // SLOTS,
    )
    config = default_config(target.name)
    return {
        specialize(spec, direction, 16, config)[0]
        for spec in geometry.specs
        for direction in Direction
    }


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("fmt", FORMATS)
def test_marks(fmt: EngineKVFormat, target: Target) -> None:
    """As wide as alignment permits (rows of 132 bytes: 4), no spills, at most 64 registers."""
    kernels = kernels_of(fmt, target)
    assert len(kernels) == (4 if FORMAT_ROWS[fmt].planar_bytes else 2)
    for special in kernels:
        assert special.word_bytes == (4 if FORMAT_ROWS[fmt].planar_bytes else 16)
        code = compile_kernel(CompileJob(special, target))
        assert code.missed == ()
        assert code.spill_bytes == 0
