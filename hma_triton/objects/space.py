"""Who has which bytes of the arena: taking slots, making room, letting records go."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hma_triton.errors import CapacityError
from hma_triton.objects.arena import Arena, SizeClass
from hma_triton.objects.chunk_index import ABSENT, CORRUPT, NONE, Records
from hma_triton.objects.eviction import VictimQueue, cheapest_window, owner_tag
from hma_triton.objects.namespace import Namespace


@dataclass(slots=True)
class StoreCounters:
    """What happened since the start."""

    evicted_objects: int = 0
    evicted_bytes: int = 0
    evicted_chunks: int = 0
    committed_objects: int = 0
    aborted_objects: int = 0
    corrupt_objects: int = 0
    evictions_by_cause: dict[str, int] = field(default_factory=dict)


class Space:
    """The arena and the records of all namespaces over it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.counters = StoreCounters()
        # grows with every use of a record; see `ChunkIndex.stamp`
        self.clock = 0
        self.namespaces: dict[int, Namespace] = {}
        self.corrupt: list[tuple[Namespace, int]] = []
        self._victims = VictimQueue()

    def offer(self, namespace: Namespace, records: Records) -> None:
        """Records that may have become evictable."""
        self._victims.offer(namespace, records)

    def close(self, namespace: Namespace) -> None:
        """Put a namespace's records first in line for eviction."""
        namespace.closed = True
        index = namespace.index
        index.stamp[: index.top] = np.minimum(index.stamp[: index.top], 0)
        self._victims = VictimQueue()

    def take_slot(self, namespace: Namespace, column: int, record: int) -> int:
        """A slot's offset for the record's object, after whatever evictions that takes.

        Raises:
            CapacityError: everything that could make room is pinned or being written.
        """
        size = namespace.column_size[column]
        tag = owner_tag(namespace.number, column, record)
        offset = self.arena.take(size, tag)
        freed = 0
        while offset is None:
            if not self.arena.open_span(size):
                freed += self._make_room(size, freed)
            offset = self.arena.take(size, tag)
        return offset

    def _make_room(self, size: SizeClass, freed: int) -> int:
        """Evict the next leaf, or, when that has freed enough of other sizes, a whole window."""
        victim = None
        if freed <= 2 * size.span_units * self.arena.unit_bytes:
            victim = self._victims.take(self.namespaces, self.clock)
        before = self.arena.used_bytes
        if victim is not None:
            self.evict(*victim, "room")
            return before - self.arena.used_bytes
        window = cheapest_window(self.arena, self.namespaces, size)
        if window is None:
            raise CapacityError(
                f"no room for an object of {size.slot_bytes} bytes: all of "
                f"{self.arena.nbytes} bytes is pinned or being written"
            )
        for owner, records in window:
            for record in records:
                if owner.index.is_live(record):
                    self.evict(owner, record, "window")
        return 0

    def drain(self, max_records: int) -> int:
        """Free records of cleared namespaces and of discarded objects; gives how many went."""
        drained = 0
        waiting, self.corrupt = self.corrupt, []
        for namespace, record in waiting:
            if not (namespace.index.state[record] == CORRUPT).any():
                continue
            below = namespace.index.subtree(record)
            if not all(self.may_go(namespace, each) for each in below):
                self.corrupt.append((namespace, record))
                continue
            for each in below:
                if namespace.index.is_live(each):
                    self.evict(namespace, each, "corrupt")
            drained += len(below)
        for namespace in [found for found in self.namespaces.values() if found.closed]:
            leaves = namespace.index.evictable_leaves()[: max(0, max_records - drained)]
            for record in leaves.tolist():
                if namespace.index.is_live(record):
                    self.evict(namespace, record, "clear")
                    drained += 1
            if namespace.index.count == 0:
                del self.namespaces[namespace.number]
        return drained

    @property
    def needs_drain(self) -> bool:
        """Whether `drain` may have something to do."""
        return bool(self.corrupt) or any(each.closed for each in self.namespaces.values())

    def may_go(self, namespace: Namespace, record: int) -> bool:
        """Whether nobody pins or writes the record."""
        return not (namespace.index.pins[record] or namespace.index.writing[record])

    def evict(self, namespace: Namespace, record: int, cause: str) -> None:
        """Drop a childless record with its objects, and parents that hold nothing by now."""
        index = namespace.index
        columns = np.flatnonzero(index.state[record]).tolist()
        for column in columns:
            self.free_object(namespace, record, column)
        counters = self.counters
        counters.evicted_chunks += 1
        counters.evicted_objects += len(columns)
        counters.evicted_bytes += int(namespace.column_bytes[columns].sum())
        counters.evictions_by_cause[cause] = counters.evictions_by_cause.get(cause, 0) + len(
            columns
        )
        parent = index.remove(record)
        if parent != NONE:
            self.drop_empty(namespace, np.array([parent], dtype=np.int32))

    def drop_barren(self, namespace: Namespace, records: Records) -> None:
        """Remove what hangs on records that hold nothing, where no hit can reach past them."""
        if not namespace.shape.needs_prefix:
            return
        index = namespace.index
        for record in records.tolist():
            if not index.is_live(record) or index.state[record].any():
                continue
            below = index.subtree(record)
            if all(self.may_go(namespace, each) for each in below):
                for each in below:
                    if index.is_live(each):
                        self.evict(namespace, each, "unreachable")

    def free_object(self, namespace: Namespace, record: int, column: int) -> None:
        """Give back the slot of one object."""
        index = namespace.index
        self.arena.give_back(int(index.offset[record, column]))
        index.state[record, column] = ABSENT
        index.offset[record, column] = NONE

    def drop_empty(self, namespace: Namespace, records: Records) -> None:
        """Remove records that hold nothing and lead nowhere, and parents left that way."""
        index = namespace.index
        for start in records.tolist():
            record = start
            while (
                record != NONE
                and index.is_live(record)
                and index.first_child[record] == NONE
                and self.may_go(namespace, record)
                and not index.state[record].any()
            ):
                record = index.remove(record)
            if record != NONE and index.is_live(record):
                self.offer(namespace, np.array([record], dtype=np.int32))
