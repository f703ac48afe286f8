"""The executor for pools on a device: one stream a direction, a path for every copy, events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from hma_triton.cuda_driver import CudaDriver
from hma_triton.host_memory import DeviceView, PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.dma import enqueue_dma
from hma_triton.kernels.paths import CopyShape, Path, PathTable, choose_path, path_table
from hma_triton.kernels.pending_copy import PathReport, PendingCopy
from hma_triton.kernels.reach import Reach, reach, registrations
from hma_triton.kernels.runs import NO_PIECES, Items, join_items
from hma_triton.kernels.staged import STAGING_BYTES, EnqueueKernel, Staging, row_slices
from hma_triton.torch_driver import open_driver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One spec's part of a transfer: `block_ids` [n] and `object_addresses` [n]."""

    spec: CopySpec
    block_ids: Int64Array
    object_addresses: Int64Array


@dataclass(frozen=True, slots=True)
class DeviceSettings:
    """What a user may set.

    Args:
        path: takes one path wherever it can be taken, instead of choosing.
        staging_bytes: both halves of one direction's device buffer, taken at first use.
        program_cap: most programs of a launch, instead of the tuned or written number.
    """

    path: Path | None = None
    staging_bytes: int = STAGING_BYTES
    program_cap: int | None = None


class DeviceKernel(Protocol):
    """The copy kernel as this executor uses it."""

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Upload tables and compile; waits until both are there."""

    def enqueue(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
        stream: int,
    ) -> None:
        """Launch on `stream` without waiting; addresses are the device's."""

    def tuned_path(self, spec: CopySpec, direction: Direction, num_blocks: int) -> str | None:
        """Path measured on this device for such a copy, None without one."""

    def close(self) -> None:
        """Release tables."""


@runtime_checkable
class StreamEvent(Protocol):
    """A producer's work that a stream can wait for."""

    def wait_on(self, stream: int) -> None:
        """Later work on `stream` waits for the producer."""


@runtime_checkable
class HostEvent(Protocol):
    """A producer's work that only the host can wait for."""

    def synchronize(self) -> None:
        """Block until the producer's work is done."""


class _Lane:
    """One direction: its streams, its staging, and the lock that orders enqueues."""

    def __init__(self, driver: CudaDriver, kernel: EnqueueKernel, half_bytes: int) -> None:
        self.lock = threading.Lock()
        self.stream = driver.create_stream()
        self.copy_stream = driver.create_stream()
        self.staging = Staging(driver, kernel, self.stream, self.copy_stream, half_bytes)


class DeviceCopier:
    """Moves pages between a device's pools and host objects.

    Store and retrieve have a stream each, of low priority and independent of the default stream;
    nothing here waits for the whole device.

    Args:
        device: where the pools are.
        pinned_host: the arena's registrations; objects elsewhere are looked up one by one and,
            when pageable, never touched by a kernel.
        kernel: launches on a stream; `TritonCopier`.
        table: written edges, instead of those of the device's architecture.
        driver: a stand-in for tests.
    """

    name = "device"

    def __init__(
        self,
        device: torch.device,
        pinned_host: PinnedHost | None = None,
        *,
        kernel: DeviceKernel,
        settings: DeviceSettings | None = None,
        table: PathTable | None = None,
        driver: CudaDriver | None = None,
    ) -> None:
        self.device = device
        self._driver = driver or open_driver(device.index or 0)
        self._kernel = kernel
        self._view = pinned_host.view(self._driver) if pinned_host else NO_PIECES
        self._table = table or path_table(self._driver.device_info().architecture)
        settings = settings or DeviceSettings()
        self._forced = settings.path
        self._half_bytes = settings.staging_bytes // 2
        self._lanes = {
            direction: _Lane(self._driver, kernel.enqueue, self._half_bytes)
            for direction in Direction
        }
        self._setup_stream = self._driver.create_stream()
        self._slices: dict[CopySpec, tuple[tuple[int, CopySpec], ...]] = {}
        self._logged: set[tuple[int, Direction, Path]] = set()

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Upload and compile for `specs` and their staged slices."""
        for spec in specs:
            self._slices[spec] = row_slices(spec, self._half_bytes)
        slices = [part for spec in specs for _, part in self._slices[spec]]
        with self._on_setup_stream():
            self._kernel.prepare(tuple(dict.fromkeys((*specs, *slices))))

    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None:
        """Move `block_ids` [n] of `spec` to or from `object_addresses` [n]; done on return."""
        self.start(direction, (CopyJob(spec, block_ids, object_addresses),)).synchronize()

    def start(
        self,
        direction: Direction,
        jobs: Sequence[CopyJob],
        wait_event: StreamEvent | HostEvent | None = None,
        view: DeviceView | None = None,
    ) -> PendingCopy:
        """Enqueue a transfer, after `wait_event` and without waiting for it.

        An event that a stream can wait for is waited for there, else on the host.

        Args:
            view: the registrations that the objects lie in, instead of the arena's.
        """
        if isinstance(wait_event, HostEvent) and not isinstance(wait_event, StreamEvent):
            wait_event.synchronize()
        lane = self._lanes[direction]
        with lane.lock, self._on_device():
            self._follow_caller(lane)
            if isinstance(wait_event, StreamEvent):
                wait_event.wait_on(lane.stream)
            reports: list[PathReport] = []
            complete = False
            try:
                for job in jobs:
                    if job.block_ids.shape[0]:
                        reports.append(self._enqueue(lane, direction, job, view or self._view))
                complete = True
            finally:
                lane.staging.finish()
                event = self._driver.create_event()
                self._driver.record_event(event, lane.stream)
                pending = PendingCopy(self._driver, event, tuple(reports))
                if not complete:
                    # what was enqueued still moves bytes: the caller may reuse them only after it
                    pending.synchronize()
        return pending

    def enqueue(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
        view: DeviceView | None = None,
    ) -> None:
        """`copy_blocks` as a part of the calling thread's current stream, without waiting.

        It comes after the work that is on that stream now, and later work there comes after it.
        """
        job = CopyJob(spec, block_ids, object_addresses)
        # the caller's current device stays what it was
        with self._on_device():
            pending = self.start(direction, (job,), view=view)
            if self.device.type != "cpu":
                pending.wait_on(torch.cuda.current_stream(self.device).cuda_stream)
            pending.close()

    def registrations(self, starts: Int64Array, ends: Int64Array) -> DeviceView | None:
        """See `reach.registrations`: a `view` for objects in memory that somebody else pinned."""
        with self._on_device():
            return registrations(self._driver, starts, ends)

    def _follow_caller(self, lane: _Lane) -> None:
        """Start after what the calling thread has on its current stream (use in one process)."""
        if self.device.type == "cpu":
            return
        event = self._driver.create_event()
        current = torch.cuda.current_stream(self.device).cuda_stream
        self._driver.record_event(event, current)
        self._driver.wait_event(lane.stream, event)
        self._driver.wait_event(lane.copy_stream, event)
        self._driver.destroy_event(event)

    def _enqueue(
        self, lane: _Lane, direction: Direction, job: CopyJob, view: DeviceView
    ) -> PathReport:
        spec, places = job.spec, job.object_addresses
        if spec not in self._slices:
            self.prepare((spec,))
        found = reach(self._driver, spec, places, view)
        items = join_items(spec, job.block_ids, places, view)
        pinned = found.addresses is not None
        path, reason = self._choose(lane, direction, spec, items, found)
        if path is Path.ZERO_COPY and found.addresses is not None:
            self._kernel.enqueue(spec, direction, job.block_ids, found.addresses, lane.stream)
            entries = 1
        elif path is Path.STAGED:
            entries = lane.staging.enqueue(
                self._slices[spec], direction, job.block_ids, places, view, pinned
            )
        else:
            entries = enqueue_dma(self._driver, spec, direction, items, view, lane.stream, pinned)
        nbytes = job.block_ids.shape[0] * spec.block_bytes
        report = PathReport(spec.kernel_group_index, direction, path, reason, nbytes, entries)
        self._log(report, spec)
        return report

    def _choose(
        self, lane: _Lane, direction: Direction, spec: CopySpec, items: Items, found: Reach
    ) -> tuple[Path, str]:
        blocks = int(items.lengths.sum())
        runs = items.lengths.shape[0] * spec.num_rows * spec.n0 * spec.n1
        nbytes = blocks * spec.block_bytes
        shape = CopyShape(
            direction=direction,
            runs=runs,
            run_bytes=nbytes // runs,
            nbytes=nbytes,
            reachable=found.addresses is not None,
            stageable=bool(self._slices[spec]),
            on_device=found.on_device,
        )
        tuned = self._kernel.tuned_path(spec, direction, blocks)
        choice = choose_path(shape, self._table, tuned, self._forced)
        if choice.path is Path.STAGED and not lane.staging.take():
            shape = replace(shape, stageable=False)
            choice = choose_path(shape, self._table, tuned, self._forced)
        return choice.path, choice.reason

    def _log(self, report: PathReport, spec: CopySpec) -> None:
        key = (report.kernel_group_index, report.direction, report.path)
        if key not in self._logged:
            self._logged.add(key)
            logger.info(
                "kernel group %d, %s: path %s (%s), runs of %d bytes",
                report.kernel_group_index,
                report.direction.name.lower(),
                report.path.value,
                report.reason,
                spec.run_bytes,
            )

    def _on_device(self) -> AbstractContextManager[object]:
        return nullcontext() if self.device.type == "cpu" else torch.cuda.device(self.device)

    def _on_setup_stream(self) -> AbstractContextManager[object]:
        """Uploads and first launches: neither on the default stream nor behind pending copies."""
        if self.device.type == "cpu":
            return nullcontext()
        stream = torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            self._setup_stream, self.device
        )
        return torch.cuda.stream(stream)

    def close(self) -> None:
        """Release streams, events and tables; waits for nothing, so nothing may be pending."""
        for lane in self._lanes.values():
            lane.staging.close()
            self._driver.destroy_stream(lane.copy_stream)
            self._driver.destroy_stream(lane.stream)
        self._lanes = {}
        self._kernel.close()
        self._driver.destroy_stream(self._setup_stream)
