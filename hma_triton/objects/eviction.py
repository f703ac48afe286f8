"""Who goes next: least recently used leaves, and the cheapest place for a large object.

Only a childless record may go, so a prefix never goes before what hangs on it, and a windowed group
never keeps objects that no hit can reach. When a leaf goes, its parent may become one.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np

from hma_triton.objects.arena import Arena, SizeClass, Span
from hma_triton.objects.chunk_index import NONE, Records
from hma_triton.objects.namespace import Namespace

# an owner's tag: namespace, column and record, plus one so that no tag is zero
_RECORD_BITS, _COLUMN_BITS = 32, 12
_BATCH = 4096
# the largest number of a namespace that a tag has room for
LAST_NAMESPACE = (1 << (64 - _RECORD_BITS - _COLUMN_BITS)) - 1


def owner_tag(namespace: int, column: int, record: int) -> int:
    """The arena's tag for one object."""
    return ((namespace << _COLUMN_BITS | column) << _RECORD_BITS | record) + 1


class VictimQueue:
    """Leaves by last use, oldest first. Entries are checked again when they are taken.

    Every leaf that is not queued was used after `_horizon`; an entry that is newer must wait for a
    fresh look at all leaves.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._horizon = -1

    def offer(self, namespace: Namespace, records: Records) -> None:
        """Records that may have become evictable leaves."""
        index = namespace.index
        stamps = index.stamp[records]
        # newer ones are found by the next look at all leaves
        leaves = np.flatnonzero((stamps <= self._horizon) & (index.first_child[records] == NONE))
        for place in leaves.tolist():
            entry = (int(stamps[place]), namespace.number, int(records[place]))
            heapq.heappush(self._heap, entry)

    def take(self, namespaces: Mapping[int, Namespace], clock: int) -> tuple[Namespace, int] | None:
        """The leaf that was used longest ago; None when nothing may go."""
        for refilled in (False, True):
            while self._heap and self._heap[0][0] <= self._horizon:
                stamp, number, record = heapq.heappop(self._heap)
                namespace = namespaces.get(number)
                if namespace is not None and _is_evictable(namespace, record, stamp):
                    return namespace, record
            if not refilled:
                self._refill(namespaces, clock)
        return None

    def _refill(self, namespaces: Mapping[int, Namespace], clock: int) -> None:
        entries: list[tuple[int, int, int]] = []
        horizon = clock
        for namespace in namespaces.values():
            leaves = namespace.index.evictable_leaves()
            stamps = namespace.index.stamp[leaves]
            if leaves.size > _BATCH:
                oldest = np.argpartition(stamps, _BATCH)[:_BATCH]
                leaves, stamps = leaves[oldest], stamps[oldest]
                horizon = min(horizon, int(stamps.max()))
            entries += [
                (stamp, namespace.number, record)
                for stamp, record in zip(stamps.tolist(), leaves.tolist(), strict=True)
            ]
        heapq.heapify(entries)
        self._heap, self._horizon = entries, horizon


def _is_evictable(namespace: Namespace, record: int, stamp: int) -> bool:
    index = namespace.index
    # the number may be another namespace's by now
    return bool(
        record < index.top
        and index.stamp[record] == stamp
        and index.first_child[record] == NONE
        and index.pins[record] == 0
        and index.writing[record] == 0
    )


def records_under(
    namespaces: Mapping[int, Namespace], spans: tuple[Span, ...]
) -> list[tuple[Namespace, Records]]:
    """The records that own slots in the spans."""
    tags = np.unique(np.concatenate([span.owner_tags() for span in spans]) - np.uint64(1))
    numbers = (tags >> np.uint64(_RECORD_BITS + _COLUMN_BITS)).astype(np.int64)
    records = (tags & np.uint64((1 << _RECORD_BITS) - 1)).astype(np.int32)
    return [
        (namespaces[number], np.unique(records[numbers == number]))
        for number in np.unique(numbers).tolist()
    ]


def cheapest_window(
    arena: Arena, namespaces: Mapping[int, Namespace], size: SizeClass
) -> tuple[tuple[Namespace, list[int]], ...] | None:
    """What must go so that one span for the class fits: the window whose last use is oldest.

    Gives subtrees, children before parents; None when every window holds pinned or half-written
    objects.
    """
    last_use: dict[int, int | None] = {}
    for span in arena.spans():
        owners = records_under(namespaces, (span,))
        free = all(
            not (namespace.index.pins[records] | namespace.index.writing[records]).any()
            for namespace, records in owners
        )
        last_use[span.first_unit] = (
            max((int(ns.index.stamp[records].max()) for ns, records in owners), default=-1)
            if free
            else None
        )
    candidates = []
    for order, spans in enumerate(arena.windows(size)):
        uses = [last_use[span.first_unit] for span in spans]
        known = [use for use in uses if use is not None]
        if spans and len(known) == len(uses):
            candidates.append((max(known), order, spans))
    for _, _, spans in sorted(candidates, key=lambda candidate: candidate[:2]):
        victims = _subtrees(records_under(namespaces, spans))
        if victims is not None:
            return victims
    return None


def _subtrees(
    owners: list[tuple[Namespace, Records]],
) -> tuple[tuple[Namespace, list[int]], ...] | None:
    """The owners and all that hangs on them; None when some of it is pinned or half-written."""
    victims = []
    for namespace, records in owners:
        index = namespace.index
        order: dict[int, None] = {}
        for record in records.tolist():
            if record in order:
                continue
            for below in index.subtree(record):
                if index.pins[below] or index.writing[below]:
                    return None
                order.setdefault(below)
        victims.append((namespace, list(order)))
    return tuple(victims)
