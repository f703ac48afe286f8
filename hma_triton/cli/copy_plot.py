"""The picture of `bench copy`: speed over the length of contiguous runs, under the ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hma_triton.cli.copy_rows import ALL_GROUPS, LMCACHE, OURS, PLAIN, CopyRow
from hma_triton.cli.measuring import MachineFacts
from hma_triton.errors import ConfigError

_STYLE = {OURS: ("o", "tab:blue"), LMCACHE: ("s", "tab:orange")}
_DASHES = ("--", ":", "-.")


def plot_rows(path: Path, rows: Sequence[CopyRow], facts: MachineFacts) -> None:
    """Draw GB/s over run bytes, store and retrieve side by side, and the plain copy's speeds.

    Per number of threads, the ceiling is the median over the plain copies' speeds; its band
    reaches from the slowest to the fastest of them.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 5), sharey=True, layout="constrained")
    shown = [row for row in rows if row.kernel_group != ALL_GROUPS]
    for axis, direction in zip(axes, ("store", "retrieve"), strict=True):
        _draw(axis, [row for row in shown if row.direction == direction])
        axis.set_title(direction)
        axis.set_xlabel("bytes of a contiguous run (log scale)")
    axes[0].set_ylabel("GB/s (bytes moved once)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Copy of paged KV on {facts.machine}, {facts.cores} cores", fontsize=11)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw(axis: Any, rows: Sequence[CopyRow]) -> None:
    counts = sorted({row.threads for row in rows})
    for count, dashes in zip(counts, _DASHES * len(counts), strict=False):
        speeds = [row.gb_per_s for row in rows if row.method == PLAIN and row.threads == count]
        if speeds:
            label = f"ceiling: torch.copy_, {count} thread(s)"
            axis.axhspan(min(speeds), max(speeds), color="0.5", alpha=0.12, zorder=0)
            axis.axhline(float(np.median(speeds)), color="0.35", ls=dashes, label=label)
        for method, (marker, color) in _STYLE.items():
            points = [row for row in rows if row.method == method and row.threads == count]
            axis.scatter(
                [row.run_bytes for row in points],
                [row.gb_per_s for row in points],
                marker=marker,
                s=36 * (1 + counts.index(count)),
                facecolors=color if count == counts[0] else "none",
                edgecolors=color,
                alpha=0.8,
                label=f"{method}, {count} thread(s)" if points else None,
            )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: _bytes(value))
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _bytes(value: float) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g} B"
