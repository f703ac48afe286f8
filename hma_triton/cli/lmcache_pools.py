"""Pools of every cache layout that LMCache knows, at a size worth timing, and objects for them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hma_triton.kernels.addressing import Direction
from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat, FormattedCaches

CHUNK_SLOTS = 256
BLOCK_SLOTS = 16
NUM_HEADS = 8
HEAD_SIZE = 128
LATENT_SIZE = 576
# widths of vLLM-Ascend's latent, rope and indexer planes
PLANE_WIDTHS = (512, 64, 128)
PLANAR_ROW_BYTES = 132
DTYPE = torch.bfloat16
MOST_LAYERS = 64
# blocks that no transfer names, in percent
SPARE_BLOCKS = 10


@dataclass(frozen=True)
class TransferCase:
    """Everything that LMCache's operation is called with, for one layout. Pools in one storage."""

    engine_kv_format: EngineKVFormat
    storage: torch.Tensor
    arena: torch.Tensor
    pool_argument: Any
    object_addresses: list[int]
    block_ids: torch.Tensor
    shape_desc: Any
    nbytes: int
    layers: int

    def arguments(self, direction: Direction) -> tuple[Any, ...]:
        """The nine arguments."""
        core = importlib.import_module("lmcache.lmcache_native")
        ways = core.TransferDirection
        return (
            self.pool_argument,
            self.object_addresses,
            self.block_ids,
            torch.device("cpu"),
            ways.D2H if direction is Direction.STORE else ways.H2D,
            self.shape_desc,
            CHUNK_SLOTS,
            core.EngineKVFormat(int(self.engine_kv_format)),
            0,
        )


def make_case(fmt: EngineKVFormat, nbytes: int) -> TransferCase:
    """A request of about `nbytes` in layout `fmt`, its blocks all over the pool."""
    row = FORMAT_ROWS[fmt]
    slot_bytes = _slot_bytes(fmt)
    layers = min(MOST_LAYERS, max(1, nbytes // (4096 * slot_bytes)))
    chunks = max(1, round(nbytes / (layers * slot_bytes * CHUNK_SLOTS)))
    blocks = chunks * CHUNK_SLOTS // BLOCK_SLOTS
    pool_blocks = blocks + max(1, blocks * SPARE_BLOCKS // 100)
    storage = torch.empty(pool_blocks * BLOCK_SLOTS * slot_bytes * layers + 4096, dtype=torch.uint8)
    storage.random_(0, 256, generator=torch.Generator().manual_seed(1))
    caches = _cut_caches(fmt, _Cutter(storage), layers, pool_blocks)
    object_bytes = layers * CHUNK_SLOTS * slot_bytes
    arena = torch.zeros(chunks * object_bytes, dtype=torch.uint8)
    ids = torch.randperm(pool_blocks, generator=torch.Generator().manual_seed(2))[:blocks]
    formatted = FormattedCaches(caches, fmt)
    as_tensors = row.is_plane_tuple
    return TransferCase(
        engine_kv_format=fmt,
        storage=storage,
        arena=arena,
        pool_argument=caches
        if as_tensors
        else torch.tensor(formatted.data_ptrs(range(layers)), dtype=torch.int64),
        object_addresses=[arena.data_ptr() + i * object_bytes for i in range(chunks)],
        block_ids=ids.contiguous(),
        shape_desc=_describe(formatted, layers, pool_blocks),
        nbytes=chunks * object_bytes,
        layers=layers,
    )


def _slot_bytes(fmt: EngineKVFormat) -> int:
    """Bytes of one slot in one layer, over all planes."""
    row = FORMAT_ROWS[fmt]
    if row.planar_bytes:
        return PLANAR_ROW_BYTES
    if row.lists[-1:] == ("NP",):
        return sum(PLANE_WIDTHS) * DTYPE.itemsize
    if row.is_single_latent:
        return LATENT_SIZE * DTYPE.itemsize
    packed = 2 if row.is_packed else 1
    return row.kv_size * packed * NUM_HEADS * HEAD_SIZE * DTYPE.itemsize


class _Cutter:
    """Cuts tensors from one storage, one after the other."""

    def __init__(self, storage: torch.Tensor) -> None:
        self._storage, self._next = storage, 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start = self._next
        self._next += math.prod(shape) * dtype.itemsize
        return self._storage[start : self._next].view(dtype).view(shape)


def _cut_caches(
    fmt: EngineKVFormat,
    cut: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    layers: int,
    blocks: int,
) -> Any:
    row = FORMAT_ROWS[fmt]
    dtype = torch.uint8 if row.planar_bytes else DTYPE
    content = LATENT_SIZE if row.is_single_latent else HEAD_SIZE
    lengths = {
        "NB": blocks,
        "NL": layers,
        "TWO": 2,
        "BS": BLOCK_SLOTS,
        "NH": NUM_HEADS,
        "HS": PLANAR_ROW_BYTES if row.planar_bytes else content,
        "CS": 2 * HEAD_SIZE,
        "ONE": 1,
        "NBBS": blocks * BLOCK_SLOTS,
    }
    shape = tuple(lengths[axis] for axis in row.axes)
    if row.is_cross_layer:
        return cut(shape, dtype)
    if row.is_kv_list:
        return [[cut(shape, dtype) for _ in range(layers)] for _ in range(2)]
    if row.is_plane_tuple:
        widths = PLANE_WIDTHS if row.lists[-1] == "NP" else (content, content)
        return [tuple(cut((*shape[:-1], w), dtype) for w in widths) for _ in range(layers)]
    return [cut(shape, dtype) for _ in range(layers)]


def _describe(formatted: FormattedCaches, layers: int, blocks: int) -> Any:
    desc = importlib.import_module("lmcache").device_ops.PageBufferShapeDesc()
    desc.kv_size = formatted.kv_size
    desc.nl = layers
    desc.nb = blocks
    desc.bs = BLOCK_SLOTS
    desc.nh = formatted.num_heads()
    desc.hs = formatted.head_size()
    desc.element_size = formatted.dtype().itemsize
    desc.dtype = formatted.dtype()
    return desc
