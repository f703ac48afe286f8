"""`hma-triton demo`: a hybrid model's KV goes to a cache server and comes back, every byte checked.

Needs no engine: a `DemoPool` plays the worker, with the geometry of a real model and with blocks
given and freed as an engine does. The server is a real one, in a process of its own.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from hma_triton.cli.demo_pool import DemoPool
from hma_triton.cli.demo_run import DemoRun, Movement, plain_copy
from hma_triton.cli.demo_scale import Scale, fit
from hma_triton.client import HmaClient
from hma_triton.config import ServerConfig
from hma_triton.geometries import load_geometry
from hma_triton.group_view import EngineGroupInfo
from hma_triton.server.launch import start_embedded

app = typer.Typer(pretty_exceptions_enable=False)

# Beyond the objects: what the arena's size classes may round up.
_ARENA_SLACK = 1.25
_WHOLE = "the prompt"
_SHARED = "a prompt that shares its first half"


def _rule(info: EngineGroupInfo) -> str:
    if info.recurrent_state:
        return "state"
    return "full" if info.sw_size_tokens < 0 else f"window {info.sw_size_tokens}"


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f}"


def _table(run: DemoRun, tokens: int) -> Table:
    """A row per kernel group; megabytes are 1e6 bytes."""
    table = Table(
        title=f"MB moved for {tokens} tokens of {run.pool.geometry.model}",
        caption="block: its tokens; all: what copying every block would have moved",
    )
    table.add_column("group", no_wrap=True)
    table.add_column("rule", no_wrap=True)
    for name in ("layers", "block", "stored", "retrieved", "all", "saved"):
        table.add_column(name, justify="right", no_wrap=True)
    totals = [0, 0, 0]
    for info in run.pool.infos:
        moved = (
            run.bytes_stored(info, tokens),
            run.bytes_retrieved(info, tokens),
            run.bytes_of_every_block(info, tokens),
        )
        totals = [total + more for total, more in zip(totals, moved, strict=True)]
        table.add_row(
            str(info.engine_group_id),
            _rule(info),
            str(len(info.layer_indices)),
            str(info.tokens_per_block),
            *map(_mb, moved),
            f"{1 - moved[1] / moved[2]:.0%}",
        )
    table.add_section()
    saved = f"{1 - totals[1] / totals[2]:.0%}"
    table.add_row("sum", "", "", "", *map(_mb, totals), saved)
    return table


def _speed(name: str, moved: Movement, plain: Movement) -> str:
    took = f"{_mb(moved.nbytes)} MB in {moved.seconds * 1e3:.0f} ms, {moved.gb_per_s:.1f} GB/s"
    return f"{name}: {took}; a plain copy of the same bytes: {plain.gb_per_s:.1f} GB/s"


def _check_hit(
    run: DemoRun, out: Console, name: str, tokens: list[int], expected: int, plant_fault: bool
) -> Movement | None:
    """Looks a prompt up, retrieves, verifies. None when anything is not as it must be."""
    digests = run.digests(tokens)
    limit = len(tokens)
    if any(info.recurrent_state for info in run.pool.infos):
        limit -= 1
    found = run.look_up(name, digests, limit)
    out.print(f"lookup of {name}: {found.tokens} of {len(tokens)} tokens ({found.reason})")
    if found.tokens != expected:
        out.print(f"[red]FAILED: {expected} tokens were expected")
        return None
    moved = run.retrieve(name, digests, found.tokens)
    if plant_fault:
        out.print(f"planted a fault: one bit of {run.pool.flip_a_bit(found.tokens)}")
    if name == _WHOLE:
        out.print(_table(run, found.tokens))
    verdict = run.verify(found.tokens)
    if moved.nbytes != verdict.pages_bytes:
        out.print(f"[red]FAILED: {verdict.pages_bytes} bytes were named, {moved.nbytes} moved")
        return None
    if not verdict.equal:
        for difference in verdict.differences[:5]:
            out.print(f"[red]{difference}")
        out.print(
            f"[red]FAILED: {len(verdict.differences)} page(s) differ, "
            f"{verdict.bytes_written_elsewhere} byte(s) were written elsewhere"
        )
        return None
    out.print(
        f"verified {name}: all {verdict.pages_bytes:,} bytes equal, no byte written elsewhere"
    )
    return moved


def _demonstrate(scale: Scale, client: HmaClient, out: Console, plant_fault: bool) -> bool:
    # A page is too little work to share out among threads.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = DemoPool(scale.geometry, scale.num_blocks)
    run = DemoRun(pool, client, scale.geometry.model, scale.chunk_tokens)
    words = np.random.default_rng(2).integers(0, 100_000, (2, scale.prompt_tokens)).tolist()
    digests = run.digests(words[0])
    # Twice: the first round only touches the arena's memory for the first time.
    run.compute_and_store(digests, scale.step_tokens)
    run.forget()
    stored = run.compute_and_store(digests, scale.step_tokens)
    expected = scale.stored_tokens
    if any(info.recurrent_state for info in pool.infos) and expected == scale.prompt_tokens:
        expected -= scale.chunk_tokens
    retrieved = _check_hit(run, out, _WHOLE, words[0], expected, plant_fault)
    if retrieved is None:
        return False
    half = expected // scale.chunk_tokens // 2 * scale.chunk_tokens
    if half:
        shared = words[0][:half] + words[1][half:]
        if _check_hit(run, out, _SHARED, shared, half, plant_fault) is None:
            return False
    for name, moved in (("stored", stored), ("retrieved", retrieved)):
        out.print(_speed(name, moved, plain_copy(moved.nbytes, threads)))
    return True


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(help="Whose geometry: a name `hma-triton inspect` knows.")
    ] = "gemma-3-27b-it",
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one object; chosen for the model if not given.")
    ] = None,
    memory_gb: Annotated[
        float, typer.Option(help="Memory of pool and objects together, in GiB.", min=0.01)
    ] = 2.0,
    plant_fault: Annotated[
        bool, typer.Option("--plant-fault", help="Damage one bit, to see that it is noticed.")
    ] = False,
) -> None:
    """Move a hybrid model's KV to a cache server and back; exit 0 only if every byte is equal."""
    out = Console(highlight=False, soft_wrap=True)
    scale = fit(load_geometry(model), int(memory_gb * 2**30), chunk_tokens)
    out.print(
        f"{scale.geometry.model}, {scale.layers_kept} of its {scale.layers_in_all} layers: a pool "
        f"of {_mb(scale.pool_bytes)} MB, a prompt of {scale.prompt_tokens} tokens in chunks of "
        f"{scale.chunk_tokens}"
    )
    with tempfile.TemporaryDirectory(prefix="hma-demo-") as folder:
        config = ServerConfig(
            url=f"ipc://{folder}/server.sock",
            host_bytes=int(scale.object_bytes * _ARENA_SLACK) + (64 << 20),
            # The arena holds this one prompt, and a hit pins all of it.
            pin_share=1.0,
        )
        server = start_embedded(config)
        try:
            client = HmaClient(server.url)
            try:
                fine = _demonstrate(scale, client, out, plant_fault)
            finally:
                client.close()
        finally:
            server.close()
    out.print("[green]every byte is equal" if fine else "[red]NOT every byte is equal")
    sys.exit(0 if fine else 1)
