"""What `bench copy` compares with: a plain copy by torch, and LMCache's own operation."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from hma_triton.cli.copy_case import CopyCase, GroupCopy
from hma_triton.cli.measuring import Run
from hma_triton.errors import UnsupportedLayoutError
from hma_triton.kernels.addressing import Direction

# Leading axes of LMCache's objects by planes of a page.
_PLANE_AXES: dict[int, tuple[int, ...]] = {2: (2,), 1: ()}


def plain_copy(case: CopyCase, nbytes: int, direction: Direction, threads: int) -> Run:
    """`torch.copy_` of `nbytes` contiguous bytes between pool and arena."""
    source, target = case.pool[:nbytes], case.arena[:nbytes]
    if direction is Direction.RETRIEVE:
        source, target = target, source

    def run() -> None:
        torch.set_num_threads(threads)
        target.copy_(source)

    return run


def lmcache_copy(case: CopyCase, copy: GroupCopy, direction: Direction, threads: int) -> Run:
    """LMCache's `multi_layer_block_kv_transfer` on the same pages, ids and object bytes.

    Its objects are token rows; they lie in the memory of ours.

    Raises:
        UnsupportedLayoutError: a group that LMCache's operation does not take, with the reason.
    """
    native = importlib.import_module("lmcache.lmcache_native")
    operation = importlib.import_module("lmcache").device_ops.multi_layer_block_kv_transfer
    way = native.TransferDirection
    towards = way.D2H if direction is Direction.STORE else way.H2D

    try:
        pages, objects, ids, device, shape, chunk_slots, fmt = _arguments(case, copy, native)

        def run() -> None:
            torch.set_num_threads(threads)
            operation(pages, objects, ids, device, towards, shape, chunk_slots, fmt, 0)

        run()
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedLayoutError(
            f"LMCache cannot move kernel group {copy.kernel_group_index}: {reason}"
        ) from error
    return run


def _arguments(case: CopyCase, copy: GroupCopy, native: Any) -> tuple[Any, ...]:
    info = case.info(copy.kernel_group_index)
    shape = info.shape_desc
    kept = case.engine.layout.groups[copy.kernel_group_index].kept_blocks
    chunk_slots = kept * shape.bs
    pages = [case.layers[layer] for layer in info.layer_indices]
    described = native.PageBufferShapeDesc()
    for field, value in (
        ("kv_size", shape.kv_size),
        ("nl", shape.nl),
        ("nb", shape.nb),
        ("bs", shape.bs),
        ("nh", shape.nh),
        ("hs", shape.hs),
        ("element_size", shape.element_size),
        ("block_stride_elems", shape.block_stride_elems),
    ):
        setattr(described, field, value)
    rows = (*_PLANE_AXES[shape.kv_size], shape.nl, chunk_slots, shape.nh * shape.hs)
    objects = [held.view(info.dtype).view(rows) for held in copy.objects]
    fmt = getattr(native.EngineKVFormat, case.format_name(copy.kernel_group_index))
    return pages, objects, copy.block_ids.tolist(), "cpu", described, chunk_slots, fmt
