"""The chunks of one key namespace: a record per digest, in packed columns, found by the thousand.

A record holds its digest, its parent and children, its last use, its pins, and per column (an
object group on a rank) whether the object is there and where. Nothing here is a Python object per
record: a million of them are a few numpy arrays, and a lookup of thousands of digests is a handful
of array operations.
"""

from __future__ import annotations

import os
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from hma_triton.messages import DIGEST_BYTES

NONE = -1
ABSENT, WRITING, PRESENT, CORRUPT = 0, 1, 2, 3
_FREE_STAMP = -1
_WORDS = DIGEST_BYTES // 8
_MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93],
    dtype=np.uint64,
)
_MULTIPLIER_INTS = _MULTIPLIERS.tolist()
_WORD_MASK = (1 << 64) - 1
_ALL_WORDS_EQUAL = np.uint32(0x01010101)
Records = npt.NDArray[np.int32]
Keys = npt.NDArray[np.uint64]


def unpack_keys(digests: bytes) -> Keys:
    """[n, 4] uint64 over packed digests of `DIGEST_BYTES`."""
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, _WORDS)


def are_distinct(keys: Keys) -> bool:
    """Whether no key is there twice."""
    count = keys.shape[0]
    # different digests nearly always differ in their first word
    return bool(
        np.unique(keys[:, 0]).shape[0] == count or np.unique(keys, axis=0).shape[0] == count
    )


class ChunkIndex:
    """Open addressing over packed columns.

    `width` is the number of columns per record, `checksum_width` that of checksums (0: none kept).
    """

    def __init__(self, width: int, *, checksum_width: int = 0, capacity: int = 256) -> None:
        self.width = width
        self.checksum_width = checksum_width
        self.count = 0
        # records below `top` are or were in use
        self.top = 0
        self._free = array("i")
        # unknown to clients, so that nobody can choose digests that collide
        self._seed = np.frombuffer(os.urandom(8 * _WORDS), dtype=np.uint64)
        self._seeds = self._seed.tolist()
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        old_top = self.top

        def grown(name: str, dtype: type, *shape: int) -> Any:
            column: npt.NDArray[Any] = np.empty((capacity, *shape), dtype=dtype)
            if old_top:
                column[:old_top] = getattr(self, name)[:old_top]
            return column

        self.digest: Keys = grown("digest", np.uint64, _WORDS)
        self.parent: Records = grown("parent", np.int32)
        self.first_child: Records = grown("first_child", np.int32)
        self.next_sibling: Records = grown("next_sibling", np.int32)
        self.previous_sibling: Records = grown("previous_sibling", np.int32)
        self.stamp: npt.NDArray[np.int64] = grown("stamp", np.int64)
        self.pins: npt.NDArray[np.int32] = grown("pins", np.int32)
        self.writing: npt.NDArray[np.int32] = grown("writing", np.int32)
        self.offset: npt.NDArray[np.int64] = grown("offset", np.int64, self.width)
        self.state: npt.NDArray[np.uint8] = grown("state", np.uint8, self.width)
        if self.checksum_width:
            self.checksum: npt.NDArray[np.uint64] = grown(
                "checksum", np.uint64, self.checksum_width
            )
        self.capacity = capacity
        self._table: Records = np.full(2 << (capacity - 1).bit_length(), NONE, dtype=np.int32)
        self._mask = np.uint64(self._table.shape[0] - 1)
        live = np.flatnonzero(self.stamp[:old_top] != _FREE_STAMP).astype(np.int32)
        if live.size:
            self._place(live, self.digest[live])

    def _home(self, keys: Keys) -> npt.NDArray[np.int64]:
        with np.errstate(over="ignore"):
            mixed = (keys ^ self._seed) * _MULTIPLIERS
            folded = mixed[:, 0] ^ mixed[:, 1] ^ mixed[:, 2] ^ mixed[:, 3]
            folded ^= folded >> np.uint64(32)
            home: npt.NDArray[np.int64] = (folded & self._mask).astype(np.int64)
            return home

    def _home_of(self, record: int) -> int:
        """`_home` of one record, without the cost of an array operation."""
        folded = 0
        for word, seed, multiplier in zip(
            self.digest[record].tolist(), self._seeds, _MULTIPLIER_INTS, strict=True
        ):
            folded ^= ((word ^ seed) * multiplier) & _WORD_MASK
        folded ^= folded >> 32
        return int(folded & (self._table.shape[0] - 1))

    def find(self, keys: Keys) -> Records:
        """Records of `keys` [n, 4]; `NONE` where there is none."""
        place = self._home(keys)
        last = self._table.shape[0] - 1
        found = self._table[place]
        differs = self._differs(found, keys)
        active = np.flatnonzero(differs & (found != NONE))
        found[differs] = NONE
        place = place[active]
        while active.size:
            place = (place + 1) & last
            candidates = self._table[place]
            differs = self._differs(candidates, keys[active])
            found[active[~differs]] = candidates[~differs]
            going_on = differs & (candidates != NONE)
            active, place = active[going_on], place[going_on]
        return found

    def _differs(self, candidates: Records, keys: Keys) -> npt.NDArray[np.bool_]:
        """Where the candidate is `NONE` or has another digest."""
        equal = self.digest.take(candidates, axis=0, mode="clip") == keys
        # four truth values at a time; a reduction over so short an axis is slow
        different: npt.NDArray[np.bool_] = equal.view(np.uint32).ravel() != _ALL_WORDS_EQUAL
        different |= candidates == NONE
        return different

    def insert_chain(self, keys: Keys, parent: int, stamp: int) -> Records:
        """New records for `keys` [n, 4], none of which is there: each the parent of the next.

        Earlier records get the later stamps, so that leaves are older than their prefixes.
        """
        records = self._take_records(keys.shape[0])
        count = records.shape[0]
        self.digest[records] = keys
        self.parent[records[1:]] = records[:-1]
        self.first_child[records[:-1]] = records[1:]
        self.first_child[records[-1]] = NONE
        self.next_sibling[records] = NONE
        self.previous_sibling[records] = NONE
        self.stamp[records] = np.arange(stamp + count - 1, stamp - 1, -1)
        self.pins[records] = 0
        self.writing[records] = 0
        self.offset[records] = NONE
        self.state[records] = ABSENT
        self._link(int(records[0]), parent)
        self._place(records, keys)
        self.count += count
        return records

    def _take_records(self, count: int) -> Records:
        reused = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fresh = count - len(reused)
        if self.top + fresh > self.capacity:
            self._allocate(max(self.top + fresh, self.capacity * 3 // 2))
        records = np.array([*reused, *range(self.top, self.top + fresh)], dtype=np.int32)
        self.top += fresh
        return records

    def _place(self, records: Records, keys: Keys) -> None:
        place = self._home(keys)
        last = self._table.shape[0] - 1
        while records.size:
            empty = self._table[place] == NONE
            self._table[place[empty]] = records[empty]
            # of several that met in one empty place, the last one written stays
            left = self._table[place] != records
            records = records[left]
            place = (place[left] + 1) & last

    def _link(self, record: int, parent: int) -> None:
        self.parent[record] = parent
        if parent == NONE:
            return
        sibling = int(self.first_child[parent])
        self.next_sibling[record] = sibling
        if sibling != NONE:
            self.previous_sibling[sibling] = record
        self.first_child[parent] = record

    def remove(self, record: int) -> int:
        """Drop a childless record without objects; gives its parent."""
        assert self.first_child[record] == NONE, "leaves go before prefixes"
        parent = int(self.parent[record])
        following, previous = int(self.next_sibling[record]), int(self.previous_sibling[record])
        if following != NONE:
            self.previous_sibling[following] = previous
        if previous != NONE:
            self.next_sibling[previous] = following
        elif parent != NONE:
            self.first_child[parent] = following
        self._unplace(record)
        self.stamp[record] = _FREE_STAMP
        self._free.append(record)
        self.count -= 1
        return parent

    def _unplace(self, record: int) -> None:
        """Take the record out of the table and close the gap, so that no tombstones gather."""
        table, last = self._table, self._table.shape[0] - 1
        place = self._home_of(record)
        while table[place] != record:
            place = (place + 1) & last
        hole = place
        while True:
            place = (place + 1) & last
            moved = int(table[place])
            if moved == NONE:
                break
            home = self._home_of(moved)
            # may stand at the hole unless its home lies cyclically in (hole, place]
            if (place - home) & last >= (place - hole) & last:
                table[hole] = moved
                hole = place
        table[hole] = NONE

    def is_live(self, record: int) -> bool:
        """Whether the record is in use."""
        return bool(self.stamp[record] != _FREE_STAMP)

    def evictable_leaves(self) -> Records:
        """Childless records that nobody pins or writes."""
        top = self.top
        return np.flatnonzero(
            (self.stamp[:top] != _FREE_STAMP)
            & (self.first_child[:top] == NONE)
            & (self.pins[:top] == 0)
            & (self.writing[:top] == 0)
        ).astype(np.int32)

    def subtree(self, record: int) -> list[int]:
        """The record and all below it, children before parents."""
        found, stack = [], [record]
        while stack:
            current = stack.pop()
            found.append(current)
            child = int(self.first_child[current])
            while child != NONE:
                stack.append(child)
                child = int(self.next_sibling[child])
        found.reverse()
        return found

    def bookkeeping_nbytes(self) -> int:
        """Bytes of the columns and the table."""
        columns = [value for value in vars(self).values() if isinstance(value, np.ndarray)]
        return sum(column.nbytes for column in columns)
