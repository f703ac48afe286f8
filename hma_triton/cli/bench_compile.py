"""`hma-triton bench compile`: every copy kernel of every known model, compiled without a GPU.

Reads the machine code and holds it to marks: accesses as wide as alignment permits, no spills, at
most 64 registers. Exit status 1 when a mark is missed.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hma_triton.errors import ConfigError
from hma_triton.geometries.copy_specs import GeometrySpec, Refused, all_geometry_specs
from hma_triton.kernels.addressing import Direction, ObjectLayout
from hma_triton.kernels.launch_environment import versions
from hma_triton.kernels.machine_code import REGISTER_LIMIT, MachineCode
from hma_triton.kernels.offline_compile import TARGETS, CompileJob, Target, compile_kernels
from hma_triton.kernels.specialize import (
    KernelSpecialization,
    arena_alignment_bytes,
    narrowest_step,
    specialize,
)
from hma_triton.tuning import default_config

app = typer.Typer(pretty_exceptions_enable=False)
# a pipe has no width of its own
_PLAIN_WIDTH = 110
CSV_COLUMNS = (
    "model", "variant", "object_layout", "kernel_group", "geometries", "target", "direction",
    "rows", "n0", "n1", "run_words", "word_bytes", "tail_words", "tail_word_bytes", "split_pages",
    "tile_words", "warps", "stages", "narrow_because", "load_bytes", "store_bytes", "table_loads",
    "registers", "spill_bytes", "code_bytes", "compile_seconds", "missed", "triton", "torch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernel:
    """A distinct kernel, the first geometry that needs it, and how many do."""

    special: KernelSpecialization
    example: GeometrySpec
    # which step or address keeps words under 16 bytes, empty where none does
    narrow_because: str
    geometries: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A kernel compiled for a target."""

    kernel: Kernel
    target: Target
    code: MachineCode


def distinct_kernels(
    specs: Iterable[GeometrySpec], target: Target, *, unaligned: bool
) -> list[Kernel]:
    """One entry for each kernel that `specs` need on `target`, in order of first need."""
    config = default_config(target.name)
    found: dict[KernelSpecialization, Kernel] = {}
    for entry in specs:
        aligned = arena_alignment_bytes(entry.spec)
        for alignment in (aligned, 1) if unaligned else (aligned,):
            for direction in Direction:
                special, _ = specialize(entry.spec, direction, alignment, config)
                known = found.get(special)
                found[special] = Kernel(
                    special=special,
                    example=known.example if known else entry,
                    narrow_because=(
                        known.narrow_because if known else narrowest_step(entry.spec, alignment)
                    ),
                    geometries=known.geometries + 1 if known else 1,
                )
    return list(found.values())


def compile_all(
    specs: list[GeometrySpec], targets: Iterable[Target], jobs: int, *, unaligned: bool
) -> tuple[int, Iterator[Outcome]]:
    """How many kernels there are to compile, and the outcomes as they come."""
    wanted = [
        (kernel, target)
        for target in targets
        for kernel in distinct_kernels(specs, target, unaligned=unaligned)
    ]
    codes = compile_kernels((CompileJob(k.special, target) for k, target in wanted), jobs)
    outcomes = (
        Outcome(kernel, target, code) for (kernel, target), code in zip(wanted, codes, strict=True)
    )
    return len(wanted), outcomes


def summary_table(outcomes: list[Outcome]) -> Table:
    """One line for each target, direction and word width."""
    table = Table(title="copy kernels, compiled without a device")
    for name in (
        "target", "direction", "word", "kernels", "loads", "stores", "registers", "spilling",
        "code bytes", "seconds", "missed",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name in ("target", "direction") else "right")
    groups: dict[tuple[str, str, int], list[Outcome]] = {}
    for outcome in outcomes:
        special = outcome.kernel.special
        key = (outcome.target.name, special.direction.name.lower(), -special.word_bytes)
        groups.setdefault(key, []).append(outcome)
    for (target, direction, word), members in groups.items():
        codes = [member.code for member in members]
        table.add_row(
            target,
            direction,
            str(-word),
            str(len(members)),
            _widths(width for code in codes for width in code.load_bytes),
            _widths(width for code in codes for width in code.store_bytes),
            _range(code.registers for code in codes),
            str(sum(bool(code.spill_bytes or code.spill_instructions) for code in codes)),
            _range(code.code_bytes for code in codes),
            f"{sum(code.compile_seconds for code in codes) / len(codes):.2f}",
            str(sum(bool(code.missed) for code in codes)),
        )
    return table


def _widths(values: Iterable[int]) -> str:
    return "/".join(str(width) for width in sorted(set(values), reverse=True)) or "none"


def _range(values: Iterable[int]) -> str:
    low_to_high = sorted(values)
    return f"{low_to_high[0]}-{low_to_high[-1]}"


def csv_row(outcome: Outcome) -> tuple[object, ...]:
    """An outcome as `CSV_COLUMNS` name it."""
    kernel, special, code = outcome.kernel, outcome.kernel.special, outcome.code
    example = kernel.example
    software = versions()
    return (
        example.model, example.variant, example.object_layout.value,
        example.spec.kernel_group_index, kernel.geometries, outcome.target.name,
        special.direction.name.lower(), special.rows, special.n0, special.n1, special.run_words,
        special.word_bytes, special.tail_words, special.tail_word_bytes, special.split_pages,
        special.tile_words, special.warps, special.stages, kernel.narrow_because,
        _widths(code.load_bytes), _widths(code.store_bytes), code.other_loads, code.registers,
        code.spill_bytes, code.code_bytes, f"{code.compile_seconds:.3f}", "; ".join(code.missed),
        software["triton"], software["torch"],
    )  # fmt: skip


def with_csv(outcomes: Iterable[Outcome], path: Path | None) -> Iterator[Outcome]:
    """The same outcomes, each written to `path` as one row when it comes."""
    if path is None:
        yield from outcomes
        return
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(CSV_COLUMNS)
        for outcome in outcomes:
            writer.writerow(csv_row(outcome))
            stream.flush()
            yield outcome


def _chosen_targets(names: list[str]) -> tuple[Target, ...]:
    known = {target.name: target for target in TARGETS}
    for name in names:
        if name not in known:
            raise ConfigError(f"target {name!r} is unknown; there are {', '.join(known)}")
    return tuple(known[name] for name in names) or TARGETS


def _layouts(object_layout: str | None) -> tuple[ObjectLayout, ...]:
    if object_layout is None:
        return tuple(ObjectLayout)
    try:
        return (ObjectLayout(object_layout),)
    except ValueError:
        raise ConfigError(
            f"object layout {object_layout!r} is unknown; use 'opaque' or 'token_major'"
        ) from None


@app.command()
def main(
    model: Annotated[
        list[str] | None, typer.Option(help="Model; repeat for several. All when left out.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="sm_80, sm_90, sm_100 or gfx942; repeat for several.")
    ] = None,
    object_layout: Annotated[str | None, typer.Option(help="opaque or token_major.")] = None,
    unaligned: Annotated[
        bool, typer.Option(help="Also the kernels for objects at odd addresses.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write one row for each kernel here.")
    ] = None,
) -> None:
    """Compile every copy kernel for devices that are not there, and read the machine code."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    entries = list(all_geometry_specs(tuple(model or ()), _layouts(object_layout)))
    specs = [entry for entry in entries if isinstance(entry, GeometrySpec)]
    refused = [entry for entry in entries if isinstance(entry, Refused)]
    total, running = compile_all(specs, _chosen_targets(target or []), jobs, unaligned=unaligned)
    progress = Console(stderr=True)
    running = with_csv(running, csv_path)
    outcomes = list(track(running, "compiling", total=total, console=progress, transient=True))
    console.print(summary_table(outcomes))
    for entry in refused:
        console.print(f"refused: {entry.model} {entry.variant}: {entry.reason}", soft_wrap=True)
    for reason in dict.fromkeys(o.kernel.narrow_because for o in outcomes):
        if reason:
            console.print(f"under 16 bytes: {reason}", soft_wrap=True)
    missed = [outcome for outcome in outcomes if outcome.code.missed]
    for outcome in missed:
        example = outcome.kernel.example
        console.print(
            f"missed: {outcome.target.name} {example.model} {example.variant} "
            f"{example.object_layout.value} kernel group {example.spec.kernel_group_index} "
            f"{outcome.kernel.special.direction.name.lower()}: {'; '.join(outcome.code.missed)}",
            soft_wrap=True,
        )
    console.print(
        f"{len(outcomes)} kernels from {len(specs)} copy specs; marks: widest access that "
        f"alignment permits, no spills, at most {REGISTER_LIMIT} registers; {len(missed)} missed",
        soft_wrap=True,
    )
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    app()
