"""Path `staged`: the kernel packs pages in a device buffer, the copy engine moves whole stretches.

The buffer has two halves. While one half is being packed by the kernel the copy engine empties the
other, so its size is a limit of its own and never follows the request. A half holds *slots*: one
slot is the stretch of one object that a slice of the spec's rows covers, laid out as it is there,
so that the kernel runs with the spec's own strides and no variant is compiled for staging.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hma_triton.cuda_driver import CudaCallError, CudaDriver
from hma_triton.host_memory import DeviceView
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.dma import post_runs
from hma_triton.kernels.runs import Runs, order_by_object, piece_of, split_at_pieces
from hma_triton.units import cdiv

logger = logging.getLogger(__name__)

STAGING_BYTES = 32 << 20

# kernel(spec, direction, block_ids, object_addresses, stream)
EnqueueKernel = Callable[[CopySpec, Direction, Int64Array, Int64Array, int], None]


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """One launch and its copies. `offsets` `[n]`: where each block lies in a half.

    `spans.pool` are offsets in the half as well, `spans.objects` host addresses.
    """

    spec: CopySpec
    block_ids: Int64Array
    offsets: Int64Array
    spans: Runs


def _page_is_dense(spec: CopySpec) -> bool:
    """Whether a page's bytes have no holes in the object."""
    expected = spec.run_bytes
    for stride, size in sorted(
        ((spec.object_stride1_bytes, spec.n1), (spec.object_stride0_bytes, spec.n0))
    ):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _pitch(spec: CopySpec) -> int:
    """Bytes of one row of a slot."""
    return spec.object_row_stride_bytes if spec.num_rows > 1 else spec.page_bytes


def row_slices(spec: CopySpec, half_bytes: int) -> tuple[tuple[int, CopySpec], ...]:
    """`spec` in slices of rows whose slots fit into a half: (first row, spec of the slice).

    Empty when the spec cannot be staged: holes in the object that are another spec's bytes, or a
    page larger than a half.
    """
    page, pitch = spec.page_bytes, _pitch(spec)
    single = spec.num_rows == 1 or pitch == page or spec.blocks_per_object == 1
    if not (_page_is_dense(spec) and (single or spec.object_block_stride_bytes == page)):
        return ()
    if page > half_bytes:
        return ()
    rows = max(1, min(spec.num_rows, half_bytes // pitch))
    rows = cdiv(spec.num_rows, cdiv(spec.num_rows, rows))
    return tuple(
        (first, replace(spec, row_addresses=spec.row_addresses[first : first + rows]))
        for first in range(0, spec.num_rows, rows)
    )


def _groups(spec: CopySpec, places: Int64Array, most: int) -> tuple[Int64Array, Int64Array]:
    """First index and length of the groups of items that share a slot, at most `most` each."""
    count = places.shape[0]
    if _pitch(spec) == spec.page_bytes or most == 1:
        return np.arange(count), np.ones(count, dtype=np.int64)
    starts = np.flatnonzero(np.concatenate(([True], np.diff(places) != spec.page_bytes)))
    lengths = np.diff(np.append(starts, count))
    pieces = -(-lengths // most)
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    firsts = np.repeat(starts, pieces) + within * most
    return firsts, np.minimum(np.repeat(lengths, pieces) - within * most, most)


def _spans(
    rows: int, page: int, pitch: int, starts: Int64Array, slots: Int64Array, lengths: Int64Array
) -> Runs:
    """Stretches of the objects that the groups fill, joined where they adjoin on both sides."""
    full = lengths * page == pitch
    step = np.arange(rows, dtype=np.int64) * pitch
    partial = ~full
    staging = np.concatenate((slots[full], (slots[partial, None] + step).reshape(-1)))
    objects = np.concatenate((starts[full], (starts[partial, None] + step).reshape(-1)))
    nbytes = np.concatenate(
        (
            np.full(int(full.sum()), rows * pitch, dtype=np.int64),
            np.repeat(lengths[partial] * page, rows),
        )
    )
    order = np.argsort(objects, kind="stable")
    return Runs(staging[order], objects[order], nbytes[order])


def _join(spans: Runs, view: DeviceView) -> Runs:
    """Join stretches that adjoin on both sides in pinned memory, then cut at its pieces' edges."""
    if len(spans) > 1:
        ends = spans.objects + spans.nbytes
        pinned = piece_of(view, spans.objects) >= 0
        follows = (
            (ends[:-1] == spans.objects[1:])
            & (spans.pool[:-1] + spans.nbytes[:-1] == spans.pool[1:])
            & pinned[:-1]
        )
        starts = np.flatnonzero(np.concatenate(([True], ~follows)))
        nbytes = np.add.reduceat(spans.nbytes, starts)
        spans = Runs(spans.pool[starts], spans.objects[starts], nbytes)
    return split_at_pieces(spans, view)


def staged_batches(
    slices: tuple[tuple[int, CopySpec], ...],
    block_ids: Int64Array,
    object_addresses: Int64Array,
    half_bytes: int,
    view: DeviceView,
) -> Iterator[StagedBatch]:
    """The launches of one copy, each filling at most a half."""
    ids, all_places = order_by_object(block_ids, object_addresses)
    for first_row, spec in slices:
        page, pitch, rows = spec.page_bytes, _pitch(spec), spec.num_rows
        places = all_places + first_row * pitch
        # a row longer than a half is cut in its blocks
        most = 1 if spec.blocks_per_object == 1 else min(pitch, half_bytes) // page
        firsts, lengths = _groups(spec, places, most)
        slot_bytes = rows * pitch if pitch <= half_bytes else most * page
        per_batch = max(1, half_bytes // slot_bytes)
        for start in range(0, firsts.shape[0], per_batch):
            chosen = slice(start, start + per_batch)
            group_first, group_length = firsts[chosen], lengths[chosen]
            slots = np.arange(group_first.shape[0], dtype=np.int64) * slot_bytes
            items = slice(int(group_first[0]), int(group_first[-1] + group_length[-1]))
            group_of = np.repeat(np.arange(group_first.shape[0]), group_length)
            offsets = slots[group_of] + places[items] - places[group_first][group_of]
            spans = _spans(rows, page, pitch, places[group_first], slots, group_length)
            yield StagedBatch(spec, ids[items], offsets, _join(spans, view))


class Staging:
    """A double buffer with its order: one for each direction, used by one thread at a time.

    Args:
        driver, kernel: what enqueues copies and launches.
        kernel_stream, copy_stream: the two sides; a caller orders itself by the first alone.
        half_bytes: bytes of one half; twice that is taken at the first use.
    """

    def __init__(
        self,
        driver: CudaDriver,
        kernel: EnqueueKernel,
        kernel_stream: int,
        copy_stream: int,
        half_bytes: int,
    ) -> None:
        self._driver = driver
        self._kernel = kernel
        self._kernel_stream = kernel_stream
        self._copy_stream = copy_stream
        self._half_bytes = half_bytes
        self._buffer: int | None = None
        self._refused = False
        self._packed = [driver.create_event() for _ in range(2)]
        self._emptied = [driver.create_event() for _ in range(2)]
        self._left = driver.create_event()
        self._turn = 0

    def take(self) -> bool:
        """Take the buffer, unless it is there; False where the device has no room for it."""
        if self._buffer is None and not self._refused:
            nbytes = 2 * self._half_bytes
            try:
                self._buffer = self._driver.allocate(nbytes)
            except CudaCallError as error:
                self._refused = True
                logger.warning("path staged is off: no buffer of %d bytes (%s)", nbytes, error.name)
        return self._buffer is not None

    def enqueue(
        self,
        slices: tuple[tuple[int, CopySpec], ...],
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
        view: DeviceView,
        batched: bool,
    ) -> int:
        """Enqueue one copy, after `take` and before `finish`; how many copies were posted.

        The pool is touched on the kernel stream alone. The copy stream touches the buffer, in
        turn, and objects: of a store after the launch that filled the half, of a retrieve at
        once, since an object that can be retrieved does not change any more.
        """
        assert self._buffer is not None, "the buffer is taken first"
        posted = 0
        batches = staged_batches(slices, block_ids, object_addresses, self._half_bytes, view)
        for batch in batches:
            half = self._turn
            self._turn ^= 1
            base = self._buffer + half * self._half_bytes
            if direction is Direction.STORE:
                self._store(batch, base, half, batched)
            else:
                self._retrieve(batch, base, half, batched)
            posted += len(batch.spans)
        return posted

    def finish(self) -> None:
        """Later work on the kernel stream comes after all copies."""
        self._driver.record_event(self._left, self._copy_stream)
        self._driver.wait_event(self._kernel_stream, self._left)

    def _store(self, batch: StagedBatch, base: int, half: int, batched: bool) -> None:
        driver = self._driver
        driver.wait_event(self._kernel_stream, self._emptied[half])
        self._kernel(
            batch.spec, Direction.STORE, batch.block_ids, batch.offsets + base, self._kernel_stream
        )
        driver.record_event(self._packed[half], self._kernel_stream)
        driver.wait_event(self._copy_stream, self._packed[half])
        self._post(batch, base, Direction.STORE, batched)
        driver.record_event(self._emptied[half], self._copy_stream)

    def _retrieve(self, batch: StagedBatch, base: int, half: int, batched: bool) -> None:
        driver = self._driver
        driver.wait_event(self._copy_stream, self._emptied[half])
        self._post(batch, base, Direction.RETRIEVE, batched)
        driver.record_event(self._packed[half], self._copy_stream)
        driver.wait_event(self._kernel_stream, self._packed[half])
        self._kernel(
            batch.spec,
            Direction.RETRIEVE,
            batch.block_ids,
            batch.offsets + base,
            self._kernel_stream,
        )
        driver.record_event(self._emptied[half], self._kernel_stream)

    def _post(self, batch: StagedBatch, base: int, direction: Direction, batched: bool) -> None:
        spans = batch.spans
        runs = Runs(spans.pool + base, spans.objects, spans.nbytes)
        post_runs(self._driver, runs, direction, self._copy_stream, batched)

    def close(self) -> None:
        """Release events and buffer; nothing enqueued may be pending."""
        for event in (*self._packed, *self._emptied, self._left):
            self._driver.destroy_event(event)
        if self._buffer is not None:
            self._driver.free(self._buffer)
            self._buffer = None
