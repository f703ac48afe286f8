"""Copy kernels compiled for devices that are not there: widths, spills, registers."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hma_triton.cli.bench_compile import CSV_COLUMNS, app, distinct_kernels
from hma_triton.errors import ConfigError
from hma_triton.geometries.copy_specs import GeometrySpec, all_geometry_specs
from hma_triton.kernels import machine_code
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.machine_code import missed_marks
from hma_triton.kernels.offline_compile import TARGETS, CompileJob, Target, compile_kernel
from hma_triton.kernels.specialize import KernelSpecialization
from hma_triton.tuning import default_config

TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def kernel_of(target: Target, direction: Direction, **shape: int | bool) -> KernelSpecialization:
    """A kernel with the target's written launch; one run of 16-byte words unless told otherwise."""
    config = default_config(target.name)
    made = KernelSpecialization(
        direction=direction,
        rows=61,
        n0=1,
        n1=1,
        run_words=36,
        word_bytes=16,
        lane_bytes=8,
        tail_words=0,
        tail_word_bytes=0,
        split_pages=False,
        tile_words=config.tile_words,
        stages=config.stages,
        warps=config.warps,
    )
    return replace(made, **shape)  # type: ignore[arg-type]


SHAPES = {
    "big_page_of_heads": {"n0": 544, "n1": 8, "run_words": 32, "split_pages": True},
    "small_page_of_heads": {"n0": 16, "n1": 8, "run_words": 16},
    "rows_of_132_bytes": {"n0": 64, "run_words": 33, "word_bytes": 4, "lane_bytes": 4},
    "tail_of_3_bytes": {"n0": 3, "n1": 4, "run_words": 8, "tail_words": 3, "tail_word_bytes": 1},
}


@TARGET
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.name.lower())
def test_marks(target: Target, shape: str, direction: Direction) -> None:
    """Every data access is as wide as alignment permits; nothing spills; 64 registers do."""
    special = kernel_of(target, direction, **SHAPES[shape])
    code = compile_kernel(CompileJob(special, target))
    assert code.missed == ()
    tail = {special.tail_word_bytes} if special.tail_words else set()
    assert set(code.load_bytes) == set(code.store_bytes) == {special.word_bytes} | tail
    assert len(code.load_bytes) >= special.tile_words // (special.warps * target.threads_per_warp)
    assert code.stray_stores == code.spill_bytes == code.spill_instructions == 0
    assert 8 <= code.registers <= machine_code.REGISTER_LIMIT
    assert code.code_bytes > 200
    # a list of ids, one of objects, a table of rows
    assert code.other_loads >= 3


@pytest.mark.parametrize("target", TARGETS[1::2], ids=lambda target: target.name)
def test_narrow_accesses_are_noticed(target: Target) -> None:
    """A kernel of 8-byte words, held to the marks of 16-byte ones."""
    code = compile_kernel(
        CompileJob(kernel_of(target, Direction.STORE, word_bytes=8, run_words=72), target)
    )
    assert code.missed == ()
    assert missed_marks(kernel_of(target, Direction.STORE), code) == (
        "a data load of 8 bytes where 16 fit",
        "a data store of 8 bytes where 16 fit",
    )


@pytest.mark.parametrize("target", TARGETS[::3], ids=lambda target: target.name)
def test_too_many_registers_are_noticed(target: Target) -> None:
    """Three stages over pages that share programs: addresses of three tiles at once."""
    special = kernel_of(target, Direction.STORE, n0=16, n1=8, stages=3)
    code = compile_kernel(CompileJob(replace(special, tile_words=1024), target))
    assert any("registers, the limit is 64" in mark for mark in code.missed)


def test_the_command_compiles_a_model(tmp_path: Path) -> None:
    """4-byte words where a row of 132 bytes allows no more, and the reason in the table."""
    path = tmp_path / "kernels.csv"
    arguments = ["--model", "glm-5.1", "--target", "gfx942", "--object-layout", "token_major"]
    done = CliRunner().invoke(app, [*arguments, "--jobs", "1", "--csv", str(path)])
    assert done.exit_code == 0, done.output
    assert "0 missed" in done.output
    rows = list(csv.DictReader(path.open()))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert {row["target"] for row in rows} == {"gfx942"}
    assert {row["word_bytes"] for row in rows} == {"16", "4"}
    for row in rows:
        assert row["load_bytes"] == row["store_bytes"] == row["word_bytes"]
        assert bool(row["narrow_because"]) == (row["word_bytes"] == "4")
        assert row["missed"] == ""


def test_a_missed_mark_is_an_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_code, "REGISTER_LIMIT", 8)
    arguments = ["--model", "qwen3-32b", "--target", "sm_90", "--object-layout", "opaque"]
    done = CliRunner().invoke(app, [*arguments, "--jobs", "1"])
    assert done.exit_code == 1
    assert "missed: sm_90 qwen3-32b main opaque kernel group 0 store" in done.output
    assert "registers, the limit is 8" in done.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--target", "sm_1"], "target 'sm_1' is unknown; there are sm_80"),
        (["--object-layout", "round"], "object layout 'round' is unknown"),
        (["--model", "nothing"], "model 'nothing' fits no geometry"),
    ],
)
def test_bad_choices_are_named(arguments: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError)
    assert complaint in str(done.exception)


def test_equal_kernels_are_compiled_once() -> None:
    specs = [e for e in all_geometry_specs(("gpt-oss-20b",)) if isinstance(e, GeometrySpec)]
    kernels = distinct_kernels(specs, TARGETS[1], unaligned=False)
    assert len({kernel.special for kernel in kernels}) == len(kernels) < 2 * len(specs)
    assert sum(kernel.geometries for kernel in kernels) == 2 * len(specs)
    more = distinct_kernels(specs, TARGETS[1], unaligned=True)
    assert {kernel.special.word_bytes for kernel in more} == {16, 1}
