"""Which LMCache we serve, checked by what it has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from hma_triton.errors import ConfigError
from hma_triton.kv_format import EngineKVFormat

# From 0.5.6 on, where the plan entry and all 19 formats are; the next minor may change either.
FIRST_VERSION = (0, 5, 6)
BEFORE_VERSION = (0, 6, 0)
VERSION_RANGE = "0.5.6 <= LMCache < 0.6.0"

TRANSFER_PARAMETERS = (
    "paged_buffer_ptrs_tensor",
    "lmcache_objects_ptrs",
    "block_ids",
    "device",
    "direction",
    "shape_desc",
    "lmcache_chunk_size",
    "engine_kv_format",
    "skip_prefix_n_blocks",
)
DESCRIPTOR_FIELDS = (
    "kv_size",
    "nl",
    "nb",
    "bs",
    "nh",
    "hs",
    "element_size",
    "block_stride_elems",
)
PLAN_SWITCH = "_HAS_NATIVE_OBJECT_GROUP_TRANSFER"


def read_version(text: str) -> tuple[int, int, int] | None:
    """The first three numbers of a version, None where it has none."""
    found = re.match(r"v?(\d+)\.(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def check_lmcache(version: str, device_ops: Any, core: Any, planner: Any) -> None:
    """Refuse an LMCache that our operations do not fit.

    A version that cannot be read (a checkout) is judged by its capabilities alone.

    Args:
        device_ops: `lmcache.device_ops`.
        core: `lmcache.lmcache_native`.
        planner: `lmcache.v1.multiprocess.object_group_transfer`.

    Raises:
        ConfigError: names the version, the range, and everything that is missing or different.
    """
    known = read_version(version)
    missing = list(_missing(device_ops, core, planner))
    if known is not None and not FIRST_VERSION <= known < BEFORE_VERSION:
        missing.insert(0, f"its version is outside {VERSION_RANGE}")
    if missing:
        raise ConfigError(
            f"LMCache {version} cannot take hma_triton's operations: {'; '.join(missing)}. "
            f"Install a version in {VERSION_RANGE}, or run it without them"
        )


def _missing(device_ops: Any, core: Any, planner: Any) -> Iterator[str]:
    operation = getattr(device_ops, "multi_layer_block_kv_transfer", None)
    if operation is None:
        yield "device_ops has no multi_layer_block_kv_transfer"
    else:
        parameters = _parameters(operation)
        if parameters is not None and parameters != TRANSFER_PARAMETERS:
            yield f"multi_layer_block_kv_transfer takes {', '.join(parameters)}"
    for name in ("lmcache_memcpy_async", "tensor_from_ptr", "PageBufferShapeDesc"):
        if getattr(device_ops, name, None) is None:
            yield f"device_ops has no {name}"
    descriptor = getattr(device_ops, "PageBufferShapeDesc", None)
    if descriptor is not None:
        lacking = [name for name in DESCRIPTOR_FIELDS if not hasattr(descriptor(), name)]
        if lacking:
            yield f"PageBufferShapeDesc has no {', '.join(lacking)}"
    yield from _different_formats(core)
    if not hasattr(planner, PLAN_SWITCH):
        yield f"its planner has no {PLAN_SWITCH}"


def _different_formats(core: Any) -> Iterator[str]:
    theirs = getattr(getattr(core, "EngineKVFormat", None), "__members__", {})
    for member in EngineKVFormat:
        value = theirs.get(member.name)
        if value is None:
            yield f"EngineKVFormat has no {member.name}"
        elif int(value) != member.value:
            yield f"EngineKVFormat.{member.name} is {int(value)}, not {member.value}"
    directions = getattr(getattr(core, "TransferDirection", None), "__members__", {})
    if {name: int(value) for name, value in directions.items()} != {"H2D": 0, "D2H": 1}:
        yield f"TransferDirection is {dict(directions)}"


def _parameters(operation: Any) -> tuple[str, ...] | None:
    """Names of an operation's parameters; None for a compiled one, which has no signature."""
    try:
        return tuple(inspect.signature(operation).parameters)
    except (TypeError, ValueError):
        return None
