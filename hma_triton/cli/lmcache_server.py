"""`hma-triton lmcache-server`: LMCache's own server, with our KV transfers inside."""

from __future__ import annotations

import importlib
import logging

import typer

from hma_triton.integration.lmcache import VERSION_RANGE, install

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_PASS_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    # --help too is LMCache's
    "help_option_names": [],
}


@app.command(context_settings=_PASS_ON)
def lmcache_server(context: typer.Context) -> None:
    """Start `lmcache server` with every argument passed on, after putting our operations in place.

    Its KV transfers then run on this machine's CPU copier or Triton kernels; engines keep
    LMCache's connector (`lmcache.mp.mp_transfer_mode=lmcache_driven`).
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("hma_triton").setLevel(logging.INFO)
    install()
    start = importlib.import_module("lmcache.cli.main").main
    if "--help" in context.args or "-h" in context.args:
        typer.echo(f"Every option is LMCache's ({VERSION_RANGE}):")
    start(["server", *context.args])
