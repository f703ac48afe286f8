"""`hma-triton inspect`: the groups and layouts of a model's KV, or why they are refused."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hma_triton.cli.inspect_plot import draw_pool, lanes_of_groups
from hma_triton.cli.inspect_report import (
    Report,
    build_report,
    caches_to_draw,
    layer_looks,
)
from hma_triton.cli.inspect_save import save_geometry
from hma_triton.cli.inspect_subject import Subject, subject_of_spec, subject_of_target
from hma_triton.errors import ConfigError, GeometryError
from hma_triton.integration.vllm.kv_cache_specs import groups_of, leaf_specs, spec_kind

app = typer.Typer(pretty_exceptions_enable=False)

_AUTO = "auto"


@app.command()
def inspect(
    target: Annotated[
        str | None,
        typer.Argument(help="a model folder (needs vLLM), a geometry file, or a geometry's name"),
    ] = None,
    kvcache_shape_spec: Annotated[
        str | None, typer.Option(help="(kv_size,NB,BS,NH,HS):dtype:layers[;...] instead of TARGET")
    ] = None,
    variant: Annotated[str, typer.Option(help="variant of a geometry")] = "main",
    chunk_tokens: Annotated[str, typer.Option(help="tokens of a chunk, or auto")] = _AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    plot: Annotated[Path | None, typer.Option(help="draw the pool into this file")] = None,
    save: Annotated[Path | None, typer.Option(help="save a model folder's geometry here")] = None,
) -> None:
    """Show engine, kernel and object groups, what a token costs, and why a layout is refused.

    Exit 1 when the layout is refused.
    """
    if (target is None) == (kvcache_shape_spec is None):
        raise ConfigError("give either TARGET or --kvcache-shape-spec")
    subject = (
        subject_of_target(target, variant)
        if target is not None
        else subject_of_spec(kvcache_shape_spec or "")
    )
    if save is not None:
        save_geometry(subject, save)
    report, refusal = None, ""
    try:
        report = build_report(subject, _chunk(chunk_tokens))
    except GeometryError as error:
        refusal = str(error)
    if plot is not None:
        _draw(subject, report, refusal, plot)
    if as_json:
        typer.echo(json.dumps(_as_json(subject, report, refusal), indent=1))
    elif report is not None:
        _print(report)
    else:
        _print_refusal(subject, refusal)
    if report is None:
        raise typer.Exit(1)


def _chunk(text: str) -> int | None:
    if text == _AUTO:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"chunk {text!r} is neither a number of tokens nor {_AUTO!r}")
    return int(text)


def _as_json(subject: Subject, report: Report | None, refusal: str) -> dict[str, object]:
    if report is not None:
        return {"refused": None, **asdict(report)}
    return {
        "refused": refusal,
        "title": subject.title,
        "platform": subject.platform,
        "layout": subject.layout,
        "caches": [asdict(look) for look in layer_looks(subject)],
    }


def _draw(subject: Subject, report: Report | None, refusal: str, file: Path) -> None:
    caches = caches_to_draw(subject, report)
    labels, layers = _lane_labels(subject, report)
    lanes = lanes_of_groups(labels, layers, caches, subject.num_blocks)
    state = fill(f"refused: {refusal}", 150) if refusal else "served"
    title = f"{subject.title}, {subject.layout}, {subject.platform}\n{state}"
    draw_pool(lanes, subject.pool_bytes, title, file)


def _lane_labels(
    subject: Subject, report: Report | None
) -> tuple[dict[int, str], dict[int, list[str]]]:
    """Label and layer names of each engine group."""
    groups = groups_of(subject.kv_cache_config)
    if not groups and report is not None:
        rows = report.kernel_groups
        labels = {row.engine_group: f"group {row.engine_group}" for row in rows}
        return labels, {row.engine_group: list(row.layers) for row in rows}
    labels = {
        index: f"group {index}: {spec_kind(leaf_specs(group.kv_cache_spec)[0])}\n"
        f"{len(group.layer_names)} layers"
        for index, group in enumerate(groups)
    }
    return labels, {index: list(group.layer_names) for index, group in enumerate(groups)}


def _console() -> Console:
    """A console wide enough for the tables, also where the output is no terminal."""
    return Console(width=max(Console().width, 150))


def _print(report: Report) -> None:
    console = _console()
    console.print(f"[bold]{report.title}[/bold]: layout {report.layout}")
    console.print(f"platform: {report.platform}", highlight=False)
    console.print(_engine_table(report))
    console.print(_kernel_table(report))
    console.print(_object_table(report))
    console.print(
        f"chunk {report.chunk_tokens:,} tokens, {report.chunk_bytes:,} bytes; "
        f"{report.bytes_per_token:,.1f} bytes per token in the pool, "
        f"{report.chunk_bytes / report.chunk_tokens:,.1f} stored",
        highlight=False,
    )
    if report.pool_block_bytes is not None:
        most = max(group.block_bytes for group in report.engine_groups)
        console.print(
            f"a block id takes {report.pool_block_bytes:,} bytes of the pool; the fullest group "
            f"uses {most / report.pool_block_bytes:.1%} of them",
            highlight=False,
        )
    if report.excluded_layers:
        console.print(
            f"not moved: {_names(report.excluded_layers)} (another layer's cache, or "
            "a group that keeps nothing)"
        )


def _engine_table(report: Report) -> Table:
    table = _table("engine groups", "id", "kind", "layers", "tokens/block", "window", "bytes/block")
    for row in report.engine_groups:
        kind = row.kind if row.cacheable else f"{row.kind} (keeps nothing)"
        table.add_row(
            str(row.engine_group),
            kind,
            str(row.num_layers),
            f"{row.tokens_per_block:,}",
            _window(row.window_tokens, row.recurrent),
            f"{row.block_bytes:,}",
        )
    return table


def _kernel_table(report: Report) -> Table:
    table = _table(
        "kernel groups",
        "id",
        "group",
        "layers",
        "format",
        "heads x size",
        "dtype",
        "slots/block",
        "bytes/block",
        "bytes/token",
        "edit",
    )
    for row in report.kernel_groups:
        table.add_row(
            str(row.kernel_group),
            str(row.engine_group),
            str(row.num_layers),
            row.format.removeprefix("NL_X_"),
            f"{row.planes} x {row.heads} x {row.head_size:,}",
            row.dtype,
            f"{row.slots_per_block:,}",
            f"{row.block_bytes:,}",
            f"{row.bytes_per_token:,.1f}",
            row.edit,
        )
    return table


def _object_table(report: Report) -> Table:
    table = _table("object groups", "id", "kernel groups", "a hit needs", "bytes/object")
    for row in report.object_groups:
        needs = _window(row.window_tokens, row.recurrent)
        table.add_row(
            str(row.object_group),
            ", ".join(map(str, row.kernel_groups)),
            needs if needs != "-" else "every chunk",
            f"{row.object_bytes:,}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        is_text = column in ("kind", "format", "dtype", "edit", "kernel groups", "a hit needs")
        table.add_column(column, justify="left" if is_text else "right")
    return table


def _window(window_tokens: int | None, recurrent: bool) -> str:
    if recurrent:
        return "last state"
    return f"{window_tokens:,} tokens" if window_tokens is not None else "-"


def _print_refusal(subject: Subject, refusal: str) -> None:
    console = _console()
    console.print(f"[bold]{subject.title}[/bold]: layout {subject.layout}")
    console.print(f"platform: {subject.platform}", highlight=False)
    console.print(f"[bold red]refused[/bold red]: {refusal}", highlight=False, markup=True)
    table = _table("caches as registered", "kind", "layers", "shape", "strides", "dtype")
    for look in layer_looks(subject):
        table.add_row(
            look.kind,
            _names(look.layers),
            str(list(look.shape)),
            str(list(look.strides)),
            look.dtype,
        )
    console.print(table)


def _names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"
