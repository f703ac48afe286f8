"""A picture of the pool: which bytes belong to which layer, block and group, and which to none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

# a layer's block in more pieces than this is drawn by its first pieces
_MOST_PIECES = 64
# an edge around less than this part of the pool would hide what it is around
_EDGED = 300
_UNUSED: dict[str, Any] = {"edgecolor": "#909090", "hatch": "////", "linewidth": 0.3}


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous live bytes of one layer's block in the pool."""

    layer: int
    block: int
    start_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine group's view of the whole pool."""

    label: str
    pieces: tuple[Piece, ...]


def lane_of(label: str, caches: Sequence[torch.Tensor], num_blocks: int) -> Lane:
    """All pieces of the blocks of ``caches``, which share a pool of ``num_blocks`` blocks."""
    pieces: list[Piece] = []
    for layer, cache in enumerate(caches):
        rows = cache.shape[0] // num_blocks
        for row in range(rows * num_blocks):
            pieces.extend(
                Piece(layer, row // rows, start, size) for start, size in _extents(cache, row)
            )
    return Lane(label, tuple(pieces))


def _extents(cache: torch.Tensor, row: int) -> Iterable[tuple[int, int]]:
    """``(start, bytes)`` of the contiguous pieces of ``cache[row]``, in bytes of its storage."""
    width = cache.element_size()
    start = int(cache.storage_offset() + row * cache.stride(0)) * width
    run = width
    outer: list[list[int]] = []
    axes = sorted(range(1, cache.ndim), key=lambda axis: (cache.stride(axis), axis))
    for axis in axes:
        step = cache.stride(axis) * width
        if cache.shape[axis] == 1:
            continue
        if not outer and step == run:
            run *= cache.shape[axis]
        else:
            outer.append([index * step for index in range(cache.shape[axis])])
    for count, offsets in enumerate(product(*outer)):
        if count == _MOST_PIECES:
            return
        yield start + sum(offsets), run


def draw_pool(lanes: Sequence[Lane], pool_bytes: int, title: str, file: Path) -> None:
    """Write the picture to ``file``; its name's ending chooses the format.

    Each lane is the same pool as one engine group sees it: colours are layers, strong ones block
    0, pale ones the other blocks; hatched bytes are padding or are not used by this group.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(14, 1.6 + 0.75 * len(lanes)), layout="constrained")
    colours = pyplot.get_cmap("tab10").colors
    unit, scale = _unit(pool_bytes)
    for position, lane in enumerate(lanes):
        spot = (position - 0.4, 0.8)
        axes.broken_barh([(0, pool_bytes / scale)], spot, facecolors="white", **_UNUSED)
        shades = [colours[piece.layer % len(colours)] for piece in lane.pieces]
        axes.broken_barh(
            [(piece.start_bytes / scale, piece.num_bytes / scale) for piece in lane.pieces],
            spot,
            facecolors=[
                shade if piece.block == 0 else _pale(shade)
                for piece, shade in zip(lane.pieces, shades, strict=True)
            ],
            edgecolor=["black" if piece.block == 0 else "white" for piece in lane.pieces],
            linewidth=[0.6 if p.num_bytes * _EDGED > pool_bytes else 0.0 for p in lane.pieces],
        )
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlim(0, pool_bytes / scale)
    axes.set_xlabel(f"{unit} from the start of the pool")
    axes.set_title(title, fontsize=10)
    key = [
        Patch(facecolor=colours[0], edgecolor="black", label="block 0 (a colour per layer)"),
        Patch(facecolor=_pale(colours[0]), label="other blocks"),
        Patch(facecolor="white", label="padding, or not used by this group", **_UNUSED),
    ]
    figure.legend(handles=key, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def _pale(colour: tuple[float, float, float]) -> tuple[float, float, float]:
    """The colour with two thirds of white in it, so that nothing shines through."""
    red, green, blue = (1 - (1 - part) / 3 for part in colour)
    return red, green, blue


def _unit(pool_bytes: int) -> tuple[str, int]:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if pool_bytes >= 4 * scale:
            return unit, scale
    return "bytes", 1


def lanes_of_groups(
    labels: Mapping[int, str],
    layers: Mapping[int, Sequence[str]],
    caches: Mapping[str, torch.Tensor],
    num_blocks: int,
) -> list[Lane]:
    """One lane per engine group, in order."""
    return [
        lane_of(labels[group], [caches[name] for name in layers[group]], num_blocks)
        for group in sorted(labels)
    ]
