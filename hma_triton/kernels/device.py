"""The executor for pools on a device: one stream a direction, a path for every copy, events."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from hma_triton.cuda_driver import CudaDriver, PointerKind
from hma_triton.errors import TransferError
from hma_triton.host_memory import PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.dma import enqueue_dma
from hma_triton.kernels.paths import CopyShape, Path, PathTable, choose_path, path_table
from hma_triton.kernels.runs import NO_PIECES, Items, crosses_piece, join_items, piece_of
from hma_triton.kernels.staged import STAGING_BYTES, EnqueueKernel, Staging, row_slices

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.00005
_EAGER_POLLS = 20


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One spec's part of a transfer: `block_ids` [n] and `object_addresses` [n]."""

    spec: CopySpec
    block_ids: Int64Array
    object_addresses: Int64Array


@dataclass(frozen=True, slots=True)
class PathReport:
    """What was done for one job. `entries`: launches (zero copy) or copies posted."""

    kernel_group_index: int
    direction: Direction
    path: Path
    reason: str
    nbytes: int
    entries: int


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


class PendingCopy:
    """A transfer that was enqueued. Its event is released when it was seen to have fired."""

    def __init__(self, driver: CudaDriver, event: int, reports: tuple[PathReport, ...]) -> None:
        self._driver = driver
        self._event: int | None = event
        self.reports = reports

    @property
    def backend(self) -> str:
        """The paths taken, as `device:dma+zero_copy`."""
        paths = sorted({report.path.value for report in self.reports})
        return f"device:{'+'.join(paths) or 'nothing'}"

    def query(self) -> bool:
        """Whether every byte has moved."""
        if self._event is not None and self._driver.query_event(self._event):
            self._driver.destroy_event(self._event)
            self._event = None
        return self._event is None

    def wait_on(self, stream: int) -> None:
        """Later work on `stream` waits for this transfer; the host does not."""
        if self._event is not None:
            self._driver.wait_event(stream, self._event)

    def synchronize(self, deadline_ns: int | None = None) -> None:
        """Wait on the host, by asking: no thread is ever stuck inside the driver.

        Raises:
            TransferError: `deadline_ns` (CLOCK_MONOTONIC) came first; the copy goes on.
        """
        polls = 0
        while not self.query():
            if deadline_ns is not None and time.monotonic_ns() > deadline_ns:
                raise TransferError("the copy did not end before the deadline")
            polls += 1
            time.sleep(0 if polls < _EAGER_POLLS else _POLL_SECONDS)


class _Lane:
    """One direction: its streams, its staging, and the lock that orders enqueues."""

    def __init__(
        self, driver: CudaDriver, kernel: EnqueueKernel, device: torch.device, half_bytes: int
    ) -> None:
        self.lock = threading.Lock()
        self.stream = driver.create_stream()
        self.copy_stream = driver.create_stream()
        self.staging = Staging(driver, kernel, device, self.stream, self.copy_stream, half_bytes)


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
        self._driver = driver or CudaDriver(device.index or 0)
        self._kernel = kernel
        self._view = pinned_host.view(self._driver) if pinned_host else NO_PIECES
        self._table = table or path_table(self._driver.device_info().architecture)
        settings = settings or DeviceSettings()
        self._forced = settings.path
        self._half_bytes = settings.staging_bytes // 2
        self._lanes = {
            direction: _Lane(self._driver, kernel.enqueue, device, self._half_bytes)
            for direction in Direction
        }
        self._slices: dict[CopySpec, tuple[tuple[int, CopySpec], ...]] = {}
        self._logged: set[tuple[int, Direction, Path]] = set()

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Upload and compile for `specs` and their staged slices."""
        for spec in specs:
            self._slices[spec] = row_slices(spec, self._half_bytes)
        slices = [part for spec in specs for _, part in self._slices[spec]]
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
    ) -> PendingCopy:
        """Enqueue a transfer, after `wait_event` and without waiting for it.

        An event that a stream can wait for is waited for there, else on the host.
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
                        reports.append(self._enqueue(lane, direction, job))
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

    def _follow_caller(self, lane: _Lane) -> None:
        """Start after what the calling thread has on its current stream (use in one process)."""
        if self.device.type == "cpu":
            return
        event = self._driver.create_event()
        current = torch.cuda.current_stream(self.device).cuda_stream
        self._driver.record_event(event, current)
        self._driver.wait_event(lane.stream, event)
        self._driver.destroy_event(event)

    def _enqueue(self, lane: _Lane, direction: Direction, job: CopyJob) -> PathReport:
        spec, places = job.spec, job.object_addresses
        if spec not in self._slices:
            self.prepare((spec,))
        reachable = self._device_addresses(spec, places)
        items = join_items(spec, job.block_ids, places, self._view)
        pinned = reachable is not None
        path, reason = self._choose(spec, direction, items, pinned)
        if path is Path.ZERO_COPY and reachable is not None:
            self._kernel.enqueue(spec, direction, job.block_ids, reachable, lane.stream)
            entries = 1
        elif path is Path.STAGED:
            entries = lane.staging.enqueue(
                self._slices[spec], direction, job.block_ids, places, self._view, pinned
            )
        else:
            entries = enqueue_dma(
                self._driver, spec, direction, items, self._view, lane.stream, pinned
            )
        nbytes = job.block_ids.shape[0] * spec.block_bytes
        report = PathReport(spec.kernel_group_index, direction, path, reason, nbytes, entries)
        self._log(report, spec)
        return report

    def _choose(
        self, spec: CopySpec, direction: Direction, items: Items, reachable: bool
    ) -> tuple[Path, str]:
        blocks = int(items.lengths.sum())
        runs = items.lengths.shape[0] * spec.num_rows * spec.n0 * spec.n1
        nbytes = blocks * spec.block_bytes
        shape = CopyShape(
            direction=direction,
            runs=runs,
            run_bytes=nbytes // runs,
            nbytes=nbytes,
            reachable=reachable,
            stageable=bool(self._slices[spec]),
        )
        tuned = self._kernel.tuned_path(spec, direction, blocks)
        choice = choose_path(shape, self._table, tuned, self._forced)
        return choice.path, choice.reason

    def _device_addresses(self, spec: CopySpec, places: Int64Array) -> Int64Array | None:
        """`places` as a kernel can use them, None when it cannot reach all of them."""
        pieces = piece_of(self._view, places)
        if (pieces >= 0).all():
            mapped = bool((self._view.starts != self._view.device_starts).any())
            if mapped and crosses_piece(spec, places, self._view):
                return None
            return self._view.device_addresses(places, pieces)
        addresses = np.empty_like(places)
        for index, place in enumerate(places.tolist()):
            kind, address = self._driver.pointer(place)
            if kind is PointerKind.PAGEABLE:
                return None
            addresses[index] = address
        return addresses

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

    def close(self) -> None:
        """Release streams, events and tables; waits for nothing, so nothing may be pending."""
        for lane in self._lanes.values():
            lane.staging.close()
            self._driver.destroy_stream(lane.copy_stream)
            self._driver.destroy_stream(lane.stream)
        self._lanes = {}
        self._kernel.close()
