"""What `bench gpu` leaves: one JSON, a short table, at most five plots, and the marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_KIB = 1024
# What a request of 512 MiB should reach on an H200, as a share of a ceiling of the same run.
_LARGE_RUN_BYTES = 32 * _KIB
_SMALL_RUNS = (4 * _KIB, 8 * _KIB, 16 * _KIB)


def _best(cells: Sequence[Row], direction: str, run_bytes: int) -> float | None:
    rates = [
        cell["gb_s"]
        for cell in cells
        if cell["direction"] == direction and cell["run_bytes"] == run_bytes
    ]
    return max(rates) if rates else None


def marks(stages: Mapping[str, Row]) -> list[dict[str, Any]]:
    """Every mark that could be measured: what, the share reached, the share wanted, met."""
    ceilings = stages.get("ceilings", {}).get("data", {})
    cells = stages.get("requests", {}).get("data", {}).get("cells", [])
    found: list[dict[str, Any]] = []

    def note(what: str, value: float | None, ceiling: float | None, wanted: float) -> None:
        if value is not None and ceiling:
            share = value / ceiling
            found.append(
                {"what": what, "share": round(share, 3), "wanted": wanted, "met": share >= wanted}
            )

    for size in sorted({cell["run_bytes"] for cell in cells}):
        for direction in ("store", "retrieve"):
            value, text = _best(cells, direction, size), f"{direction}, runs of {size // _KIB} KiB"
            engine = ceilings.get(f"engine_{direction}")
            if size >= _LARGE_RUN_BYTES:
                note(f"{text}, of the copy engine", value, engine, 0.95)
            elif size in _SMALL_RUNS and direction == "store":
                note(f"{text}, of the copy engine", value, engine, 0.9)
            elif size in _SMALL_RUNS:
                note(f"{text}, of a kernel's reads", value, ceilings.get("kernel_read"), 0.9)
    note(
        "device gather, of a device copy",
        ceilings.get("device_gather"),
        ceilings.get("device_copy"),
        0.9,
    )
    rows = stages.get("beside", {}).get("data", {}).get("rows", [])
    default = [row for row in rows if row["programs"] in (None, 32)]
    for row in default:
        found.append(
            {
                "what": f"matrix product beside {row['path']} {row['direction']}, times as long",
                "share": row["slowdown"],
                "wanted": 1.1,
                "met": row["slowdown"] <= 1.1,
            }
        )
    return found


def table(stages: Mapping[str, Row]) -> list[str]:
    """The short table that is printed last."""
    lines = []
    for name, stage in stages.items():
        verdict = {True: "right", False: "WRONG", None: "measured"}[stage["ok"]]
        lines.append(f"{name:12} {verdict:9} {stage['seconds']:6.1f} s")
        lines += [f"    {text}" for text in stage["lines"][:16]]
        hidden = len(stage["lines"]) - 16
        if hidden > 0:
            lines.append(f"    ... {hidden} more lines in the JSON")
        lines += [f"    did not run: {text}" for text in stage["missing"]]
    found = marks(stages)
    if found:
        lines.append("marks (shares of ceilings measured in this run)")
        lines += [
            f"    {'met   ' if mark['met'] else 'MISSED'} {mark['share']:6.3f} "
            f"(wanted {mark['wanted']}) {mark['what']}"
            for mark in found
        ]
    return lines


def plot(stages: Mapping[str, Row], folder: Path) -> list[str]:
    """At most five pictures; their names. None without matplotlib.

    Raises:
        ImportError: matplotlib is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = []
    requests = stages.get("requests", {}).get("data", {}).get("cells", [])
    ceilings = stages.get("ceilings", {}).get("data", {})
    sweep = stages.get("paths", {}).get("data", {}).get("cells", [])
    for stage, cells in (("requests", requests), ("paths", sweep)):
        for direction in ("store", "retrieve"):
            chosen = [cell for cell in cells if cell["direction"] == direction]
            if not chosen:
                continue
            figure, axes = pyplot.subplots()
            for path in dict.fromkeys(cell["path"] for cell in chosen):
                of_path = [cell for cell in chosen if cell["path"] == path]
                sizes = sorted({cell["run_bytes"] for cell in of_path})
                rates = [_best(of_path, direction, size) for size in sizes]
                axes.plot(sizes, rates, marker="o", label=path)
            if f"engine_{direction}" in ceilings:
                axes.axhline(ceilings[f"engine_{direction}"], linestyle="--", label="copy engine")
            axes.set_xscale("log", base=2)
            axes.set_xlabel("bytes of a run")
            axes.set_ylabel("GB/s")
            kind = "512 MiB" if stage == "requests" else "best count"
            axes.set_title(f"{direction}, {kind}")
            axes.legend()
            names.append(f"{stage}-{direction}.png")
            figure.savefig(folder / names[-1], dpi=120)
            pyplot.close(figure)
    rows = [r for r in stages.get("beside", {}).get("data", {}).get("rows", []) if r["programs"]]
    if rows:
        figure, axes = pyplot.subplots()
        for direction in ("store", "retrieve"):
            of = [row for row in rows if row["direction"] == direction]
            axes.plot(
                [r["gb_s_alone"] for r in of], [r["slowdown"] for r in of], marker="o",
                label=direction,
            )  # fmt: skip
            for row in of:
                axes.annotate(row["programs"], (row["gb_s_alone"], row["slowdown"]))
        axes.set_xlabel("GB/s of the copy alone")
        axes.set_ylabel("matrix product, times as long")
        axes.set_title("zero copy by program budget")
        axes.legend()
        names.append("beside.png")
        figure.savefig(folder / names[-1], dpi=120)
        pyplot.close(figure)
    return names
