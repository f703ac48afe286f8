"""A registered cache of LMCache, made by its own code, and its transfers of whole object groups."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lmcache.lmcache_native as core
import torch
from lmcache.utils import EngineType
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.modules.lmcache_driven_transfer import get_layout_desc
from lmcache.v1.multiprocess.object_group_transfer import (
    downsample_and_stage_block_ids,
    transfer_kv_per_object_group,
)
from lmcache.v1.platform import resolve_kv_wrapper_factory
from lmcache.v1.platform.cache_context import create_cache_context

RETRIEVE, STORE = core.TransferDirection.H2D, core.TransferDirection.D2H


@dataclass(frozen=True)
class Layers:
    """Alike layers of one engine group: pool shape, element type, window and logical block."""

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    tokens_per_block: int = 0
    window: int = -1
    recurrent: bool = False


class Registered:
    """LMCache's cache context over random pools in shared memory, and objects of its allocator."""

    def __init__(
        self, layers: Sequence[Layers], chunk_tokens: int, chunks: int, separate: bool
    ) -> None:
        generator = torch.Generator().manual_seed(7)
        self.pools: list[torch.Tensor] = []
        infos: list[EngineGroupInfo] = []
        for index, group in enumerate(layers):
            first = len(self.pools)
            for _ in range(group.count):
                pool = torch.empty(group.shape, dtype=group.dtype)
                fill_random(pool, generator)
                self.pools.append(pool)
            infos.append(
                EngineGroupInfo(
                    engine_group_id=index,
                    layer_indices=tuple(range(first, len(self.pools))),
                    tokens_per_block=group.tokens_per_block,
                    sw_size_tokens=group.window,
                    recurrent_state=group.recurrent,
                )
            )
        wrap = resolve_kv_wrapper_factory("cpu")
        self.context: Any = create_cache_context(
            [wrap(pool) for pool in self.pools],
            chunk_tokens,
            layout_hints={"kv_layout": "HND"},
            engine_group_infos=infos,
            engine_type=EngineType.VLLM,
            separate_object_groups=separate,
        )
        self.layers, self.chunk_tokens, self.chunks = layers, chunk_tokens, chunks
        self.groups = range(self.context.kv_layer_groups_manager.num_object_groups)
        self._memory = torch.empty(2 << 20, dtype=torch.uint8)
        fill_random(self._memory, generator)
        allocator = TensorMemoryAllocator(self._memory)
        self.objects = [
            [self._object(allocator, group) for _ in range(chunks)] for group in self.groups
        ]

    def _object(self, allocator: TensorMemoryAllocator, group: int) -> Any:
        layout = get_layout_desc(self.context, self.chunk_tokens, group)
        made = allocator.allocate(layout.shapes, layout.dtypes)
        assert made is not None
        return made

    def block_ids(self) -> list[list[int]]:
        """Distinct ids per kernel group, in no order."""
        generator = torch.Generator().manual_seed(11)
        lists = []
        for index, group in enumerate(self.layers):
            needed = self.chunks * self.context.calculate_num_blocks(self.chunk_tokens, index)
            lists.append(torch.randperm(group.shape[0], generator=generator)[:needed].tolist())
        return lists

    def move(
        self,
        direction: Any,
        group: int,
        *,
        skip_tokens: int = 0,
        batch: int = 1,
        without: Sequence[int] = (),
        ids: list[list[int]] | None = None,
    ) -> None:
        """One object group through LMCache's own planner, whatever operations it then calls."""
        staged = downsample_and_stage_block_ids(self.context, ids or self.block_ids())
        objects = [
            None if chunk in without else made for chunk, made in enumerate(self.objects[group])
        ]
        transfer_kv_per_object_group(
            self.context,
            staged,
            objects,
            object_group_id=group,
            batch_size=batch,
            skip_first_n_tokens=skip_tokens,
            direction=direction,
            transfer_key="test",
        )

    def pool_bytes(self) -> list[torch.Tensor]:
        return [pool.contiguous().view(torch.uint8).clone() for pool in self.pools]

    def object_bytes(self, group: int) -> list[torch.Tensor]:
        """What transfers write of every object: each kernel group's kept slots.

        On the CPU, LMCache 0.5.6 sizes a windowed kernel group's part for a whole chunk and fills
        its start; what follows is never read.
        """
        manager = self.context.kv_layer_groups_manager
        parts = []
        for made in self.objects[group]:
            flat, offset = made.raw_data.view(torch.uint8), 0
            for index in manager.object_groups[group].kernel_group_indices:
                shape, dtype = self.context.get_kernel_group_shape_dtype(self.chunk_tokens, index)
                slots = self.context.get_slots_per_chunk_in_sw(index)
                whole = shape.numel() * dtype.itemsize
                kept = whole // shape[2] * slots
                parts.append(flat[offset : offset + kept].clone())
                offset += whole
        return parts

    def close(self) -> None:
        """Drops pools and context; the shared memory goes with the last view."""
        self.pools.clear()
        self.context = None
        self.objects.clear()
        gc.collect()


def fill_random(tensor: torch.Tensor, generator: torch.Generator) -> None:
    flat = tensor.view(torch.uint8).view(-1)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (flat.numel() // 8 + 1,), generator=generator)
    flat.copy_(words.view(torch.uint8)[: flat.numel()])


@contextmanager
def registered(*args: Any) -> Iterator[Registered]:
    made = Registered(*args)
    try:
        yield made
    finally:
        made.close()
