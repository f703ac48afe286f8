"""A worker's pool with the geometry of a real model: blocks given and freed as an engine does.

What a page holds is a function of (engine group, layer, block position), so that it can be checked
when its block has long been freed and given to another group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hma_triton.geometries import Geometry, GroupGeometry, build_pool
from hma_triton.group_view import EngineGroupInfo
from hma_triton.layout_hints import LayoutHints
from hma_triton.units import cdiv

NULL_BLOCK = 0
POISON = 0xA5
_NOISE_BYTES = 1 << 26
_COMPARED_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class Difference:
    """A page that does not hold what was stored there."""

    engine_group_id: int
    layer_name: str
    block_id: int
    byte: int
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"group {self.engine_group_id}, {self.layer_name}, block {self.block_id}: "
            f"{self.num_bytes} byte(s) differ, the first at byte {self.byte} of the page"
        )


def with_fewer_layers(geometry: Geometry, layers_per_group: int) -> Geometry:
    """The same geometry for a shallower model: at most that many layers of each group.

    Only for pools in which layers lie outermost; others, whose blocks hold all layers, are
    returned as they are.
    """
    if any(not per_block for _, per_block in (g.layer_step for g in geometry.groups)):
        return geometry
    groups = tuple(
        replace(
            group,
            layer_names=group.layer_names[:layers_per_group],
            registered_indices=group.registered_indices[:layers_per_group],
        )
        for group in geometry.groups
    )
    kept = [name for group in groups for name in group.layer_names]
    shared = {
        layer: owner
        for layer, owner in geometry.shared_layers.items()
        if any(f".{owner}." in f".{name}." for name in kept)
    }
    return replace(
        geometry,
        groups=groups,
        shared_layers=shared,
        bytes_per_block=max(map(_end_per_block, groups)),
    )


def _end_per_block(group: GroupGeometry) -> int:
    """Bytes of the pool, per block of it, up to the end of the group's last layer."""
    first, _ = group.first_layer
    step, _ = group.layer_step
    return first + (len(group.layer_names) - 1) * step + group.page_bytes


class DemoPool:
    """Caches over one storage, and a block table per engine group for one request.

    Args:
        geometry: what the caches look like.
        num_blocks: blocks of the pool, the null block among them.
    """

    def __init__(self, geometry: Geometry, num_blocks: int) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.kv_caches: dict[str, torch.Tensor]
        self.infos: tuple[EngineGroupInfo, ...]
        self.layout_hints: LayoutHints
        self.kv_caches, self.infos, self.layout_hints = build_pool(geometry, num_blocks)
        self._names = tuple(self.kv_caches)
        seed = np.random.default_rng(0)
        self._noise = torch.from_numpy(seed.integers(0, 256, 2 * _NOISE_BYTES, dtype=np.uint8))
        self._order = np.random.default_rng(1)
        self._free: list[int] = []
        self.tables: dict[int, list[int]] = {}
        self.reset()

    @property
    def storage_bytes(self) -> torch.Tensor:
        """All bytes under the caches, `[nbytes]` uint8, wherever the storage lies by now."""
        storage = next(iter(self.kv_caches.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def page_bytes(self, info: EngineGroupInfo) -> int:
        """Live bytes of one block in all layers of an info."""
        return sum(self._pages(layer)[0].numel() for layer in info.layer_indices)

    def reset(self) -> None:
        """Frees every block and fills the pool with poison."""
        self.storage_bytes.fill_(POISON)
        self._free = self._order.permutation(np.arange(1, self.num_blocks)).tolist()
        self.tables = {info.engine_group_id: [] for info in self.infos}

    def allocate(self, end_tokens: int) -> None:
        """Extends every group's table to `end_tokens`, with ids in no order."""
        for group, info in self._by_group().items():
            table = self.tables[group]
            missing = cdiv(end_tokens, info.tokens_per_block) - len(table)
            table.extend(self._free.pop() for _ in range(missing))

    def free_what_slid_out(self, end_tokens: int) -> None:
        """Gives back blocks that no token from `end_tokens` on can see, and puts null there."""
        for group, info in self._by_group().items():
            table = self.tables[group]
            for position in range(_first_needed(info, end_tokens)):
                if table[position] != NULL_BLOCK:
                    self._free.insert(0, table[position])
                    table[position] = NULL_BLOCK

    def allocate_hit(self, hit_tokens: int) -> None:
        """Tables as an engine makes them for a hit: null where a group's rule needs nothing."""
        for group, info in self._by_group().items():
            first = _first_needed(info, hit_tokens)
            count = hit_tokens // info.tokens_per_block
            self.tables[group] = [NULL_BLOCK] * first + [
                self._free.pop() for _ in range(count - first)
            ]

    def compute(self, start_tokens: int, end_tokens: int) -> None:
        """Writes the pages of a token range, as a forward pass would."""
        for info, position, block_id in self._blocks(start_tokens, end_tokens):
            for layer in info.layer_indices:
                page = self._pages(layer)[block_id]
                page.copy_(self._content(info, layer, position, page))

    def differences(self, end_tokens: int) -> list[Difference]:
        """Every page of the tables up to `end_tokens` that is not what `compute` writes there."""
        found = []
        for info, position, block_id in self._blocks(0, end_tokens):
            for layer in info.layer_indices:
                page = self._pages(layer)[block_id]
                wanted = self._content(info, layer, position, page)
                if not torch.equal(page, wanted):
                    wrong = (page != wanted).flatten().nonzero().flatten()
                    name = self._names[layer]
                    at, count = int(wrong[0]), wrong.numel()
                    found.append(Difference(info.engine_group_id, name, block_id, at, count))
        return found

    def bytes_written_elsewhere(self, end_tokens: int) -> int:
        """Bytes outside the tables' pages that are no longer poison. Poisons those pages too."""
        for info, _, block_id in self._blocks(0, end_tokens):
            for layer in info.layer_indices:
                self._pages(layer)[block_id].fill_(POISON)
        untouched = torch.full((_COMPARED_AT_ONCE,), POISON, dtype=torch.uint8)
        written = 0
        storage = self.storage_bytes
        for start in range(0, storage.numel(), _COMPARED_AT_ONCE):
            part = storage[start : start + _COMPARED_AT_ONCE]
            if not torch.equal(part, untouched[: part.numel()]):
                written += int((part != POISON).sum())
        return written

    def flip_a_bit(self, end_tokens: int) -> str:
        """Damages one byte of one page of the tables; says where."""
        blocks = list(self._blocks(0, end_tokens))
        info, _, block_id = blocks[len(blocks) // 2]
        layer = info.layer_indices[-1]
        page = self._pages(layer)[block_id]
        last = tuple(size - 1 for size in page.shape)
        page[last] ^= 1
        return f"group {info.engine_group_id}, {self._names[layer]}, block {block_id}"

    def _by_group(self) -> dict[int, EngineGroupInfo]:
        """One info per engine group; those of one group have the same blocks, window and rule."""
        return {info.engine_group_id: info for info in reversed(self.infos)}

    def _blocks(self, start_tokens: int, end_tokens: int) -> list[tuple[EngineGroupInfo, int, int]]:
        """(info, position in the table, id) of every real block of a token range."""
        return [
            (info, position, block_id)
            for info in self.infos
            for position, block_id in enumerate(self.tables[info.engine_group_id])
            if block_id != NULL_BLOCK
            and start_tokens // info.tokens_per_block <= position
            and position < cdiv(end_tokens, info.tokens_per_block)
        ]

    def _pages(self, layer: int) -> torch.Tensor:
        """A layer's cache as bytes: `[num_blocks, ..., bytes]`."""
        cache = self.kv_caches[self._names[layer]]
        size = cache.element_size()
        return self.storage_bytes.as_strided(
            (*cache.shape[:-1], cache.shape[-1] * size),
            (*(stride * size for stride in cache.stride()[:-1]), 1),
            cache.storage_offset() * size,
        )

    def _content(
        self, info: EngineGroupInfo, layer: int, position: int, page: torch.Tensor
    ) -> torch.Tensor:
        mixed = (info.engine_group_id * 7_919 + layer * 104_729 + position * 15_485_863) * 64
        start = mixed % _NOISE_BYTES
        return self._noise[start : start + page.numel()].view(page.shape)


def _first_needed(info: EngineGroupInfo, end_tokens: int) -> int:
    """Position of the first block that a token at `end_tokens` can still see."""
    if info.recurrent_state:
        return max(0, end_tokens // info.tokens_per_block - 1)
    if info.sw_size_tokens < 0:
        return 0
    return max(0, end_tokens - (info.sw_size_tokens - 1)) // info.tokens_per_block


def blocks_needed(geometry: Geometry, prompt_tokens: int, step_tokens: int) -> int:
    """Blocks of a pool that holds one prompt while it is computed in steps, with the null block."""
    total = 1
    groups = {group.engine_group_id: group for group in geometry.groups}
    for group in groups.values():
        kept = prompt_tokens
        if group.mamba_cache_mode is not None:
            kept = step_tokens + group.tokens_per_block
        elif group.window_tokens is not None:
            kept = min(prompt_tokens, group.window_tokens + step_tokens)
        total += cdiv(kept, group.tokens_per_block) + 1
    return total
