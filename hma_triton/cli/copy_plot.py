"""The picture of `bench copy`: speed over the length of contiguous runs, under the ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hma_triton.cli.copy_rows import ALL_GROUPS, LMCACHE, OURS, PLAIN, CopyRow, MachineFacts
from hma_triton.errors import ConfigError

_STYLE = {OURS: ("o", "tab:blue"), LMCACHE: ("s", "tab:orange")}


def plot_rows(path: Path, rows: Sequence[CopyRow], facts: MachineFacts) -> None:
    """Draw GB/s over run bytes, store and retrieve side by side, and the plain copy's speeds.

    The ceiling is the median of the plain copies; the band reaches from their slowest to their
    fastest median.

    Raises:
        ConfigError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    shown = [row for row in rows if row.kernel_group != ALL_GROUPS]
    for axis, direction in zip(axes, ("store", "retrieve"), strict=True):
        _draw(axis, [row for row in shown if row.direction == direction])
        axis.set_title(direction)
        axis.set_xlabel("bytes of a contiguous run (log scale)")
    axes[0].set_ylabel("GB/s (bytes moved once)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    threads = ", ".join(str(count) for count in sorted({row.threads for row in shown}))
    figure.suptitle(
        f"Copy of paged KV, {threads} thread(s), {facts.machine}, {facts.cores} cores", fontsize=11
    )
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the plot cannot be written to {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw(axis: Any, rows: Sequence[CopyRow]) -> None:
    ceiling = [row.gb_per_s for row in rows if row.method == PLAIN]
    if ceiling:
        axis.axhspan(min(ceiling), max(ceiling), color="0.9", zorder=0)
        axis.axhline(float(np.median(ceiling)), color="0.4", ls="--", label="plain copy (ceiling)")
    for method, (marker, color) in _STYLE.items():
        points = [row for row in rows if row.method == method]
        if points:
            axis.scatter(
                [row.run_bytes for row in points],
                [row.gb_per_s for row in points],
                marker=marker,
                color=color,
                alpha=0.75,
                label=method,
            )
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
