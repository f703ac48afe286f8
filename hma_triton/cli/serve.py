"""`hma-triton serve`: run the cache server.

Exit status: 0 stopped and all copies had ended; 2 settings that cannot be served, in one line;
5 stopped, but a copy had not ended within `--shutdown-s`, or a driver call hangs.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hma_triton.config import VERIFY_MODES, ServerConfig, default_url
from hma_triton.curve_keys import make_key_file
from hma_triton.errors import ConfigError
from hma_triton.server.launch import EXIT_COPIES_LEFT, serve
from hma_triton.server.logs import set_up_logging

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_LEVELS = ("debug", "info", "warning", "error")

_Url = Annotated[
    str,
    typer.Option(
        help="ipc:///absolute/path or tcp://127.0.0.1:port. [default: an ipc socket in a 0700 "
        "directory of the user]"
    ),
]
_Separate = Annotated[
    bool, typer.Option(help="Keep groups with different reuse rules in objects of their own.")
]
_CopierThreads = Annotated[
    int, typer.Option(min=0, help="Threads within one copy. [default: 0, the copy path's own]")
]
_NumaNode = Annotated[
    int | None,
    typer.Option(min=0, help="Take the host memory from this node: the GPU's. [default: any]"),
]
_Touch = Annotated[
    str,
    typer.Option(
        help="Take the host memory at the `start`, in the `background`, or `off`: as objects come."
    ),
]
_Pin = Annotated[
    str,
    typer.Option(
        help="Pin the host memory for GPUs: `auto`, in the background where there is one; `on`, "
        "before serving, or not start; `off`, never."
    ),
]
_ProgramCap = Annotated[
    int | None,
    typer.Option(min=1, help="Most programs of a copy on a GPU. [default: by architecture]"),
]
_MetricsPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Prometheus on 127.0.0.1. [default: none]")
]
_CurveKey = Annotated[
    Path | None, typer.Option(help="Key file; needed for a tcp address other than loopback.")
]
_MakeCurveKey = Annotated[Path | None, typer.Option(help="Write a new key file there, and end.")]


@app.command()
def main(
    url: _Url = "",
    host_gb: float = typer.Option(4.0, min=0.001, help="Host memory for objects, in GiB."),
    separate_object_groups: _Separate = True,
    verify: str = typer.Option("off", help=f"Checksums on retrieve: {', '.join(VERIFY_MODES)}."),
    threads: int = typer.Option(0, min=0, help="Copies at a time. [default: 0, from the CPUs]"),
    copier_threads: _CopierThreads = 0,
    max_registrations: int = typer.Option(64, min=1, help="Pools (one per engine rank)."),
    max_peers: int = typer.Option(1024, min=1, help="Connections."),
    queue_limit: int = typer.Option(64, min=1, help="Copies that may wait, per pool."),
    lease_s: float = typer.Option(60.0, help="How long a lookup's promise holds."),
    pin_share: float = typer.Option(0.5, help="Most of the memory that promises may hold."),
    shutdown_s: float = typer.Option(5.0, help="How long running copies may take after SIGTERM."),
    hugepages: str = typer.Option("off", help="For the host memory: off, thp or hugetlb."),
    numa_node: _NumaNode = None,
    touch: _Touch = "background",
    pin: _Pin = "auto",
    program_cap: _ProgramCap = None,
    metrics_port: _MetricsPort = None,
    parent_pid: int | None = typer.Option(None, help="End when this process ends."),
    curve_key: _CurveKey = None,
    make_curve_key: _MakeCurveKey = None,
    log_level: str = typer.Option("info", help=f"One of {', '.join(_LEVELS)}."),
    log_json: bool = typer.Option(False, help="Log one JSON object a line."),
) -> None:
    """Run the cache server until SIGTERM or SIGINT."""
    if make_curve_key is not None:
        make_key_file(make_curve_key)
        typer.echo(f"wrote {make_curve_key}; give it to `serve --curve-key` and to the clients")
        return
    if log_level not in _LEVELS:
        raise ConfigError(f"log level {log_level!r} is unknown; use one of {', '.join(_LEVELS)}")
    set_up_logging(log_level, as_json=log_json)
    status = serve(
        ServerConfig(
            url=url or default_url(),
            host_bytes=int(min(host_gb, 1e9) * (1 << 30)),
            separate_object_groups=separate_object_groups,
            verify=verify,
            copy_threads=threads or default_copy_threads(),
            copier_threads=copier_threads or None,
            max_registrations=max_registrations,
            max_peers=max_peers,
            queue_limit=queue_limit,
            lease_s=lease_s,
            pin_share=pin_share,
            shutdown_s=shutdown_s,
            metrics_port=metrics_port,
            parent_pid=parent_pid,
            curve_key_file=None if curve_key is None else str(curve_key),
            hugepages=hugepages,
            numa_node=numa_node,
            touch=touch,
            pin=pin,
            program_cap=program_cap,
        )
    )
    _end(status)


def _end(status: int) -> NoReturn:
    logging.shutdown()
    if status == EXIT_COPIES_LEFT:
        # a copy thread that is still busy must not hold the process
        os._exit(status)
    raise typer.Exit(status)


def default_copy_threads() -> int:
    """Two at least, so that one pool's copy never holds up another's."""
    return max(2, min(8, len(os.sched_getaffinity(0)) // 2))
