"""`hma-triton`: hands each sub-command to its module, which is imported only when it is asked for.

Exit status: 0 done; 1 the check that was asked for said no; 2 bad usage or input, in one line; 3 a
package that this sub-command needs is not installed, in one line.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import typer

from hma_triton.errors import HmaError

EXIT_BAD_INPUT = 2
EXIT_NOT_INSTALLED = 3

# Import name of a package that not every installation has: what installs it.
_INSTALLED_BY = {
    "cuda": "hma-triton[cuda]",
    "lmcache": "hma-triton[lmcache]",
    "matplotlib": "hma-triton[plot]",
    "numba": "hma-triton[cpu]",
    "transformers": "hma-triton[vllm]",
    "triton": "triton",
    "vllm": "hma-triton[vllm]",
}


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One sub-command: its name, the module of `hma_triton.cli` that has it, one line of help."""

    name: str
    module: str
    help: str

    def load(self) -> Callable[..., Any]:
        """The module's `app`, ready to be called with `args` and `prog_name`."""
        target: typer.Typer = importlib.import_module(f"hma_triton.cli.{self.module}").app
        return target


SUBCOMMANDS = (
    Subcommand("demo", "demo", "Move a hybrid model's KV to a server and back, check every byte."),
    Subcommand("serve", "serve", "Run the cache server."),
    Subcommand("top", "top", "Watch a cache server live."),
    Subcommand("tune", "tune", "Find the best copy settings for this device."),
    Subcommand("inspect", "inspect", "Show the groups and layouts of a model's KV."),
    Subcommand("doctor", "doctor", "Say what this machine can do, and why not."),
    Subcommand("lmcache-server", "lmcache_server", "Run LMCache's server on our copy path."),
)
BENCHMARKS = (
    Subcommand("copy", "bench_copy", "Measure the copy of paged pools on this CPU."),
    Subcommand("compile", "bench_compile", "Compile every kernel variant, without a GPU."),
    Subcommand("server", "bench_server", "Measure the server's round trips."),
    Subcommand("lmcache", "bench_lmcache", "Measure our transfers inside LMCache beside its own."),
    Subcommand("gpu", "bench_gpu", "Check and measure everything on one GPU."),
    Subcommand("e2e", "bench_e2e", "Measure time to first token on a real engine."),
)

app = typer.Typer(
    help="Moves the KV of hybrid models out of paged pools into host memory and back.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure.", no_args_is_help=True)


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None where there is none."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hma-triton {installed_version('hma-triton') or '(a checkout, not installed)'}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


def _stop(status: int, why: str) -> NoReturn:
    typer.echo(f"hma-triton: {why}", err=True)
    sys.exit(status)


def run(command: Subcommand, prog_name: str, args: list[str]) -> None:
    """Runs a sub-command with its own options; turns what the user can mend into one line."""
    try:
        command.load()(args=args, prog_name=prog_name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALLED_BY:
            raise
        need = f"`{prog_name}` needs the package {package}, which is not installed"
        _stop(EXIT_NOT_INSTALLED, f"{need}: pip install '{_INSTALLED_BY[package]}'")
    except HmaError as error:
        _stop(EXIT_BAD_INPUT, str(error))


def _add(parent: typer.Typer, command: Subcommand, path: str) -> None:
    # Everything after the name, --help included, belongs to the sub-command's own parser.
    @parent.command(
        command.name,
        help=command.help,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def _forward(context: typer.Context) -> None:
        run(command, f"{path} {command.name}", context.args)


for _command in SUBCOMMANDS:
    _add(app, _command, "hma-triton")
for _command in BENCHMARKS:
    _add(bench, _command, "hma-triton bench")
app.add_typer(bench, name="bench")


if __name__ == "__main__":
    app()
