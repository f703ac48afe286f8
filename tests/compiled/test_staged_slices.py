"""The slices that the staged path launches: kernels that no other path compiles."""

from __future__ import annotations

import pytest

from hma_triton.geometries.copy_specs import geometry_specs
from hma_triton.kernels.addressing import CopySpec, Direction, ObjectLayout
from hma_triton.kernels.offline_compile import TARGETS, CompileJob, Target, compile_kernel
from hma_triton.kernels.specialize import KernelSpecialization, arena_alignment_bytes, specialize
from hma_triton.kernels.staged import STAGING_BYTES, row_slices
from hma_triton.tuning import default_config

# Models whose specs are larger than half of the staging buffer, so that their rows are sliced.
MODELS = ("llama-3.1-70b", "deepseek-v3")


def _sliced(model: str, layout: ObjectLayout) -> list[CopySpec]:
    return [
        part
        for entry in geometry_specs(model, "main", layout)
        for _, part in row_slices(entry.spec, STAGING_BYTES // 2)
        if part.num_rows != entry.spec.num_rows
    ]


def _kernels(target: Target) -> list[KernelSpecialization]:
    config = default_config(target.name)
    kernels = {
        specialize(spec, direction, arena_alignment_bytes(spec), config)[0]
        for model in MODELS
        for layout in ObjectLayout
        for spec in _sliced(model, layout)
        for direction in Direction
    }
    return sorted(kernels, key=repr)


@pytest.mark.parametrize("target", [TARGETS[1], TARGETS[3]], ids=lambda target: target.name)
def test_slices_meet_the_marks_of_every_other_kernel(target: Target) -> None:
    kernels = _kernels(target)
    assert kernels, "no model here is sliced any more: choose another one"
    for special in kernels[:4]:
        assert compile_kernel(CompileJob(special, target)).missed == ()
