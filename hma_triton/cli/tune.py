"""`hma-triton tune`: finds launch configs for this device on scratch buffers and writes them down.

With `--replay FILE` it decides on recorded measurements instead, which needs no device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from hma_triton.autotune import (
    BAND,
    Choice,
    Measurement,
    Recording,
    candidates,
    decide,
    measure,
    path_candidates,
    read_recording,
    write_recording,
)
from hma_triton.autotune_scratch import ScratchCopy, ScratchSampler
from hma_triton.errors import ConfigError
from hma_triton.geometries.scratch_copies import scratch_copies
from hma_triton.kernels.addressing import ObjectLayout
from hma_triton.kernels.launch_environment import environment
from hma_triton.tuning import (
    CONFIG_DIRECTORY,
    Environment,
    KernelConfig,
    TuneKey,
    TuneTable,
    write_values,
)

app = typer.Typer(pretty_exceptions_enable=False)
# one size inside each bucket: 512 KiB, 8 MiB, 128 MiB, 512 MiB
_SIZES_BYTES = (512 << 10, 8 << 20, 128 << 20, 512 << 20)
_PLAIN_WIDTH = 110


def choices_table(choices: list[Choice]) -> Table:
    """One line for each key."""
    table = Table(title="launch configs")
    for name in ("run bytes", "runs", "rows", "word", "direction", "bytes moved"):
        table.add_column(name, justify="right")
    for name in ("in use", "chosen", "us in use", "us", "GB/s", "why"):
        table.add_column(name)
    for choice in choices:
        key = choice.key
        table.add_row(
            str(key.run_bytes),
            str(key.runs_per_page),
            str(key.rows),
            str(key.word_bytes),
            key.direction,
            str(choice.nbytes),
            _short(choice.incumbent),
            _short(choice.config),
            "-" if choice.incumbent_us is None else f"{choice.incumbent_us:.1f}",
            f"{choice.median_us:.1f}",
            f"{choice.gigabytes_per_second:.2f}",
            choice.reason,
        )
    return table


def _short(config: KernelConfig) -> str:
    launch = f"{config.tile_words}w {config.warps}x {config.stages}s {config.program_cap}p"
    return launch if config.path == "zero_copy" else f"{config.path} {launch}"


def decide_and_write(
    recording: Recording, directory: Path, band: float, *, write: bool
) -> tuple[list[Choice], Path | None]:
    """Decide on a recording; write what was chosen into its environment's file in `directory`.

    Raises:
        ConfigError: a recording that cannot be decided, or a file of another environment.
    """
    table = TuneTable(recording.environment, directory)
    choices = decide(recording.measurements, table.lookup, band)
    if not write or not choices:
        return choices, None
    values = [choice.tuned_value(recording.environment) for choice in choices]
    return choices, write_values(values, recording.environment, directory)


def _measure_here(
    copies: dict[TuneKey, ScratchCopy], sampler: ScratchSampler, where: Environment,
    directory: Path, rounds: int, console: Console,
) -> Recording:  # fmt: skip
    table = TuneTable(where, directory)
    warp = torch.cuda.get_device_properties(sampler.device).warp_size

    def configs(key: TuneKey) -> list[KernelConfig]:
        current = table.lookup(key)
        others = path_candidates(current, copies[key].other_paths)
        return [current, *candidates(key.word_bytes, warp), *others]

    nbytes = {key: copy.num_blocks * copy.spec.block_bytes for key, copy in copies.items()}
    found: list[Measurement] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=sum(len(set(configs(key))) for key in copies))
        for measurement in measure(nbytes, configs, sampler, rounds):
            found.append(measurement)
            progress.advance(task)
    return Recording(where, tuple(found))


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Geometry to tune for.")] = "gemma-3-27b",
    variant: Annotated[str, typer.Option(help="Variant of the geometry.")] = "main",
    object_layout: Annotated[ObjectLayout, typer.Option()] = ObjectLayout.OPAQUE,
    device: Annotated[str, typer.Option(help="Device to tune.")] = "cuda:0",
    rounds: Annotated[int, typer.Option(min=5, help="Rounds of each config.")] = 15,
    band: Annotated[
        float, typer.Option(min=0.0, help="How much faster a new config must be, as a share.")
    ] = BAND,
    record: Annotated[Path | None, typer.Option(help="Also write the measurements here.")] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Decide on these measurements; nothing is measured.")
    ] = None,
    directory: Annotated[
        Path, typer.Option(help="Where config files are read and written.")
    ] = CONFIG_DIRECTORY,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide, write nothing.")] = False,
) -> None:
    """Find the best copy settings for this device; serving never does."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    if not directory.is_dir():
        raise ConfigError(f"--directory {directory}: no such folder")
    sampler = None
    if replay is not None:
        recording = read_recording(replay)
    else:
        copies: dict[TuneKey, ScratchCopy] = {}
        sampler = ScratchSampler(torch.device(device), copies)
        copies.update(scratch_copies(model, variant, object_layout, _SIZES_BYTES))
        recording = _measure_here(
            copies, sampler, environment(sampler.device), directory, rounds, console
        )
        if record is not None:
            write_recording(recording, record)
    choices, written = decide_and_write(recording, directory, band, write=not dry_run)
    console.print(choices_table(choices))
    if sampler is not None and choices:
        largest = max(choices, key=lambda choice: choice.nbytes)
        slowdown = sampler.matrix_slowdown(largest.key, largest.config)
        console.print(
            f"a matrix product beside the largest copy takes {slowdown:.2f} times as long"
        )
        sampler.close()
    console.print(f"written: {written}" if written else "nothing written")


if __name__ == "__main__":
    app()
