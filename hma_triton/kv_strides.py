"""Which strides can be served: any padding between blocks, none inside a page, no overlap.

A page is one plane of one block: its slots, heads and content. Blocks, layers and planes may lie
anywhere, as long as no two of them share a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hma_triton.errors import UnsupportedLayoutError

_BETWEEN_PAGES = frozenset({"NB", "NL", "TWO"})


def check_plane_strides(
    tensor: torch.Tensor, axes: Sequence[str], content_axes: Sequence[int], where: str
) -> None:
    """Check that ``tensor``, whose axes are named by ``axes``, has pages we can address.

    Raises:
        UnsupportedLayoutError: negative strides, content that is not contiguous, padding or
            siblings inside a page, a block in several pieces, or bytes that two elements share.
            The message names ``where``, the axis and the numbers.
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    what = f"{where} (shape {shape}, strides {strides}, axes {' '.join(axes)})"
    for name, stride in zip(axes, strides, strict=True):
        if stride < 0:
            raise UnsupportedLayoutError(f"{what}: negative stride {stride} on axis {name}")
    if 0 in shape:
        raise UnsupportedLayoutError(f"{what}: an axis of length 0")
    expected = 1
    for axis in reversed(content_axes):
        if shape[axis] > 1 and strides[axis] != expected:
            raise UnsupportedLayoutError(
                f"{what}: the content of a head is not contiguous: axis {axes[axis]} steps "
                f"{strides[axis]} elements instead of {expected}"
            )
        expected *= shape[axis]
    _check_dense_page(shape, strides, axes, content_axes, expected, what)
    _check_disjoint(shape, strides, axes, what)


def _check_dense_page(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    axes: Sequence[str],
    content_axes: Sequence[int],
    content: int,
    what: str,
) -> None:
    """Slots and heads must tile the page in one order or the other, without holes."""
    inside = [
        axis
        for axis in range(len(axes))
        if axis not in content_axes and axes[axis] not in _BETWEEN_PAGES and shape[axis] > 1
    ]
    expected = content
    for axis in sorted(inside, key=lambda a: strides[a]):
        if strides[axis] < expected:
            raise UnsupportedLayoutError(
                f"{what}: overlapping strides: axis {axes[axis]} steps {strides[axis]} elements "
                f"over {expected}"
            )
        if strides[axis] > expected:
            raise UnsupportedLayoutError(
                f"{what}: padding or other data inside a page (a fragmented block): axis "
                f"{axes[axis]} steps {strides[axis]} elements over {expected}"
            )
        expected *= shape[axis]


def _check_disjoint(
    shape: tuple[int, ...], strides: tuple[int, ...], axes: Sequence[str], what: str
) -> None:
    """No two elements may share an address: each step clears everything inside it."""
    reach = 1
    for axis in sorted(range(len(shape)), key=lambda a: (strides[a], shape[a])):
        if shape[axis] == 1:
            continue
        if strides[axis] < reach:
            raise UnsupportedLayoutError(
                f"{what}: overlapping strides: axis {axes[axis]} steps {strides[axis]} elements, "
                f"what lies inside it reaches over {reach}"
            )
        reach += (shape[axis] - 1) * strides[axis]
