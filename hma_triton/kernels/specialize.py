"""What is compiled into a copy kernel: word and lane widths, run lengths, tiles.

A *word* is one access of a thread, at most 16 bytes; a *lane* is one element of it, at most an
int64. Steps between rows, blocks and runs stay launch arguments, in words, so that neither the
size of a pool nor an address is ever part of a compiled variant; only the alignment is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from hma_triton.errors import GeometryError
from hma_triton.kernels.addressing import REGION_ALIGN_BYTES, CopySpec, Direction, Int64Array
from hma_triton.tuning import KernelConfig, TuneKey, size_bucket

WORD_LIMIT_BYTES = 16
LANE_LIMIT_BYTES = 8
# a page of fewer tiles shares programs with its neighbours: the last, partial tile costs too much
SPLIT_FROM_TILES = 4
_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class KernelSpecialization:
    """The constexprs of one compiled copy; equal values are one compiled kernel.

    Args:
        word_bytes: width of an access; divides every step and address of the copy.
        lane_bytes: element type of the tile; a 16-byte word is two int64 lanes.
        run_words: whole words of a run.
        tail_word_bytes, tail_words: what is left of a run, in narrower words; 0 words is none.
        split_pages: whether a tile stays inside one page (big pages), or spans pages.
        tile_words: words of one tile, a power of two.
    """

    direction: Direction
    rows: int
    n0: int
    n1: int
    run_words: int
    word_bytes: int
    lane_bytes: int
    tail_words: int
    tail_word_bytes: int
    split_pages: bool
    tile_words: int
    stages: int
    warps: int

    @property
    def page_words(self) -> int:
        """Whole words of one page."""
        return self.n0 * self.n1 * self.run_words

    @property
    def page_bytes(self) -> int:
        """Live bytes of one page."""
        run = self.run_words * self.word_bytes + self.tail_words * self.tail_word_bytes
        return self.n0 * self.n1 * run

    @property
    def has_16_byte_accesses(self) -> bool:
        """Whether alignment lets every whole word be one 16-byte access."""
        return self.word_bytes == WORD_LIMIT_BYTES

    def tiles(self, num_blocks: int) -> int:
        """Tiles of whole words that `num_blocks` blocks need."""
        pages = num_blocks * self.rows
        if self.split_pages:
            return pages * -(-self.page_words // self.tile_words)
        return -(-pages * self.page_words // self.tile_words)


@dataclass(frozen=True, slots=True)
class WordSteps:
    """The steps of a copy in words; axes of one element have step 0."""

    block: int
    pool0: int
    pool1: int
    object_row: int
    object0: int
    object1: int


def alignment_bytes(addresses: Int64Array | tuple[int, ...]) -> int:
    """Largest power of two up to 16 that divides every address; 16 when there are none."""
    merged = int(np.bitwise_or.reduce(np.asarray(addresses, dtype=np.int64), initial=0))
    return _low_bit(merged)


def arena_alignment_bytes(spec: CopySpec) -> int:
    """Alignment of `spec`'s places in objects that start on 64 bytes, as an arena's do."""
    step = spec.object_block_stride_bytes if spec.blocks_per_object > 1 else 0
    return _low_bit(REGION_ALIGN_BYTES | spec.region_offset_bytes | step)


def _low_bit(value: int) -> int:
    return min(WORD_LIMIT_BYTES, value & -value) if value else WORD_LIMIT_BYTES


def _live_steps(spec: CopySpec) -> WordSteps:
    """The steps in bytes, without those of axes that have one element."""
    rows, n0, n1 = spec.num_rows > 1, spec.n0 > 1, spec.n1 > 1
    return WordSteps(
        block=spec.block_stride_bytes if spec.num_blocks > 1 else 0,
        pool0=spec.pool_stride0_bytes if n0 else 0,
        pool1=spec.pool_stride1_bytes if n1 else 0,
        object_row=spec.object_row_stride_bytes if rows else 0,
        object0=spec.object_stride0_bytes if n0 else 0,
        object1=spec.object_stride1_bytes if n1 else 0,
    )


def word_bytes(spec: CopySpec, object_alignment_bytes: int) -> int:
    """Widest access that every step and address of the copy allows: 16, 8, 4, 2 or 1."""
    steps = _live_steps(spec)
    merged = (
        steps.block | steps.pool0 | steps.pool1
        | steps.object_row | steps.object0 | steps.object1
    )  # fmt: skip
    widest = min(
        _low_bit(merged), alignment_bytes(spec.row_addresses), _low_bit(object_alignment_bytes)
    )
    while widest > spec.run_bytes:
        widest //= 2
    return widest


def narrowest_step(spec: CopySpec, object_alignment_bytes: int) -> str:
    """What keeps words under 16 bytes, by name and value; empty where they have 16."""
    width = word_bytes(spec, object_alignment_bytes)
    if width == WORD_LIMIT_BYTES:
        return ""
    steps = asdict(_live_steps(spec))
    causes = [
        f"{name} step {step} bytes" for name, step in steps.items() if _low_bit(step) == width
    ]
    causes += [
        f"{name} aligned to {alignment} bytes"
        for name, alignment in (
            ("pool", alignment_bytes(spec.row_addresses)),
            ("object", _low_bit(object_alignment_bytes)),
        )
        if alignment == width
    ]
    return ", ".join(causes) or f"runs of {spec.run_bytes} bytes"


def tune_key(
    spec: CopySpec, direction: Direction, object_alignment_bytes: int, num_blocks: int
) -> TuneKey:
    """Under what `num_blocks` blocks of this copy are tuned."""
    return TuneKey(
        run_bytes=spec.run_bytes,
        runs_per_page=spec.n0 * spec.n1,
        rows=spec.num_rows,
        word_bytes=word_bytes(spec, object_alignment_bytes),
        direction=direction.name.lower(),
        size_bucket=size_bucket(num_blocks * spec.block_bytes),
    )


@lru_cache(maxsize=4096)
def specialize(
    spec: CopySpec, direction: Direction, object_alignment_bytes: int, config: KernelConfig
) -> tuple[KernelSpecialization, WordSteps]:
    """What to compile for `spec`, and the steps to launch it with.

    Args:
        object_alignment_bytes: what divides every object address of the launch.

    Raises:
        GeometryError: a page of more than 2**31 words.
    """
    width = word_bytes(spec, object_alignment_bytes)
    run_words, tail_bytes = divmod(spec.run_bytes, width)
    page_words = spec.n0 * spec.n1 * run_words
    if spec.page_bytes // width + config.tile_words >= _INT32_LIMIT:
        raise GeometryError(
            f"kernel group {spec.kernel_group_index}: a page of {spec.page_bytes} bytes in words "
            f"of {width} bytes is over the limit of 2**31 words"
        )
    tail_width = _low_bit(tail_bytes) if tail_bytes else 0
    constants = KernelSpecialization(
        direction=Direction(direction),
        rows=spec.num_rows,
        n0=spec.n0,
        n1=spec.n1,
        run_words=run_words,
        word_bytes=width,
        lane_bytes=min(width, LANE_LIMIT_BYTES),
        tail_words=tail_bytes // tail_width if tail_bytes else 0,
        tail_word_bytes=tail_width,
        split_pages=page_words >= SPLIT_FROM_TILES * config.tile_words,
        tile_words=config.tile_words,
        stages=config.stages,
        warps=config.warps,
    )
    steps = _live_steps(spec)
    return constants, WordSteps(
        block=steps.block // width,
        pool0=steps.pool0 // width,
        pool1=steps.pool1 // width,
        object_row=steps.object_row // width,
        object0=steps.object0 // width,
        object1=steps.object1 // width,
    )
