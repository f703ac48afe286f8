"""`hma-triton top`: a cache server, live: memory, traffic, hits, pools, peers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from hma_triton.client import HmaClient
from hma_triton.config import default_url
from hma_triton.errors import ServerUnavailableError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

State = Mapping[str, Any]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@app.command()
def main(
    url: str = typer.Option("", help="The server. [default: the user's own socket]"),
    interval_s: float = typer.Option(1.0, min=0.05, help="Seconds between looks."),
    count: int = typer.Option(0, min=0, help="Looks before it ends. [default: 0, until Ctrl-C]"),
    curve_key: str = typer.Option("", help="Key file of a server on a network address."),
) -> None:
    """Watch a cache server."""
    console = Console()
    address = url or default_url()
    with HmaClient(
        address, role="top", curve_key=curve_key or None, connect_timeout_s=3.0
    ) as client:
        client.connect()
        before: State = client.status()
        looks = 0
        with Live(view(before, before, interval_s), console=console, screen=not count) as live:
            try:
                while not count or looks < count:
                    time.sleep(interval_s)
                    now = _look(client, before)
                    live.update(view(now, before, interval_s))
                    before, looks = now, looks + 1
            except KeyboardInterrupt:
                pass


def _look(client: HmaClient, before: State) -> State:
    """The state; the last one, marked, while the server is away."""
    try:
        return client.status(timeout_s=2.0)
    except ServerUnavailableError:
        return {**before, "away": True}


def view(now: State, before: State, seconds: float) -> Group:
    """The whole screen for two states `seconds` apart."""
    return Group(_head(now), _traffic(now, before, seconds), _pools(now))


def human(nbytes: float) -> str:
    """`nbytes` in the unit that keeps it below 1024."""
    for unit in _UNITS:
        if nbytes < 1024 or unit == _UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    raise AssertionError("the last unit takes everything")


def _head(now: State) -> Panel:
    arena, counters = now["arena"], now["counters"]
    share = arena["used_bytes"] / arena["nbytes"]
    grid = Table.grid(padding=(0, 3))
    grid.add_row(
        f"arena {human(arena['used_bytes'])} of {human(arena['nbytes'])} ({share:.0%})",
        f"pinned {human(now['pinned_bytes'])}",
        f"chunks {now['chunks']:,}",
        f"leases {now['leases']}",
    )
    grid.add_row(
        f"evicted {counters['evicted_objects']:,} objects",
        f"aborted {counters['aborted_objects']:,}",
        f"corrupt {counters['corrupt_objects']:,}",
        f"copies {now['running']} running, {now['queued']} queued",
    )
    away = " [red]away[/red]" if now.get("away") else ""
    title = f"pid {now['pid']}, up {now['uptime_s']:.0f} s, {now['url']}{away}"
    return Panel(grid, title=title)


def _traffic(now: State, before: State, seconds: float) -> Table:
    table = Table(title="traffic", expand=True)
    for column in ("what", "per second", "in all"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for family, labels, value in _counters(now):
        earlier = before["traffic"].get(family, {}).get(labels, 0.0)
        rate = max(0.0, value - earlier) / seconds
        name = family.removeprefix("hma_").replace("_", " ")
        in_bytes = family == "hma_copied_bytes"
        table.add_row(
            f"{name}: {labels}",
            human(rate) if in_bytes else f"{rate:,.1f}",
            human(value) if in_bytes else f"{value:,.0f}",
        )
    return table


def _counters(state: State) -> list[tuple[str, str, float]]:
    return [
        (family, labels, value)
        for family, values in state["traffic"].items()
        for labels, value in sorted(values.items())
        if value
    ]


def _pools(now: State) -> Table:
    table = Table(title="pools", expand=True)
    for column in ("instance", "rank", "pool", "chunk", "objects", "backend", "copies"):
        table.add_column(column)
    for pool in now["registrations"]:
        groups = ", ".join(
            human(group["nbytes"])
            + (" state" if group["recurrent"] else "")
            + (f" w{group['window_tokens']}" if group["window_tokens"] else "")
            for group in pool["object_groups"]
        )
        table.add_row(
            pool["instance_id"],
            f"{pool['rank']}/{pool['world_size']}",
            human(pool["pool_bytes"]),
            f"{pool['chunk_tokens']}",
            groups,
            pool["backend"],
            f"{pool['running']}",
        )
    return table
