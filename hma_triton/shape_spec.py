"""The ``--kvcache-shape-spec`` string: kernel groups written by hand.

Grammar (LMCache's)::

    spec        := group { ";" group }
    group       := "(" kv_size "," NB "," BS "," NH "," HS ")" ":" dtype ":" layers
    dtype       := "float16" | "float32" | "bfloat16" | "uint8" | "int8"

``NB`` blocks, ``BS`` slots per block, ``NH`` heads, ``HS`` elements per head; ``layers`` counts
consecutive layers, so layer indices follow from the order. Spaces and empty groups are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from hma_triton.errors import GeometryError
from hma_triton.handles import MAX_LAYERS
from hma_triton.kv_layer_groups import KernelGroupInfo, PageBufferShapeDesc

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_GROUP = re.compile(r"\(([^()]*)\)\s*:([^:]*):([^:]*)")


def parse_kvcache_shape_spec(spec: str) -> list[KernelGroupInfo]:
    """Kernel groups of ``spec``, without a format; blocks hold one token per slot.

    Raises:
        GeometryError: names the group's text and what is wrong with it.
    """
    groups: list[KernelGroupInfo] = []
    first_layer = 0
    for text in (part.strip() for part in spec.split(";")):
        if text:
            group = _parse_group(text, first_layer)
            groups.append(group)
            first_layer += group.num_layers
    if not groups:
        raise GeometryError(f"shape spec {spec!r} has no group: (2,NB,BS,NH,HS):dtype:layers")
    return groups


def _parse_group(text: str, first_layer: int) -> KernelGroupInfo:
    match = _GROUP.fullmatch(text)
    if match is None:
        raise GeometryError(f"group {text!r} is not (kv_size,NB,BS,NH,HS):dtype:layers")
    dtype_name = match.group(2).strip().lower()
    if dtype_name not in DTYPES:
        raise GeometryError(f"group {text!r}: dtype {dtype_name!r} is none of {', '.join(DTYPES)}")
    names = ("kv_size", "NB", "BS", "NH", "HS")
    numbers = match.group(1).split(",")
    if len(numbers) != len(names):
        raise GeometryError(f"group {text!r}: {len(numbers)} numbers for {', '.join(names)}")
    sizes = [
        _positive(value, name, text)
        for name, value in zip((*names, "layers"), (*numbers, match.group(3)), strict=True)
    ]
    kv_size, blocks, slots, heads, head_size, layers = sizes
    if first_layer + layers > MAX_LAYERS:
        raise GeometryError(f"group {text!r}: there are at most {MAX_LAYERS} layers in all")
    if kv_size > 2:
        raise GeometryError(f"group {text!r}: kv_size is {kv_size}; it is 1 or 2")
    dtype = DTYPES[dtype_name]
    return KernelGroupInfo(
        layer_indices=tuple(range(first_layer, first_layer + layers)),
        shape_desc=PageBufferShapeDesc(
            kv_size, layers, blocks, slots, heads, head_size, dtype.itemsize
        ),
        dtype=dtype,
        tokens_per_block=slots,
    )


def _positive(value: str, name: str, text: str) -> int:
    if not re.fullmatch(r"\s*[0-9]+\s*", value) or int(value) < 1:
        raise GeometryError(f"group {text!r}: {name} is {value.strip()!r}, not a positive number")
    return int(value)


def format_kvcache_shape_spec(groups: Sequence[KernelGroupInfo]) -> str:
    """The spec string of ``groups``; ``parse`` gives the same groups back.

    Raises:
        GeometryError: no groups, or a dtype that the grammar lacks.
    """
    if not groups:
        raise GeometryError("an empty list of groups has no shape spec")
    return ";".join(_format_group(group) for group in groups)


def _format_group(group: KernelGroupInfo) -> str:
    if group.dtype not in _DTYPE_NAMES:
        raise GeometryError(
            f"dtype {group.dtype} of layers {list(group.layer_indices)} is none of "
            f"{', '.join(DTYPES)}; a shape spec cannot say it"
        )
    desc = group.shape_desc
    sizes = f"({desc.kv_size},{desc.nb},{desc.bs},{desc.nh},{desc.hs})"
    return f"{sizes}:{_DTYPE_NAMES[group.dtype]}:{desc.nl}"
