"""Gather and scatter of paged blocks: one kernel, one launch for a whole copy spec.

The twin is `kernels.reference`; what is compiled in comes from `kernels.specialize`.
"""

# triton.jit is untyped, and so are the functions it compiles
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from hma_triton.errors import PlanError
from hma_triton.kernels.specialize import KernelSpecialization, WordSteps

MAX_BLOCKS = 2**31 - 1
LANE_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
RUNTIME_ARGUMENTS = (
    "block_ids_ptr",
    "object_addresses_ptr",
    "row_addresses_ptr",
    "num_blocks",
    "block_step",
    "pool_step0",
    "pool_step1",
    "object_row_step",
    "object_step0",
    "object_step1",
)


def _launch_metadata(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Name and bytes (read and written) of a launch, for Triton's profiler."""
    run = args["RUN_WORDS"] * args["WORD_BYTES"] + args["TAIL_WORDS"] * args["TAIL_WORD_BYTES"]
    moved = args["num_blocks"] * args["ROWS"] * args["N0"] * args["N1"] * run
    way = "retrieve" if args["DIRECTION"] else "store"
    return {"name": f"block_copy_{way}_{args['WORD_BYTES']}B", "bytes": 2 * moved}


@triton.jit
def _move_tile(pool, obj, mask, DIRECTION: tl.constexpr):
    # The object's side streams; the pool's side is the model's to cache.
    if DIRECTION == 0:
        tl.store(obj, tl.load(pool, mask=mask), mask=mask, eviction_policy="evict_first")
    else:
        tl.store(pool, tl.load(obj, mask=mask, eviction_policy="evict_first"), mask=mask)


@triton.jit
def _locate_tile(
    tile,
    num_blocks,
    ROWS: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
):
    """Block, row and word in its page of every word of `tile`, and which of them exist.

    A lane past the end is given block 0 of the list: no address is formed that is not a page's.
    """
    lanes = tl.arange(0, TILE_WORDS)
    if SPLIT_PAGES:
        TILES_PER_PAGE: tl.constexpr = (PAGE_WORDS + TILE_WORDS - 1) // TILE_WORDS
        page = tile // TILES_PER_PAGE
        word = (tile % TILES_PER_PAGE).to(tl.int32) * TILE_WORDS + lanes
        item = page // ROWS
        row = page % ROWS
        exists = word < PAGE_WORDS
        word = tl.where(exists, word, 0)
    else:
        first_word = tile * TILE_WORDS
        first_page = first_word // PAGE_WORDS
        flat_word = (first_word % PAGE_WORDS).to(tl.int32) + lanes
        flat_row = (first_page % ROWS).to(tl.int32) + flat_word // PAGE_WORDS
        word = flat_word % PAGE_WORDS
        item = first_page // ROWS + flat_row // ROWS
        row = flat_row % ROWS
        exists = item < num_blocks
        item = tl.where(exists, item, 0)
    return item, row, word, exists


@triton.jit
def _copy_words(
    block_ids_ptr,
    object_addresses_ptr,
    row_addresses_ptr,
    num_blocks,
    block_step,
    pool_step0,
    pool_step1,
    object_row_step,
    object_step0,
    object_step1,
    DIRECTION: tl.constexpr,
    ROWS: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    STEP_BYTES: tl.constexpr,
    FIRST_BYTE: tl.constexpr,
    LANE: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Move `RUN_WORDS` words of every run, from `FIRST_BYTE` of the run on."""
    PAGE_WORDS: tl.constexpr = N0 * N1 * RUN_WORDS
    pages = num_blocks.to(tl.int64) * ROWS
    if SPLIT_PAGES:
        tiles = pages * ((PAGE_WORDS + TILE_WORDS - 1) // TILE_WORDS)
    else:
        tiles = (pages * PAGE_WORDS + TILE_WORDS - 1) // TILE_WORDS
    start = tl.program_id(0).to(tl.int64)
    for tile in tl.range(start, tiles, tl.num_programs(0), num_stages=STAGES):
        # the interpreter's loop gives plain ints
        item, row, word, exists = _locate_tile(
            tl.cast(tile, tl.int64), num_blocks, ROWS, PAGE_WORDS, TILE_WORDS, SPLIT_PAGES
        )
        pool_base = tl.load(row_addresses_ptr + row)
        object_base = tl.load(object_addresses_ptr + item)
        pool_steps = tl.load(block_ids_ptr + item) * block_step
        object_steps = row.to(tl.int64) * object_row_step
        if N1 > 1:
            inner = (word // RUN_WORDS % N1).to(tl.int64)
            pool_steps += inner * pool_step1
            object_steps += inner * object_step1
        if N0 > 1:
            outer = (word // (RUN_WORDS * N1)).to(tl.int64)
            pool_steps += outer * pool_step0
            object_steps += outer * object_step0
        inside = (word % RUN_WORDS).to(tl.int64) * WORD_BYTES + FIRST_BYTE
        pool = (pool_base + pool_steps * STEP_BYTES + inside).to(tl.pointer_type(LANE))
        obj = (object_base + object_steps * STEP_BYTES + inside).to(tl.pointer_type(LANE))
        # the hint belongs on the final pointer: on a loaded base it does not reach the access
        lanes = tl.arange(0, LANES)[None, :]
        pool = tl.multiple_of(pool, WORD_BYTES)[:, None] + lanes
        obj = tl.multiple_of(obj, WORD_BYTES)[:, None] + lanes
        _move_tile(pool, obj, exists[:, None], DIRECTION)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS, launch_metadata=_launch_metadata)
def _block_copy_kernel(
    block_ids_ptr,  # [num_blocks] int64
    object_addresses_ptr,  # [num_blocks] int64, absolute
    row_addresses_ptr,  # [ROWS] int64, absolute
    num_blocks: tl.int32,
    # steps in words of WORD_BYTES
    block_step: tl.int64,
    pool_step0: tl.int64,
    pool_step1: tl.int64,
    object_row_step: tl.int64,
    object_step0: tl.int64,
    object_step1: tl.int64,
    DIRECTION: tl.constexpr,
    ROWS: tl.constexpr,
    N0: tl.constexpr,
    N1: tl.constexpr,
    RUN_WORDS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    LANE: tl.constexpr,
    LANES: tl.constexpr,
    TAIL_WORDS: tl.constexpr,
    TAIL_WORD_BYTES: tl.constexpr,
    TAIL_LANE: tl.constexpr,
    SPLIT_PAGES: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    _copy_words(
        block_ids_ptr, object_addresses_ptr, row_addresses_ptr, num_blocks,
        block_step, pool_step0, pool_step1, object_row_step, object_step0, object_step1,
        DIRECTION, ROWS, N0, N1, RUN_WORDS, WORD_BYTES, WORD_BYTES, 0,
        LANE, LANES, SPLIT_PAGES, TILE_WORDS, STAGES,
    )  # fmt: skip
    if TAIL_WORDS > 0:
        _copy_words(
            block_ids_ptr, object_addresses_ptr, row_addresses_ptr, num_blocks,
            block_step, pool_step0, pool_step1, object_row_step, object_step0, object_step1,
            DIRECTION, ROWS, N0, N1, TAIL_WORDS, TAIL_WORD_BYTES, WORD_BYTES,
            RUN_WORDS * WORD_BYTES, TAIL_LANE, 1, False, TILE_WORDS, STAGES,
        )  # fmt: skip


def constexprs(special: KernelSpecialization) -> dict[str, Any]:
    """The kernel's compile-time arguments by name."""
    return {
        "DIRECTION": int(special.direction),
        "ROWS": special.rows,
        "N0": special.n0,
        "N1": special.n1,
        "RUN_WORDS": special.run_words,
        "WORD_BYTES": special.word_bytes,
        "LANE": LANE_TYPES[special.lane_bytes],
        "LANES": special.word_bytes // special.lane_bytes,
        "TAIL_WORDS": special.tail_words,
        "TAIL_WORD_BYTES": special.tail_word_bytes,
        "TAIL_LANE": LANE_TYPES[special.tail_word_bytes or 1],
        "SPLIT_PAGES": special.split_pages,
        "TILE_WORDS": special.tile_words,
        "STAGES": special.stages,
    }


def launch_block_copy(
    special: KernelSpecialization,
    steps: WordSteps,
    row_addresses: torch.Tensor,
    block_ids: torch.Tensor,
    object_addresses: torch.Tensor,
    program_cap: int,
) -> int:
    """Enqueue the copy of `block_ids` on the current stream of their device.

    Without blocks the kernel is only made ready: compiled and loaded, nothing moves.

    Args:
        row_addresses: `[rows]` int64, addresses that the device can reach.
        block_ids: `[num_blocks]` int64, each inside the pool.
        object_addresses: `[num_blocks]` int64, addresses that the device can reach.
        program_cap: most programs of the launch.

    Returns:
        The programs launched.

    Raises:
        PlanError: more than 2**31 - 1 blocks.
    """
    num_blocks = block_ids.shape[0]
    if num_blocks > MAX_BLOCKS:
        raise PlanError(f"{num_blocks} blocks in one launch, the limit is {MAX_BLOCKS}")
    programs = max(1, min(special.tiles(num_blocks), program_cap))
    _block_copy_kernel[(programs,)](
        block_ids,
        object_addresses,
        row_addresses,
        num_blocks,
        steps.block,
        steps.pool0,
        steps.pool1,
        steps.object_row,
        steps.object0,
        steps.object1,
        **constexprs(special),
        num_warps=special.warps,
    )
    return programs


def compile_signature() -> dict[str, str]:
    """Types of the kernel's arguments as `triton.compiler.ASTSource` wants them."""
    table = dict.fromkeys(RUNTIME_ARGUMENTS, "i64")
    table["num_blocks"] = "i32"
    table |= {name: "*i64" for name in RUNTIME_ARGUMENTS if name.endswith("_ptr")}
    return {name: table.get(name, "constexpr") for name in _block_copy_kernel.arg_names}


def is_interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter (`TRITON_INTERPRET=1`)."""
    return not isinstance(_block_copy_kernel, triton.JITFunction)
