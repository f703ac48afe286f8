"""LMCache's `multi_layer_block_kv_transfer`, on our executors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from hma_triton.errors import GeometryError, PlanError, UnsupportedLayoutError
from hma_triton.integration.lmcache.executors import Executors
from hma_triton.integration.lmcache.fallthrough import FallthroughLog
from hma_triton.integration.lmcache.geometry import (
    TransferGeometry,
    build_geometry,
    object_row_bytes,
)
from hma_triton.integration.lmcache.objects import ObjectBuffers, read_block_ids, read_objects
from hma_triton.integration.lmcache.pools import (
    PagedShape,
    is_pointer_tensor,
    is_side_by_side,
    pages_from_pointers,
    pages_from_tensors,
    tensors_key,
)
from hma_triton.kernels.addressing import Direction
from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat, LayerPages

# `TransferDirection` of LMCache: host to device, device to host
_DIRECTIONS = {0: Direction.RETRIEVE, 1: Direction.STORE}


@dataclass(frozen=True, slots=True)
class Pool:
    """The paged side of one call: what identifies it, and how to read its pages."""

    key: Hashable
    device: torch.device
    dtype: torch.dtype | None
    read: Callable[[], list[LayerPages]]


def read_format(engine_kv_format: Any) -> EngineKVFormat:
    """Our member for LMCache's.

    Raises:
        UnsupportedLayoutError: a value that our table does not have.
    """
    try:
        return EngineKVFormat(int(engine_kv_format))
    except ValueError:
        raise UnsupportedLayoutError("our table of formats does not have it") from None


def format_name(engine_kv_format: Any) -> str:
    """Its name, for a log line."""
    return str(getattr(engine_kv_format, "name", engine_kv_format))


def read_direction(direction: Any) -> Direction:
    """Ours for LMCache's.

    Raises:
        PlanError: neither host to device nor device to host.
    """
    if int(direction) not in _DIRECTIONS:
        raise PlanError(f"transfer direction {direction!r} is neither H2D (0) nor D2H (1)")
    return _DIRECTIONS[int(direction)]


class BlockTransfer:
    """The replacement of one `device_ops` object's operation.

    Args:
        original: LMCache's own operation, for what we do not serve.
        planar_rows: whether blocked-scale pages become slot rows in objects, as LMCache's
            compiled kernels make them, or stay pages, as its torch operations leave them.
    """

    def __init__(
        self,
        original: Callable[..., None],
        executors: Executors,
        fallthrough: FallthroughLog,
        planar_rows: bool,
    ) -> None:
        self._original = original
        self._executors = executors
        self._fallthrough = fallthrough
        self._planar_rows = planar_rows

    def multi_layer_block_kv_transfer(
        self,
        paged_buffer_ptrs_tensor: torch.Tensor | list[Any],
        lmcache_objects_ptrs: list[int] | list[torch.Tensor],
        block_ids: torch.Tensor | list[int],
        device: torch.device | str,
        direction: Any,
        shape_desc: Any,
        lmcache_chunk_size: int,
        engine_kv_format: Any,
        skip_prefix_n_blocks: int,
    ) -> None:
        """Move the blocks `block_ids` between a kernel group's pages and its objects.

        Object i takes the blocks `[i * n, (i + 1) * n)` of the list, n being
        `lmcache_chunk_size / shape_desc.bs`; the first `skip_prefix_n_blocks` of the list are left
        alone, and a list that ends early leaves the rest of its objects alone. On the CPU the copy
        is done on return, on a device it is enqueued on the current stream.

        Raises:
            PlanError: a chunk size, skip or direction that means nothing.
            BlockIdError: a block id outside the pool; nothing has been copied.
        """
        way = read_direction(direction)
        check_chunk(lmcache_chunk_size, int(shape_desc.bs), skip_prefix_n_blocks)
        if isinstance(lmcache_objects_ptrs, list) and not lmcache_objects_ptrs:
            return
        try:
            pool, geometry, objects = self._resolve(
                paged_buffer_ptrs_tensor,
                lmcache_objects_ptrs,
                torch.device(device),
                shape_desc,
                lmcache_chunk_size,
                engine_kv_format,
            )
            ids = read_block_ids(block_ids)
        except GeometryError as reason:
            self._fallthrough.note(format_name(engine_kv_format), str(reason))
            self._original(
                paged_buffer_ptrs_tensor,
                lmcache_objects_ptrs,
                block_ids,
                device,
                direction,
                shape_desc,
                lmcache_chunk_size,
                engine_kv_format,
                skip_prefix_n_blocks,
            )
            return
        start = skip_prefix_n_blocks
        stop = min(ids.size, objects.addresses.size * geometry.blocks_per_object)
        if start >= stop:
            return
        ids = ids[start:stop]
        geometry.check_ids(ids, format_name(engine_kv_format))
        places = geometry.block_addresses(objects.addresses, start, stop)
        self._executors.run(pool.device, geometry, way, ids, places)

    def pointer_geometry(
        self,
        fmt: EngineKVFormat,
        shape: PagedShape,
        pointers: tuple[int, ...],
        device: torch.device,
        chunk_slots: int,
    ) -> TransferGeometry:
        """Geometry of a kernel group given by pointers, for objects of `chunk_slots` slots.

        Raises:
            UnsupportedLayoutError: pointers or a device that we do not serve.
        """
        return self._geometry(_pointer_pool(fmt, shape, pointers, device, None), fmt, shape,
                              chunk_slots, chunk_slots)  # fmt: skip

    def _resolve(
        self,
        caches: Any,
        objects_argument: Any,
        device: torch.device,
        shape_desc: Any,
        chunk_slots: int,
        engine_kv_format: Any,
    ) -> tuple[Pool, TransferGeometry, ObjectBuffers]:
        fmt = read_format(engine_kv_format)
        shape = PagedShape.from_desc(shape_desc)
        if is_pointer_tensor(caches):
            dtype = getattr(shape_desc, "dtype", None)
            pool = _pointer_pool(fmt, shape, tuple(caches.tolist()), device, dtype)
        else:
            pool = _tensor_pool(fmt, shape, caches)
        objects = read_objects(objects_argument, pool.device)
        slots = chunk_slots
        if objects.nbytes is not None:
            slots = _object_slots(fmt, pool, objects)
            if slots < chunk_slots:
                raise UnsupportedLayoutError(
                    f"objects of {slots} slots, shorter than a chunk of {chunk_slots}"
                )
        return pool, self._geometry(pool, fmt, shape, chunk_slots, slots), objects

    def _geometry(
        self, pool: Pool, fmt: EngineKVFormat, shape: PagedShape, chunk_slots: int, slots: int
    ) -> TransferGeometry:
        def build() -> TransferGeometry:
            return build_geometry(
                pool.read(),
                object_slots=slots,
                blocks_per_object=chunk_slots // shape.slots_per_block,
                side_by_side=is_side_by_side(fmt),
                planar_rows=self._planar_rows,
            )

        return self._executors.geometry(pool.device, (pool.key, chunk_slots, slots), build)


def check_chunk(chunk_slots: int, block_slots: int, skip_blocks: int) -> None:
    """Refuse what LMCache's operation refuses.

    Raises:
        PlanError: names the value and the rule.
    """
    if chunk_slots <= 0 or block_slots <= 0 or chunk_slots % block_slots:
        raise PlanError(
            f"lmcache_chunk_size {chunk_slots} must be a positive multiple of the block's "
            f"{block_slots} slots"
        )
    if skip_blocks < 0:
        raise PlanError(f"skip_prefix_n_blocks {skip_blocks} must not be negative")


def _pointer_pool(
    fmt: EngineKVFormat,
    shape: PagedShape,
    pointers: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Pool:
    return Pool(
        key=(fmt, shape, pointers),
        device=device,
        dtype=dtype,
        read=lambda: pages_from_pointers(fmt, shape, pointers),
    )


def _tensor_pool(fmt: EngineKVFormat, shape: PagedShape, caches: Any) -> Pool:
    pages, device, dtype = pages_from_tensors(fmt, shape.slots_per_block, caches)
    key = (fmt, shape.slots_per_block, tensors_key(caches))
    return Pool(key=key, device=device, dtype=dtype, read=lambda: pages)


def _object_slots(fmt: EngineKVFormat, pool: Pool, objects: ObjectBuffers) -> int:
    """Slots of objects that came as tensors.

    Raises:
        UnsupportedLayoutError: a type or shape that LMCache's operation would convert or refuse.
    """
    assert objects.nbytes is not None and objects.dtype is not None
    if pool.dtype not in (None, objects.dtype) and not is_side_by_side(fmt):
        raise UnsupportedLayoutError(
            f"objects of {objects.dtype} for pools of {pool.dtype}, whose values it would convert"
        )
    pages = pool.read()
    planes, width = object_row_bytes(pages, is_side_by_side(fmt))
    slots, rest = divmod(objects.nbytes, planes * len(pages) * width)
    row = FORMAT_ROWS[fmt]
    # packed K and V: LMCache takes any shape of the right size
    free = row.is_packed or fmt is EngineKVFormat.NL_X_NB_BS_NH_HS
    layers = (len(pages), slots, width // objects.dtype.itemsize)
    expected = layers if planes == 1 else (planes, *layers)
    if rest or (not free and objects.shape != expected):
        raise UnsupportedLayoutError(
            f"objects of shape {objects.shape} for {planes} planes, {len(pages)} layers and "
            f"{width} bytes a slot"
        )
    return slots
