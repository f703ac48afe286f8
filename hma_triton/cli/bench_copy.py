"""`hma-triton bench copy`: how fast this CPU moves the pages of a model, and out of how much."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hma_triton.cli.copy_case import (
    DEFAULT_REQUEST_BYTES,
    CopyCase,
    Register,
    RequestSize,
    make_case,
    model_registration,
    shape_registration,
)
from hma_triton.cli.copy_plot import plot_rows
from hma_triton.cli.copy_rows import (
    ALL_GROUPS,
    LMCACHE,
    OURS,
    PLAIN,
    CopyRow,
)
from hma_triton.cli.copy_run import check_bytes, measure, rows_of
from hma_triton.cli.measuring import geometric_mean, machine_facts, write_csv
from hma_triton.errors import ConfigError
from hma_triton.geometries import list_variants
from hma_triton.kernels.cpu import CpuCopier

app = typer.Typer(add_completion=False)

_DEFAULT_MODEL = "gemma-3-4b-it"
# Columns of output that goes to a file or a pipe.
_FILE_WIDTH = 180


def _cases(
    models: Sequence[str], shapes: Sequence[str], variant: str | None
) -> list[tuple[str, Register]]:
    """Names of what is measured, and what makes their pools."""
    if not models and not shapes:
        models = [_DEFAULT_MODEL]
    cases: list[tuple[str, Register]] = []
    for name in models:
        chosen = variant or ("cpu" if "cpu" in list_variants(name) else "main")
        cases.append((f"{name}/{chosen}", partial(model_registration, name, chosen)))
    return cases + [(spec, partial(shape_registration, spec)) for spec in shapes]


def _comparisons(text: str) -> frozenset[str]:
    wanted = frozenset(part.strip() for part in text.split(",") if part.strip())
    unknown = sorted(wanted - {PLAIN, LMCACHE})
    if unknown:
        raise ConfigError(f"--compare knows {PLAIN} and {LMCACHE}, not {', '.join(unknown)}")
    return wanted


_Shapes = Annotated[
    list[str],
    typer.Option(
        "--kvcache-shape-spec",
        help="Pools by shape: (kv_size,NB,BS,NH,HS):dtype:layers[;...]; --tokens sets NB.",
    ),
]
_Models = Annotated[
    list[str],
    typer.Option(
        "--model", help=f"Pools of a known model; may be repeated. [default: {_DEFAULT_MODEL}]"
    ),
]
_Variant = Annotated[
    str | None,
    typer.Option(help="Variant of the models. [default: cpu where there is one, else main]"),
]
_Tokens = Annotated[
    int, typer.Option(help="Tokens of the request; 0: as many as make --mib.", min=0)
]
_MiB = Annotated[int, typer.Option(help="Size of the request, in whole chunks.", min=1)]
_Threads = Annotated[
    list[int],
    typer.Option(help="Threads of a copy; may be repeated. [default: torch's setting]", min=1),
]
_Compare = Annotated[str, typer.Option(help="What to compare with: memcpy, lmcache, or both.")]
_Layout = Annotated[str, typer.Option(help="opaque, or LMCache's token_major.")]
_Implementation = Annotated[str, typer.Option(help="compiled, numpy, or auto.")]
_Repeats = Annotated[int, typer.Option(help="Timed copies of each kind, taken in turn.", min=1)]
_Csv = Annotated[Path | None, typer.Option(help="Write all rows to this file.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw GB/s over run bytes into this PNG.")]


@app.command()
def bench_copy(
    shapes: _Shapes = [],  # noqa: B006 (typer copies it)
    models: _Models = [],  # noqa: B006
    variant: _Variant = None,
    tokens: _Tokens = 0,
    mib: _MiB = DEFAULT_REQUEST_BYTES >> 20,
    threads: _Threads = [],  # noqa: B006
    compare: _Compare = PLAIN,
    object_layout: _Layout = "opaque",
    implementation: _Implementation = "auto",
    repeats: _Repeats = 15,
    csv: _Csv = None,
    plot: _Plot = None,
) -> None:
    """Measure the copy of paged pools on this CPU, by kernel group and for whole requests."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    wanted = _comparisons(compare)
    facts = machine_facts()
    rows: list[CopyRow] = []
    notes: list[str] = []
    counts = threads or [torch.get_num_threads()]
    size = RequestSize(tokens or None, mib << 20)
    cases = _cases(models, shapes, variant)
    with _progress(console) as progress:
        for name, register in cases:
            for count in counts:
                copier = CpuCopier(count, implementation)
                case = make_case(name, register, size, count, object_layout)
                rows += _measure_case(case, copier, wanted, repeats, progress, notes)
                copier.close()
                case.engine.close()
    _print_rows(console, rows)
    _print_marks(console, rows, facts.machine)
    for note in dict.fromkeys(notes):
        console.print(f"note: {note}", style="yellow", highlight=False)
    if csv is not None:
        write_csv(csv, CopyRow, rows, facts)
    if plot is not None:
        plot_rows(plot, rows, facts)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True) if console.is_terminal else console,
        transient=True,
    )


def _measure_case(
    case: CopyCase,
    copier: CpuCopier,
    compare: frozenset[str],
    repeats: int,
    progress: Progress,
    notes: list[str],
) -> list[CopyRow]:
    copier.prepare(case.engine.copy_specs)
    check_bytes(case, copier)
    steps = 2 * (len(case.groups) + 1)
    task = progress.add_task(f"{case.name}, {copier.threads} thread(s)", total=steps)
    rows: list[CopyRow] = []
    for measured in measure(
        case, copier, compare, repeats, partial(progress.advance, task), notes.append
    ):
        rows += rows_of(case, measured, copier)
    return rows


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _print_rows(console: Console, rows: Sequence[CopyRow]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading, justify in (
        ("case", "left"),
        ("group", "right"),
        ("threads", "right"),
        ("direction", "left"),
        ("method", "left"),
        ("MB", "right"),
        ("run B", "right"),
        ("p10 ms", "right"),
        ("p50 ms", "right"),
        ("p90 ms", "right"),
        ("GB/s", "right"),
        ("of memcpy", "right"),
        ("x lmcache", "right"),
    ):
        table.add_column(heading, justify=justify, no_wrap=heading != "case")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(
            row.case,
            row.kernel_group,
            str(row.threads),
            row.direction,
            row.method,
            f"{row.nbytes / 1e6:.1f}",
            str(row.run_bytes),
            f"{row.p10_ms:.2f}",
            f"{row.p50_ms:.2f}",
            f"{row.p90_ms:.2f}",
            f"{row.gb_per_s:.1f}",
            _ratio(row.share_of_memcpy),
            _ratio(row.times_lmcache),
            style="bold" if row.kernel_group == ALL_GROUPS and row.method == OURS else "",
        )
    console.print(table)


def _print_marks(console: Console, rows: Sequence[CopyRow], machine: str) -> None:
    """Geometric means and worst cases over whole requests."""
    whole = [row for row in rows if row.method == OURS and row.kernel_group == ALL_GROUPS]
    for direction in ("store", "retrieve"):
        for count in sorted({row.threads for row in whole}):
            chosen = [row for row in whole if row.direction == direction and row.threads == count]
            shares = [row.share_of_memcpy for row in chosen if row.share_of_memcpy is not None]
            times = [row.times_lmcache for row in chosen if row.times_lmcache is not None]
            parts = [f"{direction}, {count} thread(s)"]
            if shares:
                parts.append(
                    f"of a plain copy: {geometric_mean(shares):.2f} in the geometric mean of "
                    f"{len(shares)}, lowest {min(shares):.2f}"
                )
            if times:
                parts.append(
                    f"x LMCache: {geometric_mean(times):.1f} in the geometric mean of "
                    f"{len(times)}, lowest {min(times):.1f}"
                )
            console.print("; ".join(parts), highlight=False)
    console.print(f"machine: {machine}", highlight=False)
