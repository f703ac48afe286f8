"""One key namespace: what its objects look like, and which column of a record holds which."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hma_triton.errors import ConfigError
from hma_triton.objects.arena import SizeClass
from hma_triton.objects.chunk_index import PRESENT, ChunkIndex, Records
from hma_triton.plan import ReuseRule

# objects of one chunk over all groups and ranks
MAX_COLUMNS = 1024
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NamespaceShape:
    """The objects of one chunk.

    `replicated[g]`: equal bytes on all ranks, so rank 0 alone stores them. `regions[g]` are the
    (offset, bytes) of the kernel groups' parts of an object; each has a checksum of its own.
    """

    rules: tuple[ReuseRule, ...]
    object_nbytes: tuple[int, ...]
    replicated: tuple[bool, ...]
    world_size: int
    chunk_tokens: int
    regions: tuple[tuple[tuple[int, int], ...], ...]

    def __post_init__(self) -> None:
        lengths = {
            len(self.rules),
            len(self.object_nbytes),
            len(self.replicated),
            len(self.regions),
        }
        if len(lengths) != 1 or 0 in lengths:
            raise ConfigError(
                f"{len(self.rules)} rules, {len(self.object_nbytes)} sizes, {len(self.replicated)} "
                f"flags and {len(self.regions)} region lists for the object groups of a namespace"
            )
        columns = sum(1 if shared else self.world_size for shared in self.replicated)
        if columns > MAX_COLUMNS:
            raise ConfigError(
                f"{len(self.rules)} object groups on {self.world_size} ranks are {columns} objects "
                f"a chunk; at most {MAX_COLUMNS} can be served"
            )

    @property
    def num_groups(self) -> int:
        """Object groups of a chunk."""
        return len(self.rules)

    @property
    def needs_prefix(self) -> bool:
        """Whether some object group needs every chunk of a hit, so that orphans serve nobody."""
        return any(rule.chunks_for_hit(self.chunk_tokens) is None for rule in self.rules)

    def columns(self) -> npt.NDArray[np.int64]:
        """[num_groups, world_size]: the column of each object; replicated groups share one."""
        table = np.empty((self.num_groups, self.world_size), dtype=np.int64)
        following = 0
        for group, replicated in enumerate(self.replicated):
            width = 1 if replicated else self.world_size
            table[group] = np.arange(following, following + width)
            following += width
        return table

    def checksum_starts(self) -> npt.NDArray[np.int64]:
        """[num columns + 1]: where each column's region checksums start in a record's row."""
        columns = self.columns()
        counts = np.zeros(int(columns.max()) + 1, dtype=np.int64)
        for group in range(self.num_groups):
            counts[columns[group]] = len(self.regions[group])
        return np.concatenate(([0], np.cumsum(counts)))


@dataclass(slots=True, eq=False)
class Namespace:
    """A namespace's index and the tables derived from its shape once.

    `closed` is set when it was cleared: nothing is found in it any more, and its records go as soon
    as nobody reads or writes them.
    """

    number: int
    fingerprint: bytes
    shape: NamespaceShape
    index: ChunkIndex
    sizes: tuple[SizeClass, ...]
    closed: bool = False
    columns: npt.NDArray[np.int64] = field(init=False)
    column_bytes: npt.NDArray[np.int64] = field(init=False)
    column_size: tuple[SizeClass, ...] = field(init=False)
    checksum_starts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.columns = self.shape.columns()
        self.checksum_starts = self.shape.checksum_starts()
        group_of_column = np.zeros(self.width, dtype=np.int64)
        for group in range(self.shape.num_groups):
            group_of_column[self.columns[group]] = group
        self.column_size = tuple(self.sizes[group] for group in group_of_column)
        self.column_bytes = np.array([size.slot_bytes for size in self.column_size], dtype=np.int64)

    @property
    def width(self) -> int:
        """Objects that one chunk can have."""
        return int(self.columns.max()) + 1

    def present_on_all_ranks(self, records: Records) -> BoolArray:
        """[num_groups, n]: whether every rank has the group's object of the record."""
        there = self.index.state.take(records, axis=0, mode="clip") == PRESENT
        there &= (records >= 0)[:, None]
        if self.width == self.shape.num_groups:
            one_rank: BoolArray = there.T[self.columns[:, 0]]
            return one_rank
        return np.stack([there[:, columns].all(axis=1) for columns in self.columns])

    def total_bytes(self, records: Records) -> int:
        """Arena bytes of all objects of the records, those being written too."""
        held = np.count_nonzero(self.index.state.take(records, axis=0), axis=0)
        return int(held @ self.column_bytes)

    def record_bytes(self, records: Records) -> npt.NDArray[np.int64]:
        """[n]: arena bytes of the records' objects, those being written too."""
        held: npt.NDArray[np.int64] = (self.index.state[records] != 0) @ self.column_bytes
        return held
