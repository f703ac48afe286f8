"""The values of LMCache's object-group plan, as its planner builds them, by position.

LMCache has these only in its compiled extension, unreadable from Python; its planner takes the
classes from `device_ops`. Names and order are those of LMCache 0.5.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelGroupSpec:
    """One kernel group of the plan. Addresses are of the group's device.

    Args:
        paged_buffer_ptrs: address of its pool pointers, int64.
        lmcache_objects_ptrs: address of its part of the staging buffer, per batch slot.
        shape_desc: LMCache's `PageBufferShapeDesc`.
        lmcache_chunk_size: slots that one object keeps of this group.
        block_ids_base: address of its block ids, int64, of which there are `block_ids_capacity`.
    """

    paged_buffer_ptrs: int
    lmcache_objects_ptrs: Sequence[int]
    shape_desc: Any
    lmcache_chunk_size: int
    engine_kv_format: Any
    block_ids_base: int
    block_ids_capacity: int


@dataclass(frozen=True, slots=True)
class StagingCopy:
    """One whole object to or from its staging slot; `host_offset` is its place in its allocator."""

    dest: int
    src: int
    nbytes: int
    host_offset: int


@dataclass(frozen=True, slots=True)
class LaunchVar:
    """One kernel group's blocks of one batch: a slice of its block ids, over the first slots."""

    group_idx: int
    block_ids_offset: int
    total_blocks: int
    num_objects: int
    skip_prefix_n_blocks: int


@dataclass(frozen=True, slots=True)
class BatchStep:
    """One batch of objects: their staging copies, and one launch per kernel group."""

    staging: Sequence[StagingCopy]
    launches: Sequence[LaunchVar]
