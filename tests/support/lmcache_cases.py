"""Pools of every LMCache format over one byte arena, and what a transfer must do to them.

An arena starts as random bytes, so that whatever a transfer leaves alone is known too. Two arenas
of equal bytes, one for each operation, are compared whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lmcache.lmcache_native as core
import torch
from lmcache.v1.gpu_connector.utils import (
    get_group_data_ptrs,
    make_page_buffer_shape_desc,
    resolve_block_stride_and_log_layout,
)

from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat

ELEMENT_TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Case:
    """One transfer: format, shape, padding, and what is asked of the operation."""

    format: EngineKVFormat
    layers: int = 3
    blocks: int = 11
    slots: int = 4
    heads: int = 2
    head_size: int = 8
    dtype: torch.dtype = torch.bfloat16
    # elements between the end of a block and the start of the next
    padding: int = 0
    blocks_per_object: int = 2
    objects: int = 3
    skip: int = 0
    # block ids given, None for all that the objects hold
    given: int | None = None
    # elements of a slot in each plane of a tuple of latents
    latent_widths: tuple[int, ...] = (16, 8, 4)
    seed: int = 0
    # hand packed K and V over without an axis of their own
    joined_content: bool = False
    # slots of an object past what one call fills
    spare_slots: int = 0
    chunk_slots_given: int | None = None

    @property
    def chunk_slots(self) -> int:
        if self.chunk_slots_given is not None:
            return self.chunk_slots_given
        return self.blocks_per_object * self.slots

    @property
    def object_slots(self) -> int:
        return self.blocks_per_object * self.slots + self.spare_slots

    @property
    def num_ids(self) -> int:
        most = self.objects * self.blocks_per_object
        return most if self.given is None else self.given


class Arena:
    """Bytes that tensors are cut from, in turn, each aligned to 64."""

    def __init__(self, nbytes: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.bytes = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        self._next = 64

    def cut(
        self, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        steps = stride or dense_strides(shape)
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
        # as far as the last block would reach with its padding
        room = max(reach, shape[0] * steps[0]) * dtype.itemsize
        start = self._next
        self._next = (start + room + 127) // 64 * 64
        assert self._next <= self.bytes.numel(), "arena too small"
        flat = self.bytes[start : start + room].view(dtype)
        return flat.as_strided(shape, steps)


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    steps: list[int] = []
    step = 1
    for length in reversed(shape):
        steps.insert(0, step)
        step *= length
    return tuple(steps)


def axis_lengths(case: Case) -> dict[str, int]:
    return {
        "NB": case.blocks,
        "NL": case.layers,
        "TWO": 2,
        "BS": case.slots,
        "NH": case.heads,
        "HS": 132 if FORMAT_ROWS[case.format].planar_bytes else case.head_size,
        "CS": 2 * case.head_size,
        "ONE": 1,
        "NBBS": case.blocks * case.slots,
    }


def build_pool(case: Case, arena: Arena) -> Any:
    """The caches of `case` in LMCache's normalised nesting, cut from `arena`."""
    row, lengths = FORMAT_ROWS[case.format], axis_lengths(case)
    shape = tuple(lengths[axis] for axis in row.axes)
    steps = dense_strides(shape)
    if case.padding:
        steps = (steps[0] + case.padding, *steps[1:])
    dtype = torch.uint8 if row.planar_bytes else case.dtype

    def one() -> torch.Tensor:
        return arena.cut(shape, dtype, steps)

    if row.is_cross_layer:
        return one()
    if row.is_kv_list:
        return [[one() for _ in range(case.layers)] for _ in range(2)]
    if row.lists[-1:] == ("NP",):
        return [
            tuple(
                arena.cut((*shape[:-1], width), dtype, _padded(shape, width, case.padding))
                for width in case.latent_widths
            )
            for _ in range(case.layers)
        ]
    if row.is_plane_tuple:
        return [(one(), one()) for _ in range(case.layers)]
    return [one() for _ in range(case.layers)]


def _padded(shape: tuple[int, ...], width: int, padding: int) -> tuple[int, ...]:
    steps = dense_strides((*shape[:-1], width))
    return (steps[0] + padding, *steps[1:])


def shape_desc(case: Case, caches: Any) -> Any:
    """LMCache's own descriptor of `caches`, with its own block stride."""
    fmt = core.EngineKVFormat(int(case.format))
    stride = resolve_block_stride_and_log_layout(caches, fmt, layer_idx=0, group_idx=0)
    return make_page_buffer_shape_desc(
        caches,
        fmt,
        layer_idx=0,
        num_layers_in_group=case.layers,
        num_blocks=case.blocks,
        block_size=case.slots,
        block_stride_elems=stride,
    )


def pointer_tensor(case: Case, caches: Any) -> torch.Tensor:
    """LMCache's own pointer list of `caches`."""
    fmt = core.EngineKVFormat(int(case.format))
    return torch.tensor(get_group_data_ptrs(caches, fmt, list(range(case.layers))))


def plane_views(case: Case, caches: Any) -> list[list[torch.Tensor]]:
    """Per plane and layer a view `[blocks, slots, heads, content]`, by plain indexing."""
    name, row = case.format.name, FORMAT_ROWS[case.format]
    blocks, slots = case.blocks, case.slots

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        if row.is_folded:
            tensor = tensor.unflatten(0, (blocks, slots))
        if "_ONE_BS_" in name:
            tensor = tensor.squeeze(2)
        if row.axes[-2] == "TWO":
            tensor = tensor.flatten(-2)
        if tensor.dim() == 3:
            tensor = tensor.unsqueeze(2)
        return tensor.transpose(1, 2) if row.heads_first else tensor

    if row.is_cross_layer:
        return [[ordered(caches[:, i, p]) for i in range(case.layers)] for p in range(2)]
    if row.is_kv_list:
        return [[ordered(tensor) for tensor in part] for part in caches]
    if row.is_plane_tuple:
        return [[ordered(layer[p]) for layer in caches] for p in range(len(caches[0]))]
    if row.kv_axis == 0:
        return [[ordered(layer[p]) for layer in caches] for p in range(2)]
    if row.kv_axis == 1:
        return [[ordered(layer[:, p]) for layer in caches] for p in range(2)]
    return [[ordered(layer) for layer in caches]]


def object_shape(case: Case) -> tuple[int, ...]:
    """Shape of an object as LMCache's tensor form has it."""
    row, lengths = FORMAT_ROWS[case.format], axis_lengths(case)
    width = lengths["CS"] if "CS" in row.axes else lengths["HS"]
    if row.axes[-2] == "TWO":
        width = 2 * case.head_size
    if row.lists[-1:] == ("NP",):
        width = sum(case.latent_widths)
    heads = 1 if row.is_single_latent else case.heads
    tail = (case.layers, case.object_slots, heads * width)
    return tail if row.kv_size == 1 else (2, *tail)


def block_ids(case: Case) -> list[int]:
    generator = torch.Generator().manual_seed(case.seed + 1)
    pool = torch.randperm(case.blocks, generator=generator).tolist()
    assert case.num_ids <= case.blocks
    return pool[: case.num_ids]


@dataclass
class Setting:
    """One side of a comparison: an arena with a pool and objects in it."""

    case: Case
    arena: Arena
    caches: Any
    objects: list[torch.Tensor]
    # [keys, values] handed over as one list
    flat: bool = False

    @classmethod
    def make(cls, case: Case) -> Setting:
        arena = Arena(arena_bytes(case), case.seed)
        caches = build_pool(case, arena)
        dtype = torch.uint8 if FORMAT_ROWS[case.format].planar_bytes else case.dtype
        objects = [arena.cut(object_shape(case), dtype) for _ in range(case.objects)]
        return cls(case, arena, caches, objects)

    def call(
        self,
        operation: Callable[..., None],
        direction: int,
        *,
        pointers: bool = False,
        object_pointers: bool = False,
        tensor_ids: bool = False,
        ids: list[int] | None = None,
    ) -> None:
        """Run `operation` with LMCache's nine arguments in the wanted forms."""
        case = self.case
        wanted = block_ids(case) if ids is None else ids
        caches = self.caches[0] + self.caches[1] if self.flat else self.caches
        if case.joined_content:
            caches = [layer.flatten(-2) for layer in caches]
        operation(
            pointer_tensor(case, self.caches) if pointers else caches,
            [o.data_ptr() for o in self.objects] if object_pointers else self.objects,
            torch.tensor(wanted, dtype=torch.int64) if tensor_ids else wanted,
            torch.device("cpu"),
            core.TransferDirection(direction),
            shape_desc(case, self.caches),
            case.chunk_slots,
            core.EngineKVFormat(int(case.format)),
            case.skip,
        )

    def expect(self, direction: int) -> None:
        """What the transfer must do, element by element, by plain indexing."""
        case, views = self.case, plane_views(self.case, self.caches)
        row = FORMAT_ROWS[case.format]
        for position, block in enumerate(block_ids(case)):
            if position < case.skip:
                continue
            which, inside = divmod(position, case.blocks_per_object)
            first = inside * case.slots
            target = self.objects[which]
            for layer in range(case.layers):
                column = 0
                for plane, layers in enumerate(views):
                    page = layers[layer][block]
                    rows = target[layer] if row.kv_size == 1 else target[plane, layer]
                    width = page[0].numel()
                    part = rows[first : first + case.slots, column : column + width]
                    if direction == 1:
                        part.copy_(page.reshape(case.slots, width))
                    else:
                        page.copy_(part.reshape(page.shape))
                    column += width if row.kv_size == 1 else 0


def refuse(*_: Any) -> None:
    """Stands where LMCache's operation would be called; nothing may fall through."""
    raise AssertionError("fell through to LMCache's operation")


def assert_planar_rows(operation: Callable[..., None], direction: int) -> None:
    """A page of all values, then all scales, against an object of rows: values, then the scale."""
    case = Case(EngineKVFormat.NL_X_NB_BSV_BSS, layers=2, skip=1)
    mine, plain = Setting.make(case), Setting.make(case)
    mine.call(operation, direction)
    for position, block in enumerate(block_ids(case)):
        if position < case.skip:
            continue
        which, inside = divmod(position, case.blocks_per_object)
        for layer in range(case.layers):
            page = plain.caches[layer][block].view(-1)
            for slot in range(case.slots):
                row = plain.objects[which][layer, inside * case.slots + slot]
                values = page[slot * 128 : (slot + 1) * 128]
                scale = page[case.slots * 128 + slot * 4 : case.slots * 128 + (slot + 1) * 4]
                if direction == 1:
                    row[:128], row[128:] = values, scale
                else:
                    values.copy_(row[:128])
                    scale.copy_(row[128:])
    assert torch.equal(mine.arena.bytes, plain.arena.bytes)


def arena_bytes(case: Case) -> int:
    lengths = axis_lengths(case)
    page = case.slots * case.heads * max(lengths["HS"], 2 * case.head_size, sum(case.latent_widths))
    block = (2 * page + case.padding) * 4
    return (
        case.layers * case.blocks * block
        + case.objects * case.layers * case.object_slots * page * 8
        + 128 * (4 * case.layers + case.objects + 4)
    )
