"""Which blocks of a request move where, decided and checked before a byte does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from hma_triton.errors import AlignmentError, BlockIdError, IncompleteRetrieveError
from hma_triton.plan.windows import ReuseRule

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
IdArray = npt.NDArray[np.integer]


class Direction(IntEnum):
    """Which way the bytes go."""

    STORE = 0
    RETRIEVE = 1


@dataclass(frozen=True, slots=True)
class PlanGroup:
    """One kernel group as planning sees it."""

    kernel_group_index: int
    engine_group_idx: int
    object_group: int
    tokens_per_block: int
    # ids are 0 .. num_blocks - 1
    num_blocks: int
    blocks_per_chunk: int
    # blocks at a chunk's end that its object keeps
    kept_blocks: int


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """All that planning knows of a registration, checked once.

    `rules[g]` belongs to object group g; `groups` are the kernel groups in order.
    """

    chunk_tokens: int
    null_block_id: int | None
    groups: tuple[PlanGroup, ...]
    rules: tuple[ReuseRule, ...]

    @property
    def is_recurrent(self) -> bool:
        """Whether any object group holds recurrent state."""
        return any(rule.recurrent for rule in self.rules)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Blocks of one kernel group that move: three parallel arrays of length n.

    `kept_indices[i]` is the place of block i among the kept blocks of chunk `chunk_indices[i]`.
    """

    kernel_group_index: int
    object_group: int
    block_ids: Int64Array
    chunk_indices: Int64Array
    kept_indices: Int64Array


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Every block of a request that moves, and the (object group, chunk) pairs left out."""

    groups: tuple[GroupPlan, ...]
    skipped: tuple[tuple[int, int], ...]

    @property
    def num_blocks(self) -> int:
        """Block ids over all kernel groups."""
        return sum(group.block_ids.shape[0] for group in self.groups)


def _check_ids(group: PlanGroup, ids: Int64Array, null_block_id: int | None) -> None:
    """Raise BlockIdError for an id outside the pool; the null id is always allowed."""
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low >= 0 and high < group.num_blocks:
        return
    outside = (ids < 0) | (ids >= group.num_blocks)
    if null_block_id is not None:
        outside &= ids != null_block_id
    if outside.any():
        where = int(np.flatnonzero(outside.ravel())[0])
        raise BlockIdError(
            f"kernel group {group.kernel_group_index} (engine group {group.engine_group_idx}): "
            f"block id {int(ids.ravel()[where])} at position {where} is outside the pool of "
            f"{group.num_blocks} blocks"
        )


def _chunk_table(
    group: PlanGroup, block_ids: IdArray, num_chunks: int, null_block_id: int | None
) -> Int64Array:
    """Block ids as `[num_chunks, blocks_per_chunk]`, all null or inside the pool.

    Raises:
        BlockIdError: the list is shorter than the chunks, or an id is outside the pool.
    """
    needed = num_chunks * group.blocks_per_chunk
    if block_ids.ndim != 1 or block_ids.shape[0] < needed:
        raise BlockIdError(
            f"kernel group {group.kernel_group_index} (engine group {group.engine_group_idx}): "
            f"{block_ids.shape[0]} block ids for {num_chunks} chunks, "
            f"which take {needed} of {group.tokens_per_block} tokens each"
        )
    table = np.asarray(block_ids[:needed], dtype=np.int64)
    _check_ids(group, table, null_block_id)
    return table.reshape(num_chunks, group.blocks_per_chunk)


def _is_real(ids: Int64Array, null_block_id: int | None) -> BoolArray:
    if null_block_id is None:
        return np.ones(ids.shape, dtype=np.bool_)
    real: BoolArray = ids != null_block_id
    return real


def _check_counts(layout: PlanLayout, block_ids: Sequence[IdArray]) -> None:
    if len(block_ids) != len(layout.groups):
        raise BlockIdError(
            f"{len(block_ids)} block-id lists for {len(layout.groups)} kernel groups; "
            "there must be one list per info, in the order of registration"
        )


def storable_chunks(layout: PlanLayout, block_ids: Sequence[IdArray], num_chunks: int) -> BoolArray:
    """Which chunks can be stored: `[num_object_groups, num_chunks]`.

    A chunk of an object group is storable when every block its kernel groups keep is real.
    """
    _check_counts(layout, block_ids)
    tables = [
        _chunk_table(group, ids, num_chunks, layout.null_block_id)[:, -group.kept_blocks :]
        for group, ids in zip(layout.groups, block_ids, strict=True)
    ]
    return _storable(layout, tables, num_chunks)


def _storable(layout: PlanLayout, kept: Sequence[Int64Array], num_chunks: int) -> BoolArray:
    storable = np.ones((len(layout.rules), num_chunks), dtype=np.bool_)
    for group, table in zip(layout.groups, kept, strict=True):
        storable[group.object_group] &= _is_real(table, layout.null_block_id).all(axis=1)
    return storable


def plan_transfer(
    direction: Direction,
    layout: PlanLayout,
    block_ids: Sequence[IdArray],
    present: BoolArray,
    skip_tokens: int = 0,
) -> TransferPlan:
    """Plan a store or a retrieve of the objects in `present`; see the two functions below."""
    plan = plan_store if direction is Direction.STORE else plan_retrieve
    return plan(layout, block_ids, present, skip_tokens)


def plan_store(
    layout: PlanLayout,
    block_ids: Sequence[IdArray],
    wanted: BoolArray,
    skip_tokens: int = 0,
) -> TransferPlan:
    """Plan a store of the chunks in `wanted` `[num_object_groups, num_chunks]`.

    A wanted chunk with a null among its kept blocks is left out whole and listed in `skipped`.

    Raises:
        AlignmentError: `skip_tokens` is not on a chunk edge.
        BlockIdError: a list is short or an id is outside the pool.
    """
    num_chunks = wanted.shape[1]
    skip_chunks, rest = divmod(skip_tokens, layout.chunk_tokens)
    if rest or skip_tokens < 0:
        raise AlignmentError(
            f"a store skips whole chunks of {layout.chunk_tokens} tokens, not {skip_tokens} tokens"
        )
    _check_counts(layout, block_ids)
    tables = [
        _chunk_table(group, ids, num_chunks, layout.null_block_id)[:, -group.kept_blocks :]
        for group, ids in zip(layout.groups, block_ids, strict=True)
    ]
    storable = _storable(layout, tables, num_chunks)
    wanted = wanted.copy()
    wanted[:, :skip_chunks] = False
    chosen = wanted & storable
    plans = []
    for group, table in zip(layout.groups, tables, strict=True):
        chunks = np.flatnonzero(chosen[group.object_group])
        moved = table[chunks] if chunks.shape[0] != num_chunks else table
        plans.append(
            GroupPlan(
                kernel_group_index=group.kernel_group_index,
                object_group=group.object_group,
                block_ids=moved.reshape(-1),
                chunk_indices=np.repeat(chunks, group.kept_blocks),
                kept_indices=np.tile(np.arange(group.kept_blocks), chunks.shape[0]),
            )
        )
    left_out = np.argwhere(wanted & ~storable)
    return TransferPlan(tuple(plans), tuple((int(g), int(c)) for g, c in left_out))


def plan_retrieve(
    layout: PlanLayout,
    block_ids: Sequence[IdArray],
    present: BoolArray,
    skip_tokens: int = 0,
) -> TransferPlan:
    """Plan a retrieve: every real id from `skip_tokens` on is written, or nothing is.

    Args:
        present: `[num_object_groups, num_chunks]`, true where the object's bytes are at hand.

    Raises:
        AlignmentError: `skip_tokens` is not on a block edge of some group.
        BlockIdError: a list is short, an id is outside the pool or is named twice.
        IncompleteRetrieveError: a real id whose bytes are not kept or not at hand.
    """
    _check_counts(layout, block_ids)
    num_chunks = present.shape[1]
    plans = []
    for group, ids in zip(layout.groups, block_ids, strict=True):
        skip_blocks, rest = divmod(skip_tokens, group.tokens_per_block)
        if rest or skip_tokens < 0:
            raise AlignmentError(
                f"kernel group {group.kernel_group_index} (engine group "
                f"{group.engine_group_idx}): skip of {skip_tokens} tokens is not on an edge of "
                f"its blocks of {group.tokens_per_block} tokens"
            )
        flat = _chunk_table(group, ids, num_chunks, layout.null_block_id).reshape(-1)
        positions = np.flatnonzero(_is_real(flat[skip_blocks:], layout.null_block_id))
        positions += skip_blocks
        moved = flat[positions]
        _check_written_once(group, moved)
        chunks, within = np.divmod(positions, group.blocks_per_chunk)
        kept = within - (group.blocks_per_chunk - group.kept_blocks)
        unserved = (kept < 0) | ~present[group.object_group, chunks]
        if unserved.any():
            where = int(np.flatnonzero(unserved)[0])
            why = "is not kept by its window" if kept[where] < 0 else "is not at hand"
            raise IncompleteRetrieveError(
                f"kernel group {group.kernel_group_index} (engine group "
                f"{group.engine_group_idx}): block id {int(moved[where])} at position "
                f"{int(positions[where])} expects bytes of chunk {int(chunks[where])}, which {why}"
            )
        plans.append(
            GroupPlan(
                kernel_group_index=group.kernel_group_index,
                object_group=group.object_group,
                block_ids=moved,
                chunk_indices=chunks,
                kept_indices=kept,
            )
        )
    return TransferPlan(tuple(plans), ())


def _check_written_once(group: PlanGroup, ids: Int64Array) -> None:
    """Raise BlockIdError when a retrieve would write one block twice."""
    if ids.shape[0] <= 1 or bool((np.diff(ids) > 0).all()):
        return
    seen = np.zeros(group.num_blocks, dtype=np.bool_)
    seen[ids] = True
    if int(np.count_nonzero(seen)) != ids.shape[0]:
        values, counts = np.unique(ids, return_counts=True)
        raise BlockIdError(
            f"kernel group {group.kernel_group_index} (engine group {group.engine_group_idx}): "
            f"a retrieve names block id {int(values[counts > 1][0])} more than once"
        )
