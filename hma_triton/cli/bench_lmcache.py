"""`hma-triton bench lmcache`: our KV transfers inside LMCache beside its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hma_triton.cli.lmcache_pools import TransferCase, make_case
from hma_triton.cli.lmcache_servers import OURS, OWN, both_servers
from hma_triton.cli.measuring import (
    MachineFacts,
    geometric_mean,
    machine_facts,
    percentiles_ms,
    take_turns,
    write_csv,
)
from hma_triton.errors import ConfigError, TransferError
from hma_triton.integration.lmcache import install, uninstall
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kv_format import EngineKVFormat

app = typer.Typer(add_completion=False)

PLAIN = "memcpy"
# Our speed over LMCache's own operation, geometric mean over layouts.
MARKS = {Direction.STORE: 5.0, Direction.RETRIEVE: 2.0}
DEFAULT_SHAPES = ("(2,512,16,8,128):bfloat16:8", "(1,512,16,1,576):bfloat16:28")
_FILE_WIDTH = 160

Operation = Callable[..., None]


@dataclass(frozen=True, slots=True)
class LMCacheRow:
    """One measured direction: an operation on one layout, or a request inside a server."""

    what: str
    direction: str
    method: str
    threads: int
    nbytes: int
    repeats: int
    p10_ms: float
    p50_ms: float
    p90_ms: float
    gb_per_s: float
    # our median time against the other's, in the same interleaved run
    share_of_memcpy: float | None
    times_lmcache: float | None


@app.command()
def bench_lmcache(
    formats: Annotated[
        list[str], typer.Option("--format", help="Layout by name; may be repeated. [default: all]")
    ] = [],  # noqa: B006 (typer copies it)
    megabytes: Annotated[int, typer.Option(help="Size of a request, in MB.", min=1)] = 128,
    repeats: Annotated[int, typer.Option(help="Timed transfers of each kind, in turn.", min=1)] = 7,
    threads: Annotated[
        int, typer.Option(help="Threads of a copy. [default: torch's setting]", min=0)
    ] = 0,
    servers: Annotated[
        bool, typer.Option(help="Also time requests inside two running servers.")
    ] = True,
    shapes: Annotated[
        list[str],
        typer.Option("--kvcache-shape-spec", help="Pools of the requests; may be repeated."),
    ] = list(DEFAULT_SHAPES),  # noqa: B006
    tokens: Annotated[int, typer.Option(help="Tokens of a request.", min=256)] = 6144,
    requests: Annotated[int, typer.Option(help="Requests to each server, in turn.", min=1)] = 6,
    csv: Annotated[Path | None, typer.Option(help="Write all rows to this file.")] = None,
) -> None:
    """Time our transfer operations against LMCache's own and a plain copy, in one run."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    chosen = _formats(formats)
    count = threads or torch.get_num_threads()
    rows: list[LMCacheRow] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("layouts", total=len(chosen))
        for fmt in chosen:
            rows += measure_format(fmt, megabytes * 1_000_000, repeats, count)
            progress.advance(task)
        if servers:
            task = progress.add_task("servers", total=requests * len(shapes))
            for shape in shapes:
                rows += measure_servers(
                    shape, tokens, requests, count, lambda: progress.advance(task)
                )
    facts = machine_facts()
    _print(console, rows, facts)
    if csv is not None:
        write_csv(csv, LMCacheRow, rows, facts)


def _formats(names: Sequence[str]) -> list[EngineKVFormat]:
    unknown = [name for name in names if name not in EngineKVFormat.__members__]
    if unknown:
        known = ", ".join(EngineKVFormat.__members__)
        raise ConfigError(f"no layout is called {', '.join(unknown)}; there are {known}")
    return [EngineKVFormat[name] for name in names] or list(EngineKVFormat)


def measure_format(
    fmt: EngineKVFormat, nbytes: int, repeats: int, threads: int
) -> list[LMCacheRow]:
    """Rows of one layout: ours, LMCache's and a plain copy, both directions, taken in turn.

    Raises:
        TransferError: the two operations gave different objects.
    """
    installation = install(CpuCopier(threads))
    device_ops = installation.device_ops
    try:
        ours: Operation = device_ops.multi_layer_block_kv_transfer
        own: Operation = type(device_ops).multi_layer_block_kv_transfer.__get__(device_ops)
        case = make_case(fmt, nbytes)
        _check(case, ours, own)
        rows = []
        for direction in Direction:
            seconds = take_turns(
                {
                    OURS: _bind(ours, case.arguments(direction), threads),
                    OWN: _bind(own, case.arguments(direction), threads),
                    PLAIN: _plain(case, direction, threads),
                },
                repeats,
            )
            rows += _rows(fmt.name, direction, seconds, threads, case.nbytes)
        return rows
    finally:
        uninstall()


def _check(case: TransferCase, ours: Operation, own: Operation) -> None:
    ours(*case.arguments(Direction.STORE))
    stored = case.arena.clone()
    case.arena.zero_()
    own(*case.arguments(Direction.STORE))
    if not torch.equal(stored, case.arena):
        raise TransferError(f"{case.engine_kv_format.name}: objects differ from LMCache's")


def _bind(operation: Operation, arguments: tuple[Any, ...], threads: int) -> Callable[[], None]:
    def run() -> None:
        torch.set_num_threads(threads)
        operation(*arguments)

    return run


def _plain(case: TransferCase, direction: Direction, threads: int) -> Callable[[], None]:
    pages, objects = case.storage[: case.nbytes], case.arena[: case.nbytes]
    target, source = (objects, pages) if direction is Direction.STORE else (pages, objects)

    def run() -> None:
        torch.set_num_threads(threads)
        target.copy_(source)

    return run


def measure_servers(
    shape: str, tokens: int, requests: int, threads: int, advance: Callable[[], None]
) -> list[LMCacheRow]:
    """Rows of requests inside two servers, LMCache's own and ours, asked in turn.

    Raises:
        ServerUnavailableError: a server that did not start or serve.
        TransferError: a retrieve that gave other bytes than were stored.
    """
    groups = importlib.import_module("lmcache.v1.kv_layer_groups").parse_kvcache_shape_spec(shape)
    whole = tokens // 256 * 256
    nbytes = sum(
        d.kv_size * d.nl * d.nh * d.hs * d.element_size * whole
        for d in (group.shape_desc for group in groups)
    )
    gib = max(1.0, 2.0 * requests * nbytes / 2**30)
    with both_servers(gib, threads) as servers:
        for server in servers.values():
            server.connect(shape, tokens)
        for number in range(requests):
            for server in servers.values():
                server.request(number)
            advance()
        times = {kind: server.times() for kind, server in servers.items()}
    what = f"{whole} tokens {shape}"
    rows = []
    for direction in Direction:
        taken = {
            kind: list(
                found.store_seconds if direction is Direction.STORE else found.retrieve_seconds
            )
            for kind, found in times.items()
        }
        rows += _rows(what, direction, taken, threads, nbytes)
    return rows


def _rows(
    what: str, direction: Direction, seconds: dict[str, list[float]], threads: int, nbytes: int
) -> list[LMCacheRow]:
    middles = {name: percentiles_ms(taken)[1] for name, taken in seconds.items()}
    rows = []
    for name, taken in seconds.items():
        low, middle, high = percentiles_ms(taken)
        share = middles[PLAIN] / middle if PLAIN in middles and name != PLAIN else None
        rows.append(
            LMCacheRow(
                what=what,
                direction=direction.name.lower(),
                method=name,
                threads=threads,
                nbytes=nbytes,
                repeats=len(taken),
                p10_ms=low,
                p50_ms=middle,
                p90_ms=high,
                gb_per_s=nbytes / middle / 1e6,
                share_of_memcpy=share,
                times_lmcache=middles[OWN] / middle if name == OURS else None,
            )
        )
    return rows


def _print(console: Console, rows: Sequence[LMCacheRow], facts: MachineFacts) -> None:
    table = Table(title=f"{facts.machine}, {facts.cores} cores, LMCache {facts.lmcache}")
    for name in ("layout or request", "direction", "MB", "ours GB/s", "LMCache GB/s"):
        table.add_column(name, justify="left" if name[0] in "ld" else "right")
    table.add_column("of a plain copy", justify="right")
    table.add_column("times LMCache", justify="right")
    by_kind = {(row.what, row.direction, row.method): row for row in rows}
    for (what, direction, method), row in by_kind.items():
        if method != OURS:
            continue
        other = by_kind[what, direction, OWN]
        share = "" if row.share_of_memcpy is None else f"{row.share_of_memcpy:.2f}"
        table.add_row(
            what, direction, f"{row.nbytes / 1e6:.0f}", f"{row.gb_per_s:.2f}",
            f"{other.gb_per_s:.2f}", share, f"{row.times_lmcache or 0:.1f}",
        )  # fmt: skip
    console.print(table)
    for way in Direction:
        _print_marks(console, rows, way)


def _print_marks(console: Console, rows: Sequence[LMCacheRow], way: Direction) -> None:
    word = way.name.lower()
    ours = [row for row in rows if row.method == OURS and row.direction == word]
    layouts = [row for row in ours if row.share_of_memcpy is not None]
    inside = [row for row in ours if row.share_of_memcpy is None]
    if layouts:
        times = geometric_mean(row.times_lmcache or 0 for row in layouts)
        share = geometric_mean(row.share_of_memcpy or 0 for row in layouts)
        verdict = "met" if times >= MARKS[way] else "missed"
        console.print(
            f"{word}: {times:.2f} x LMCache over {len(layouts)} layouts "
            f"(mark {MARKS[way]:g} x: {verdict}), {share:.2f} of a plain copy"
        )
    if inside:
        times = geometric_mean(row.times_lmcache or 0 for row in inside)
        console.print(f"{word} inside a server: {times:.2f} x LMCache")
