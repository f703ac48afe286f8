"""The library's door: register pools once, then store and retrieve the blocks of requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hma_triton.copiers import device_of, make_copier
from hma_triton.copy_layout import TransferEstimate, estimate, lay_out
from hma_triton.detection import LayoutHints, normalize_and_discover_per_layer_formats
from hma_triton.errors import ConfigError, PlanError
from hma_triton.group_view import (
    EngineGroupInfo,
    engine_group_layer_indices,
    expand_engine_block_ids,
)
from hma_triton.host_memory import PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array, ObjectLayout
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.pending_copy import PathReport, PendingCopy
from hma_triton.kv_layer_groups import KVLayerGroupsManager
from hma_triton.layout_hints import hints_with_blocks
from hma_triton.object_buffers import ObjectBuffer, id_arrays, object_address
from hma_triton.plan import BoolArray, TransferPlan, plan_transfer


class WaitEvent(Protocol):
    """Work of the producer that must end before the first byte moves."""

    def synchronize(self) -> None:
        """Block until the producer's work is done."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What one call moved. `skipped` lists (object group, chunk) pairs with a null kept block.

    `paths` says how a device moved each copy spec. `done` is there when the call did not wait.
    """

    nbytes: int
    num_blocks: int
    seconds: float
    backend: str
    skipped: tuple[tuple[int, int], ...] = ()
    paths: tuple[PathReport, ...] = ()
    done: PendingCopy | None = None


def group_caches(
    kv_caches: Mapping[str, Any] | Sequence[Any] | torch.Tensor,
    infos: Sequence[EngineGroupInfo] = (),
    *,
    layout_hints: LayoutHints | Mapping[str, Any] | None = None,
    chunk_tokens: int = 256,
    separate_object_groups: bool = True,
    engine_type: str = "vllm",
) -> tuple[list[Any], KVLayerGroupsManager]:
    """The caches, normalised, and their groups; no byte of them is read, so they may have none.

    Raises:
        GeometryError: layouts or groups that cannot be served; names the layer or group.
    """
    layers, formats = normalize_and_discover_per_layer_formats(
        kv_caches,
        engine_group_layer_indices(infos),
        engine_type,
        hints_with_blocks(layout_hints, infos, kv_caches),
    )
    manager = KVLayerGroupsManager(
        layers,
        formats,
        infos,
        lmcache_tokens_per_chunk=chunk_tokens,
        separate_object_groups=separate_object_groups,
    )
    return layers, manager


class TransferEngine:
    """Moves blocks of registered pools to and from host objects, bit for bit.

    Immutable once built, so store and retrieve may be called from several threads at once.

    Args:
        kv_caches: the engine's caches by layer name, or in registration order.
        engine_group_infos: one info per kernel group; empty for a non-hybrid engine.
        layout_hints: the memory order the engine names, see `detection`.
        chunk_tokens: tokens of one object; every group's block must divide it.
        separate_object_groups: whether groups with different reuse rules get objects of their own.
        object_layout: `opaque` (pages as they lie) or `token_major` (LMCache's order).
        backend: `auto`, `cpu`, `device`, `triton` (the kernel alone) or `reference`.
        null_block_id: the engine's "nothing here" id, None when it has none.
        pinned_host: registrations of the memory that objects lie in, for pools on a device.
        device_settings: path, staging buffer and program budget of a device.

    Raises:
        GeometryError: layouts or groups that cannot be served; names the layer or group.
        ConfigError: an unknown backend or object layout.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, Any] | Sequence[Any] | torch.Tensor,
        engine_group_infos: Sequence[EngineGroupInfo] = (),
        *,
        layout_hints: LayoutHints | Mapping[str, Any] | None = None,
        chunk_tokens: int = 256,
        separate_object_groups: bool = True,
        object_layout: str = "opaque",
        backend: str = "auto",
        null_block_id: int | None = 0,
        threads: int | None = None,
        engine_type: str = "vllm",
        pinned_host: PinnedHost | None = None,
        device_settings: DeviceSettings | None = None,
    ) -> None:
        if object_layout not in {layout.value for layout in ObjectLayout}:
            raise ConfigError(
                f"object_layout {object_layout!r} is unknown; use 'opaque' or 'token_major'"
            )
        self.engine_group_infos = tuple(engine_group_infos)
        layers, self.manager = group_caches(
            kv_caches,
            self.engine_group_infos,
            layout_hints=layout_hints,
            chunk_tokens=chunk_tokens,
            separate_object_groups=separate_object_groups,
            engine_type=engine_type,
        )
        self.object_layout = ObjectLayout(object_layout)
        self.chunk_tokens = chunk_tokens
        # normalised caches; held, for the pools must outlive every address taken from them
        self.layers = layers
        self._laid_out = lay_out(self.manager, self.object_layout, null_block_id)
        self.layout = self._laid_out.plan
        self._specs = self._laid_out.specs
        self._object_nbytes = self._laid_out.object_nbytes
        self._copier = make_copier(
            backend, device_of(layers), threads, pinned_host, device_settings
        )
        self._copier.prepare(self.copy_specs)

    @property
    def backend(self) -> str:
        """Name of the executor in use."""
        return self._copier.name

    @property
    def copy_specs(self) -> tuple[CopySpec, ...]:
        """Copy specs of all kernel groups, in order."""
        return tuple(spec for specs in self._specs for spec in specs)

    def specs_of(self, kernel_group_index: int) -> tuple[CopySpec, ...]:
        """Copy specs of one kernel group."""
        return self._specs[kernel_group_index]

    def object_nbytes(self, object_group: int) -> int:
        """Bytes of one object (one chunk) of `object_group`."""
        return self._object_nbytes[object_group]

    def expand(self, block_ids: Mapping[int, Sequence[int]] | Sequence[Any]) -> list[Any]:
        """Block-id lists per engine group, as one list per info (`expand_engine_block_ids`)."""
        return expand_engine_block_ids(self.engine_group_infos, block_ids)

    def store(
        self,
        block_ids: Sequence[Any],
        objects: Sequence[Sequence[ObjectBuffer]],
        *,
        skip_tokens: int = 0,
        wait_event: WaitEvent | None = None,
        wait: bool = True,
    ) -> TransferResult:
        """Copy blocks from the pools into `objects`.

        Args:
            block_ids: one list per info, covering the chunks from their first token on.
            objects: `objects[g][c]`, host bytes for chunk c of object group g, or None.
            skip_tokens: leading tokens to leave out, whole chunks only.
            wait_event: the producer's work, waited for before the first byte is read.
            wait: whether to return when the bytes have moved; False only matters on a device,
                where the result's `done` is then an event for a stream or the host to wait for.

        Raises:
            PlanError: short lists, ids out of range, buffers of another size.
        """
        return self.store_addresses(
            block_ids,
            self._addresses(objects),
            skip_tokens=skip_tokens,
            wait_event=wait_event,
            wait=wait,
        )

    def retrieve(
        self,
        block_ids: Sequence[Any],
        objects: Sequence[Sequence[ObjectBuffer]],
        *,
        skip_tokens: int = 0,
        wait_event: WaitEvent | None = None,
        wait: bool = True,
    ) -> TransferResult:
        """Copy `objects` into the pools: every real id from `skip_tokens` on, or nothing.

        Raises:
            PlanError: as for `store`, or a skip that is not on a block edge.
            IncompleteRetrieveError: a real id whose bytes are not in `objects`.
        """
        return self.retrieve_addresses(
            block_ids,
            self._addresses(objects),
            skip_tokens=skip_tokens,
            wait_event=wait_event,
            wait=wait,
        )

    def store_addresses(
        self,
        block_ids: Sequence[Any],
        object_addresses: Sequence[Int64Array],
        *,
        skip_tokens: int = 0,
        wait_event: WaitEvent | None = None,
        wait: bool = True,
    ) -> TransferResult:
        """`store` with objects given as addresses: per object group int64 `[num_chunks]`, 0 = None.

        The caller vouches for `object_nbytes` writable bytes at every address.
        """
        present = self._present(object_addresses)
        plan = self.plan(Direction.STORE, block_ids, present, skip_tokens)
        return self._execute(Direction.STORE, plan, object_addresses, wait_event, wait)

    def retrieve_addresses(
        self,
        block_ids: Sequence[Any],
        object_addresses: Sequence[Int64Array],
        *,
        skip_tokens: int = 0,
        wait_event: WaitEvent | None = None,
        wait: bool = True,
    ) -> TransferResult:
        """`retrieve` with objects given as addresses, see `store_addresses`."""
        present = self._present(object_addresses)
        plan = self.plan(Direction.RETRIEVE, block_ids, present, skip_tokens)
        return self._execute(Direction.RETRIEVE, plan, object_addresses, wait_event, wait)

    def plan(
        self,
        direction: Direction,
        block_ids: Sequence[Any],
        present: BoolArray,
        skip_tokens: int = 0,
    ) -> TransferPlan:
        """What a call would move, checked, without moving it.

        Args:
            present: `[num_object_groups, num_chunks]`, the objects that are there.
        """
        return plan_transfer(direction, self.layout, id_arrays(block_ids), present, skip_tokens)

    def estimate(self, plan: TransferPlan) -> TransferEstimate:
        """Bytes, contiguous runs and launches of a plan."""
        return estimate(plan, self._laid_out)

    def close(self) -> None:
        """Release the executor's threads and tables; the pools stay the caller's."""
        self._copier.close()

    def _execute(
        self,
        direction: Direction,
        plan: TransferPlan,
        object_addresses: Sequence[Int64Array],
        wait_event: WaitEvent | None,
        wait: bool,
    ) -> TransferResult:
        jobs = self._jobs(plan, object_addresses)
        nbytes = sum(job.block_ids.shape[0] * job.spec.block_bytes for job in jobs)
        if isinstance(self._copier, DeviceCopier):
            started = time.perf_counter()
            pending = self._copier.start(direction, jobs, wait_event)
            if wait:
                pending.synchronize()
            return TransferResult(
                nbytes,
                plan.num_blocks,
                time.perf_counter() - started,
                pending.backend,
                plan.skipped,
                pending.reports,
                None if wait else pending,
            )
        if wait_event is not None:
            wait_event.synchronize()
        started = time.perf_counter()
        for job in jobs:
            self._copier.copy_blocks(job.spec, direction, job.block_ids, job.object_addresses)
        seconds = time.perf_counter() - started
        return TransferResult(nbytes, plan.num_blocks, seconds, self.backend, plan.skipped)

    def _jobs(self, plan: TransferPlan, object_addresses: Sequence[Int64Array]) -> list[CopyJob]:
        """The copies of a plan, one for each copy spec that moves something."""
        jobs = []
        for group in plan.groups:
            if not group.block_ids.size:
                continue
            bases = object_addresses[group.object_group][group.chunk_indices]
            for spec in self._specs[group.kernel_group_index]:
                places = (
                    bases
                    + spec.region_offset_bytes
                    + group.kept_indices * spec.object_block_stride_bytes
                )
                jobs.append(CopyJob(spec, group.block_ids, places))
        return jobs

    def _present(self, object_addresses: Sequence[Int64Array]) -> BoolArray:
        if len(object_addresses) != len(self._object_nbytes):
            raise PlanError(
                f"objects for {len(object_addresses)} object groups; this registration has "
                f"{len(self._object_nbytes)}"
            )
        counts = {len(addresses) for addresses in object_addresses}
        if len(counts) > 1:
            raise PlanError(
                f"object groups have {sorted(counts)} chunks; every group needs the same count "
                "(None marks an object that is not there)"
            )
        return np.stack([np.asarray(addresses) != 0 for addresses in object_addresses])

    def _addresses(self, objects: Sequence[Sequence[ObjectBuffer]]) -> list[Int64Array]:
        return [
            np.array(
                [
                    object_address(buffer, self._expected_nbytes(group), group, chunk)
                    for chunk, buffer in enumerate(buffers)
                ],
                dtype=np.int64,
            )
            for group, buffers in enumerate(objects)
        ]

    def _expected_nbytes(self, object_group: int) -> int:
        if object_group >= len(self._object_nbytes):
            raise PlanError(
                f"object group {object_group} does not exist; this registration has "
                f"{len(self._object_nbytes)}"
            )
        return self._object_nbytes[object_group]
