"""Formats, directions and the two descriptors that LMCache's Python code fills in."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, IntEnum

from hma_triton.kv_format import FORMAT_ROWS
from hma_triton.kv_format import EngineKVFormat as _OurFormat

# LMCache prints a member's full name; an IntEnum would print the number.
EngineKVFormat = IntEnum(  # type: ignore[misc]
    "EngineKVFormat", {member.name: member.value for member in _OurFormat}, module=__name__
)
EngineKVFormat.__str__ = Enum.__str__  # type: ignore[method-assign]
GPUKVFormat = EngineKVFormat


class TransferDirection(IntEnum):
    """Host to device, device to host."""

    H2D = 0
    D2H = 1

    __str__ = Enum.__str__


class PageBufferShapeDesc:
    """A page buffer's geometry; LMCache sets the fields, `dtype` only where it knows it."""

    def __init__(self) -> None:
        self.kv_size = 0
        self.nl = 0
        self.nb = 0
        self.bs = 0
        self.nh = 0
        self.hs = 0
        self.element_size = 0
        self.block_stride_elems = 0


class KernelGroupSpec:
    """One kernel group of a plan; `install()` puts a readable one in its place."""

    def __init__(
        self,
        paged_buffer_ptrs: int,
        lmcache_objects_ptrs: Sequence[int],
        shape_desc: PageBufferShapeDesc,
        lmcache_chunk_size: int,
        engine_kv_format: int,
        block_ids_base: int,
        block_ids_capacity: int,
    ) -> None:
        self.arguments = (
            paged_buffer_ptrs,
            tuple(lmcache_objects_ptrs),
            shape_desc,
            lmcache_chunk_size,
            engine_kv_format,
            block_ids_base,
            block_ids_capacity,
        )


def is_kv_list(format: IntEnum) -> bool:
    """Whether the caches are `[keys, values]`."""
    return FORMAT_ROWS[_OurFormat(format)].is_kv_list


def is_layer_list(format: IntEnum) -> bool:
    """Whether the caches have one entry per layer."""
    return FORMAT_ROWS[_OurFormat(format)].is_layer_list


def is_cross_layer(format: IntEnum) -> bool:
    """Whether one tensor holds all layers."""
    return FORMAT_ROWS[_OurFormat(format)].is_cross_layer


def is_mla(format: IntEnum) -> bool:
    """Whether a slot holds one latent."""
    return FORMAT_ROWS[_OurFormat(format)].is_single_latent


def is_kv_second_tuple(format: IntEnum) -> bool:
    """Whether a layer's entry is a tuple of tensors."""
    return FORMAT_ROWS[_OurFormat(format)].is_plane_tuple
