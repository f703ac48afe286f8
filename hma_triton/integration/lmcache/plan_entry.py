"""LMCache's `execute_object_group_transfer`: one call moves a whole object group.

LMCache plans in batches that go through a staging buffer. Where the executor can reach the objects
(on the CPU, and on a device when they are pinned) that buffer is skipped: every launch's slots are
looked up in its batch's staging copies and the blocks go straight between pages and objects, all
batches of a kernel group in one copy. Else the batches run as planned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hma_triton.errors import GeometryError, PlanError
from hma_triton.host_memory import DeviceView
from hma_triton.integration.lmcache.executors import Executors
from hma_triton.integration.lmcache.fallthrough import FallthroughLog
from hma_triton.integration.lmcache.geometry import TransferGeometry
from hma_triton.integration.lmcache.operation import (
    BlockTransfer,
    check_chunk,
    format_name,
    read_direction,
    read_format,
)
from hma_triton.integration.lmcache.own_operations import OwnOperations
from hma_triton.integration.lmcache.plan_types import BatchStep, KernelGroupSpec, StagingCopy
from hma_triton.integration.lmcache.pools import PagedShape, pointer_count
from hma_triton.kernels.addressing import Direction, Int64Array


@dataclass(frozen=True, slots=True)
class _Group:
    """A kernel group of the plan, resolved: its geometry and all of its block ids."""

    spec: KernelGroupSpec
    geometry: TransferGeometry
    block_ids: Int64Array


@dataclass(frozen=True, slots=True)
class _Launch:
    """Blocks of one launch: ids [n], and their places [n] in staging slots and in host objects."""

    group: int
    block_ids: Int64Array
    staged: Int64Array
    # None where a slot belongs to no staging copy
    direct: Int64Array | None


class ObjectGroupTransfer:
    """The replacement of the plan entry of one `device_ops` object."""

    def __init__(
        self,
        transfer: BlockTransfer,
        executors: Executors,
        own: OwnOperations,
        fallthrough: FallthroughLog,
    ) -> None:
        self._transfer = transfer
        self._executors = executors
        self._own = own
        self._fallthrough = fallthrough

    def execute_object_group_transfer(
        self,
        direction: Any,
        device: torch.device | str,
        host_buffer_alignment: int,
        kernel_group_specs: Sequence[KernelGroupSpec],
        batch_steps: Sequence[BatchStep],
        phase_timing_enabled: bool = False,
        session_id: str = "",
    ) -> None:
        """Run the plan of one object group; see `multi_layer_block_kv_transfer` for one launch.

        `phase_timing_enabled` and `session_id` ask for timings of LMCache's own phases, which do
        not exist here; no sample is recorded.

        Raises:
            PlanError: a launch outside its group's slots or block ids, or an object too small.
            BlockIdError: a block id outside the pool. In both cases nothing has been copied.
        """
        way, place = read_direction(direction), torch.device(device)
        used = {launch.group_idx for step in batch_steps for launch in step.launches}
        outside = [index for index in used if not 0 <= index < len(kernel_group_specs)]
        if outside:
            raise PlanError(f"launch of group {outside[0]} of {len(kernel_group_specs)}")
        groups: dict[int, _Group] = {}
        for index in sorted(used):
            spec = kernel_group_specs[index]
            try:
                groups[index] = self._resolve(spec, place)
            except GeometryError as reason:
                self._fallthrough.note(format_name(spec.engine_kv_format), str(reason))
                self._own.run_plan(
                    direction, device, host_buffer_alignment, kernel_group_specs, batch_steps
                )
                return
        steps = [_launches_of(step, groups, way) for step in batch_steps]
        for launches in steps:
            for launch in launches:
                group = groups[launch.group]
                name = format_name(group.spec.engine_kv_format)
                group.geometry.check_ids(launch.block_ids, f"kernel group {launch.group} ({name})")
        if _all_direct(batch_steps, steps):
            objects = [copy for step in batch_steps for copy in step.staging]
            view = self._executors.host_view(place, objects, way, host_buffer_alignment)
            if view is not None:
                self._run_direct(place, groups, steps, way, view)
                return
        for step, launches in zip(batch_steps, steps, strict=True):
            if way is Direction.RETRIEVE:
                self._own.copy_staging(step.staging, direction, place, host_buffer_alignment)
            for launch in launches:
                geometry = groups[launch.group].geometry
                self._executors.run(place, geometry, way, launch.block_ids, launch.staged)
            if way is Direction.STORE:
                self._own.copy_staging(step.staging, direction, place, host_buffer_alignment)

    def _run_direct(
        self,
        device: torch.device,
        groups: dict[int, _Group],
        steps: Sequence[Sequence[_Launch]],
        way: Direction,
        view: DeviceView,
    ) -> None:
        for index, group in groups.items():
            mine = [launch for launches in steps for launch in launches if launch.group == index]
            ids = np.concatenate([launch.block_ids for launch in mine])
            places = np.concatenate([launch.direct for launch in mine if launch.direct is not None])
            self._executors.run(device, group.geometry, way, ids, places, view)

    def _resolve(self, spec: KernelGroupSpec, device: torch.device) -> _Group:
        fmt = read_format(spec.engine_kv_format)
        shape = PagedShape.from_desc(spec.shape_desc)
        count = pointer_count(fmt, shape.num_layers)
        pointers = tuple(self._words(spec.paged_buffer_ptrs, count, device).tolist())
        geometry = self._transfer.pointer_geometry(
            fmt, shape, pointers, device, spec.lmcache_chunk_size
        )
        block_ids = self._words(spec.block_ids_base, spec.block_ids_capacity, device)
        return _Group(spec, geometry, block_ids)

    def _words(self, address: int, count: int, device: torch.device) -> Int64Array:
        """`count` int64 at `address`; those of a device are fetched, which waits for its stream."""
        if count == 0:
            return np.empty(0, dtype=np.int64)
        if device.type == "cpu":
            return np.array((ctypes.c_int64 * count).from_address(address), dtype=np.int64)
        fetched: Int64Array = self._own.tensor_at(address, count, device).cpu().numpy()
        return fetched


def _launches_of(step: BatchStep, groups: dict[int, _Group], way: Direction) -> list[_Launch]:
    """The step's launches with their blocks picked out and placed.

    Raises:
        PlanError: a launch outside its group's slots or block ids.
    """
    launches = []
    for launch in step.launches:
        group, geometry = groups[launch.group_idx], groups[launch.group_idx].geometry
        slots = group.spec.lmcache_objects_ptrs
        first, total = launch.block_ids_offset, launch.total_blocks
        check_chunk(
            group.spec.lmcache_chunk_size,
            int(group.spec.shape_desc.bs),
            launch.skip_prefix_n_blocks,
        )
        if not 1 <= launch.num_objects <= len(slots):
            raise PlanError(
                f"kernel group {launch.group_idx}: {launch.num_objects} objects in a launch over "
                f"{len(slots)} staging slots"
            )
        if first < 0 or total < 0 or first + total > group.block_ids.size:
            raise PlanError(
                f"kernel group {launch.group_idx}: block ids {first} to {first + total} of "
                f"{group.block_ids.size}"
            )
        start = launch.skip_prefix_n_blocks
        stop = max(start, min(total, launch.num_objects * geometry.blocks_per_object))
        bases = np.asarray(slots[: launch.num_objects], dtype=np.int64)
        hosts = _host_addresses(step.staging, bases, geometry.object_bytes, way)
        launches.append(
            _Launch(
                launch.group_idx,
                group.block_ids[first + start : first + stop],
                geometry.block_addresses(bases, start, stop),
                None if hosts is None else geometry.block_addresses(hosts, start, stop),
            )
        )
    return launches


def _host_addresses(
    staging: Sequence[StagingCopy], slots: Int64Array, nbytes: int, way: Direction
) -> Int64Array | None:
    """Where in host objects the staging addresses `slots` [n] lie; None if one lies in none.

    Raises:
        PlanError: a slot that begins inside an object and ends past it.
    """
    pairs = [(c.src, c.dest) if way is Direction.STORE else (c.dest, c.src) for c in staging]
    hosts = np.empty_like(slots)
    for number, slot in enumerate(slots.tolist()):
        for (buffer, host), copy in zip(pairs, staging, strict=True):
            if buffer <= slot < buffer + copy.nbytes:
                if slot + nbytes > buffer + copy.nbytes:
                    raise PlanError(
                        f"{nbytes} bytes of a kernel group at byte {slot - buffer} of an object of "
                        f"{copy.nbytes} bytes"
                    )
                hosts[number] = host + slot - buffer
                break
        else:
            return None
    return hosts


def _all_direct(batch_steps: Sequence[BatchStep], steps: Sequence[Sequence[_Launch]]) -> bool:
    """Whether every block has a place in a host object, so that no staging copy is needed."""
    return all(step.launches for step in batch_steps) and all(
        launch.direct is not None for launches in steps for launch in launches
    )
