"""From a copy spec to single contiguous copies: neighbours joined, nothing across a piece's edge.

Shared by the executors that post copies to a copy engine. A driver never merges neighbours, and
every entry costs it about half a microsecond (vLLM #48434), so runs are joined before they are
posted. Only neighbours inside one pinned piece are joined: two allocations may adjoin by chance,
and one copy must not span them. For the same reason rows are never joined with rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hma_triton.host_memory import DeviceView
from hma_triton.kernels.addressing import CopySpec, Int64Array, merge_adjacent

NO_PIECES = DeviceView(*(np.empty(0, dtype=np.int64) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class Items:
    """Blocks in the order of their objects: three parallel arrays `[n]`.

    Item i is `lengths[i]` blocks that follow each other in the pool and in the object.
    """

    block_ids: Int64Array
    object_addresses: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, slots=True)
class Runs:
    """Contiguous copies between pool (or staging) and objects: three parallel arrays `[m]`."""

    pool: Int64Array
    objects: Int64Array
    nbytes: Int64Array

    def __len__(self) -> int:
        return int(self.nbytes.shape[0])


def order_by_object(
    block_ids: Int64Array, object_addresses: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Both arrays in ascending order of the places, which never repeat in one copy."""
    if object_addresses.shape[0] < 2 or bool((np.diff(object_addresses) > 0).all()):
        return block_ids, object_addresses
    order = np.argsort(object_addresses, kind="stable")
    return block_ids[order], object_addresses[order]


def join_items(
    spec: CopySpec, block_ids: Int64Array, object_addresses: Int64Array, view: DeviceView
) -> Items:
    """Join neighbours that are next to each other on both sides, inside pinned pieces only."""
    ids, places = order_by_object(block_ids, object_addresses)
    pinned = piece_of(view, places) >= 0
    if not pinned.any() or not spec.merges_blocks:
        return Items(ids, places, np.ones(ids.shape[0], dtype=np.int64))
    joined = merge_adjacent(spec, ids[pinned], places[pinned])
    loose = int(np.count_nonzero(~pinned))
    return Items(
        np.concatenate((joined[0], ids[~pinned])),
        np.concatenate((joined[1], places[~pinned])),
        np.concatenate((joined[2], np.ones(loose, dtype=np.int64))),
    )


def piece_of(view: DeviceView, addresses: Int64Array) -> Int64Array:
    """`DeviceView.piece_of`, all -1 where nothing is pinned."""
    if view.starts.shape[0] == 0:
        return np.full(addresses.shape[0], -1, dtype=np.int64)
    return view.piece_of(addresses)


def expand(spec: CopySpec, items: Items, view: DeviceView) -> Runs:
    """Every contiguous run of `items`: `rows * n0 * n1` of each, split at piece edges."""
    rows = np.arange(spec.num_rows, dtype=np.int64)
    outer = np.arange(spec.n0, dtype=np.int64)
    inner = np.arange(spec.n1, dtype=np.int64)
    row_addresses = np.array(spec.row_addresses, dtype=np.int64)
    pool = _grid(
        items.block_ids * spec.block_stride_bytes,
        row_addresses,
        outer * spec.pool_stride0_bytes,
        inner * spec.pool_stride1_bytes,
    )
    objects = _grid(
        items.object_addresses,
        rows * spec.object_row_stride_bytes,
        outer * spec.object_stride0_bytes,
        inner * spec.object_stride1_bytes,
    )
    per_item = spec.num_rows * spec.n0 * spec.n1
    nbytes = np.repeat(items.lengths * spec.run_bytes, per_item)
    return split_at_pieces(Runs(pool, objects, nbytes), view)


def _grid(
    items: Int64Array, rows: Int64Array, outer: Int64Array, inner: Int64Array
) -> npt.NDArray[np.int64]:
    sums = items[:, None, None, None] + rows[:, None, None] + outer[:, None] + inner
    return sums.reshape(-1)


def split_at_pieces(runs: Runs, view: DeviceView) -> Runs:
    """`runs` with every copy cut where a pinned piece ends and the next one starts."""
    while True:
        pieces = piece_of(view, runs.objects)
        if not (pieces >= 0).any():
            return runs
        # an address outside every piece ends nowhere
        limit = np.where(pieces >= 0, view.ends[pieces], np.iinfo(np.int64).max)
        room = limit - runs.objects
        crossing = np.flatnonzero(runs.nbytes > room)
        if not crossing.shape[0]:
            return runs
        head = room[crossing]
        nbytes = runs.nbytes.copy()
        nbytes[crossing] = head
        runs = Runs(
            np.concatenate((runs.pool, runs.pool[crossing] + head)),
            np.concatenate((runs.objects, runs.objects[crossing] + head)),
            np.concatenate((nbytes, runs.nbytes[crossing] - head)),
        )


def crosses_piece(spec: CopySpec, object_addresses: Int64Array, view: DeviceView) -> bool:
    """Whether some block's bytes lie in two pieces, or only partly in one."""
    last = object_addresses + (spec.object_extent_bytes - 1)
    return bool((piece_of(view, object_addresses) != piece_of(view, last)).any())
