"""Windows, skips, nulls and hits: which blocks of a request move, decided before a byte does.

Everything is counted in tokens and divided by each group's own block. A `TransferPlan` stays
factored: ids and places per kernel group, in arrays; `kernels.addressing` knows the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hma_triton.errors import (
    AlignmentError,
    BlockIdError,
    GroupMismatchError,
    IncompleteRetrieveError,
    PlanError,
)
from hma_triton.units import cdiv, lcm

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
IdArray = npt.NDArray[np.integer]

MINIMUM_CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """What a hit needs of one object group.

    `window_tokens` None: every chunk. A window: the chunks over its last `window - 1` tokens.
    `recurrent`: the state at the hit's end, so the last chunk alone.
    """

    window_tokens: int | None = None
    recurrent: bool = False

    def chunks_for_hit(self, chunk_tokens: int) -> int | None:
        """Trailing chunks that a hit needs; None for all of them."""
        if self.recurrent:
            return 1
        if self.window_tokens is None:
            return None
        return max(1, cdiv(self.window_tokens - 1, chunk_tokens))


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
class Hit:
    """A prefix that can be served, and what ended it (`all`, `limit`, `none`, or a group's hole)."""

    tokens: int
    chunks: int
    reason: str


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


def kept_blocks(
    tokens_per_block: int, window_tokens: int | None, recurrent: bool, chunk_tokens: int
) -> int:
    """Blocks at the end of a chunk that a later hit can need.

    `ceil((window - 1) / block)`, at least one, at most the chunk; one state block when recurrent.
    """
    blocks_per_chunk = chunk_tokens // tokens_per_block
    if recurrent:
        return 1
    if window_tokens is None:
        return blocks_per_chunk
    return min(max(1, cdiv(window_tokens - 1, tokens_per_block)), blocks_per_chunk)


def choose_chunk_tokens(
    tokens_per_block: Sequence[int], any_recurrent: bool, minimum: int = MINIMUM_CHUNK_TOKENS
) -> int:
    """Chunk length for these blocks; zeros (groups that are not cacheable) are ignored.

    With recurrent groups exactly the least common multiple, since state exists only at block
    boundaries; else its smallest multiple that is at least `minimum`.

    Raises:
        GroupMismatchError: no group is cacheable.
    """
    blocks = [tokens for tokens in tokens_per_block if tokens]
    if not blocks:
        raise GroupMismatchError(
            f"no cacheable group: tokens per block are {list(tokens_per_block)}; "
            "there is nothing to choose a chunk for"
        )
    unit = lcm(*blocks)
    return unit if any_recurrent else cdiv(minimum, unit) * unit


def check_chunk_tokens(chunk_tokens: int, tokens_per_block: Sequence[int]) -> None:
    """Check that every cacheable group's block divides the chunk.

    Raises:
        GroupMismatchError: names the group, its block, and the nearest valid chunk.
    """
    blocks = [tokens for tokens in tokens_per_block if tokens]
    if not blocks:
        choose_chunk_tokens(tokens_per_block, any_recurrent=False)
    unit = lcm(*blocks)
    if chunk_tokens > 0 and chunk_tokens % unit == 0:
        return
    nearest = max(1, round(chunk_tokens / unit)) * unit
    offenders = [
        f"group {index} ({tokens} tokens per block)"
        for index, tokens in enumerate(tokens_per_block)
        if tokens and (chunk_tokens <= 0 or chunk_tokens % tokens)
    ]
    raise GroupMismatchError(
        f"chunk of {chunk_tokens} tokens is no multiple of {', '.join(offenders)}; "
        f"chunks must be multiples of {unit} tokens, the nearest valid chunk is {nearest}"
    )


def chunks_needed(rule: ReuseRule, hit_chunks: int, chunk_tokens: int) -> range:
    """Chunks of an object group that a hit of `hit_chunks` chunks needs."""
    needed = rule.chunks_for_hit(chunk_tokens)
    return range(0 if needed is None else max(0, hit_chunks - needed), hit_chunks)


def longest_hit(
    rules: Sequence[ReuseRule], present: BoolArray, chunk_tokens: int, max_tokens: int
) -> Hit:
    """The longest prefix in whole chunks for which every object group has what its rule needs.

    Args:
        present: `[num_object_groups, num_chunks]`, true where all ranks hold the object.
        max_tokens: cap on the hit (the prompt, or one token less with recurrent groups).
    """
    if present.shape[0] != len(rules):
        raise PlanError(f"presence of {present.shape[0]} object groups for {len(rules)} rules")
    num_chunks = present.shape[1]
    limit = min(num_chunks, max_tokens // chunk_tokens)
    if limit <= 0:
        return Hit(0, 0, "limit" if num_chunks else "none")
    ends = np.arange(1, limit + 1)
    served = np.ones(limit, dtype=np.bool_)
    runs = np.empty((len(rules), limit), dtype=np.int64)
    for index, rule in enumerate(rules):
        last_hole = np.maximum.accumulate(np.where(present[index, :limit], 0, ends))
        runs[index] = ends - last_hole
        needed = rule.chunks_for_hit(chunk_tokens)
        served &= runs[index] >= (ends if needed is None else np.minimum(ends, needed))
    hits = np.flatnonzero(served)
    chunks = int(hits[-1]) + 1 if hits.size else 0
    if chunks == limit:
        reason = "all" if limit == num_chunks else "limit"
        return Hit(chunks * chunk_tokens, chunks, reason)
    return Hit(chunks * chunk_tokens, chunks, _stopped_by(rules, runs, chunks, chunk_tokens))


def _stopped_by(
    rules: Sequence[ReuseRule], runs: Int64Array, chunks: int, chunk_tokens: int
) -> str:
    """Name the object groups without which the next chunk would have been a hit."""
    missing = []
    for index, rule in enumerate(rules):
        needed = rule.chunks_for_hit(chunk_tokens)
        end = chunks + 1
        if runs[index, chunks] < (end if needed is None else min(end, needed)):
            missing.append(f"object group {index}")
    return f"chunk {chunks} missing in {', '.join(missing)}"


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
    return ids != null_block_id


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
