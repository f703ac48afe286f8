"""`hma-triton bench server`: round trips of the cache server, beside LMCache's on request."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hma_triton.cli.copy_case import Register, model_registration, shape_registration
from hma_triton.cli.copy_rows import LMCACHE, OURS
from hma_triton.cli.measuring import MachineFacts, geometric_mean, machine_facts, write_csv
from hma_triton.cli.server_sides import LOOKUP, PING, RETRIEVE, STORE, LMCacheSide, OurSide
from hma_triton.errors import ConfigError
from hma_triton.geometries import list_variants
from hma_triton.shape_spec import format_kvcache_shape_spec, parse_kvcache_shape_spec

app = typer.Typer(add_completion=False)

DEFAULT_SHAPE = "(2,512,16,8,128):bfloat16:8"
_FILE_WIDTH = 160
_STEPS = (PING, LOOKUP, STORE, RETRIEVE)


@dataclass(frozen=True, slots=True)
class ServerRow:
    """Times of one kind of request. `nbytes` moved by each, 0 for messages and lookups.

    `times_lmcache` is LMCache's median over ours, from the same interleaved run.
    """

    case: str
    geometry: str
    tokens: int
    chunk_tokens: int
    what: str
    method: str
    threads: int
    nbytes: int
    repeats: int
    per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    gb_per_s: float
    times_lmcache: float | None


@app.command()
def bench_server(
    shapes: Annotated[
        list[str],
        typer.Option(
            "--kvcache-shape-spec",
            help="Pools by shape: (kv_size,NB,BS,NH,HS):dtype:layers[;...]; may be repeated. "
            f"[default: {DEFAULT_SHAPE}]",
        ),
    ] = [],  # noqa: B006 (typer copies it)
    models: Annotated[
        list[str], typer.Option("--model", help="Pools of a known model; may be repeated.")
    ] = [],  # noqa: B006
    variant: Annotated[
        str | None, typer.Option(help="Variant of the models. [default: cpu, else main]")
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of a request.", min=1)] = 2048,
    requests: Annotated[int, typer.Option(help="Requests to each server, in turn.", min=1)] = 30,
    threads: Annotated[
        int, typer.Option(help="Threads of a copy. [default: torch's setting]", min=0)
    ] = 0,
    compare: Annotated[
        str, typer.Option(help="lmcache: also LMCache's own server, for the shape specs.")
    ] = "",
    csv: Annotated[Path | None, typer.Option(help="Write all rows to this file.")] = None,
) -> None:
    """Measure messages, lookups, stores and retrieves per second, and their percentiles."""
    if compare not in ("", LMCACHE):
        raise ConfigError(f"--compare knows {LMCACHE}, not {compare!r}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    count = threads or torch.get_num_threads()
    rows: list[ServerRow] = []
    cases = _cases(shapes, models, variant)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, shape, register in cases:
            task = progress.add_task(name, total=requests)
            rows += measure(
                name,
                register,
                shape if compare else None,
                (tokens, requests, count),
                lambda task=task: progress.advance(task),  # type: ignore[misc]
            )
    facts = machine_facts()
    _print(console, rows, facts)
    if csv is not None:
        write_csv(csv, ServerRow, rows, facts)


def _cases(
    shapes: Sequence[str], models: Sequence[str], variant: str | None
) -> list[tuple[str, str | None, Register]]:
    """(name, shape spec if it is one, what makes the pools) of everything that is measured."""
    if not shapes and not models:
        shapes = [DEFAULT_SHAPE]
    cases: list[tuple[str, str | None, Register]] = []
    for spec in shapes:
        echoed = format_kvcache_shape_spec(parse_kvcache_shape_spec(spec))
        cases.append((echoed, echoed, partial(shape_registration, spec)))
    for name in models:
        chosen = variant or ("cpu" if "cpu" in list_variants(name) else "main")
        cases.append((f"{name}/{chosen}", None, partial(model_registration, name, chosen)))
    return cases


def measure(
    case: str,
    register: Register,
    lmcache_shape: str | None,
    sizes: tuple[int, int, int],
    advance: Callable[[], object],
) -> list[ServerRow]:
    """Rows of one case; `sizes` are tokens, requests and threads.

    Raises:
        ServerUnavailableError: a server that did not start or serve.
        TransferError: a load that gave other bytes than were stored.
    """
    tokens, requests, threads = sizes
    with ExitStack() as stack:
        ours = stack.enter_context(OurSide(register, tokens, requests, threads))
        other: LMCacheSide | None = None
        if lmcache_shape is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hma-bench-")))
            gib = max(1.0, 2.0 * (requests + 2) * ours.nbytes / 2**30)
            other = stack.enter_context(LMCacheSide(folder, gib, threads))
            other.connect(lmcache_shape, tokens)
        ours.start()
        for number in range(-1, requests):
            ours.request(number + 1)
            ours.check()
            if other is not None:
                other.timed_request(number + 1)
            if number < 0:
                # the first of each warms up
                ours.seconds.clear()
                if other is not None:
                    other.seconds.clear()
            else:
                advance()
        return _rows(case, ours, other, threads)


def _rows(case: str, ours: OurSide, other: LMCacheSide | None, threads: int) -> list[ServerRow]:
    geometry = "; ".join(
        f"group {index}: {len(group.layer_indices)} layers, {group.tokens_per_block} tokens a block"
        + (f", window {group.window_tokens}" if group.window_tokens else "")
        + (", recurrent" if group.recurrent_state else "")
        for index, group in enumerate(ours.engine.manager.kernel_groups)
    )
    rows = []
    sides = {OURS: ours.seconds} | ({} if other is None else {LMCACHE: other.seconds})
    for step in _STEPS:
        for method, seconds in sides.items():
            if step not in seconds:
                continue
            taken = np.asarray(seconds[step]) * 1e3
            middle, high, highest = (float(value) for value in np.percentile(taken, [50, 90, 99]))
            nbytes = ours.nbytes if step in (STORE, RETRIEVE) else 0
            times = None
            if method == OURS and other is not None and step in other.seconds:
                times = float(np.median(other.seconds[step])) * 1e3 / middle
            rows.append(
                ServerRow(
                    case=case,
                    geometry=geometry,
                    tokens=ours.tokens,
                    chunk_tokens=ours.chunk_tokens,
                    what=step,
                    method=method,
                    threads=threads,
                    nbytes=nbytes,
                    repeats=len(taken),
                    per_s=1e3 / float(taken.mean()),
                    p50_ms=middle,
                    p90_ms=high,
                    p99_ms=highest,
                    gb_per_s=nbytes / middle / 1e6,
                    times_lmcache=times,
                )
            )
    return rows


def _print(console: Console, rows: Sequence[ServerRow], facts: MachineFacts) -> None:
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        first = of_case[0]
        console.print(f"{case}: {first.geometry}", highlight=False)
        table = Table(
            title=f"{first.tokens} tokens in chunks of {first.chunk_tokens}; {facts.machine}, "
            f"{facts.cores} cores, {first.threads} threads, LMCache {facts.lmcache}"
        )
        for name in ("request", "server"):
            table.add_column(name)
        for name in ("per s", "p50 ms", "p90 ms", "p99 ms", "GB/s", "times LMCache"):
            table.add_column(name, justify="right")
        for row in of_case:
            table.add_row(
                row.what,
                row.method,
                f"{row.per_s:,.0f}",
                f"{row.p50_ms:.2f}",
                f"{row.p90_ms:.2f}",
                f"{row.p99_ms:.2f}",
                f"{row.gb_per_s:.2f}" if row.nbytes else "",
                "" if row.times_lmcache is None else f"{row.times_lmcache:.1f}",
            )
        console.print(table)
    for step in (LOOKUP, STORE, RETRIEVE):
        times = [row.times_lmcache for row in rows if row.what == step and row.times_lmcache]
        if times:
            console.print(f"{step}: {geometric_mean(times):.2f} x LMCache over {len(times)} cases")
