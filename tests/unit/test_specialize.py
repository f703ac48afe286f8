"""What is compiled for a copy: widths from alignment, tails, tiles; and what is not."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.copy_cases import CopyCase, copy_cases, single_run_case

from hma_triton.errors import GeometryError
from hma_triton.kernels.addressing import CopySpec, Direction
from hma_triton.kernels.specialize import (
    KernelSpecialization,
    WordSteps,
    alignment_bytes,
    arena_alignment_bytes,
    narrowest_step,
    specialize,
    tune_key,
    word_bytes,
)
from hma_triton.tuning import KernelConfig

CONFIG = KernelConfig(tile_words=64, warps=1, stages=1, program_cap=4)


def spec_of(run_bytes: int, **changes: object) -> CopySpec:
    return replace(single_run_case(run_bytes, (0, 1)).spec, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [([], 16), ([0], 16), ([64, 8640], 16), ([64, 8], 8), ([132], 4), ([6, 16], 2), ([5], 1)],
)
def test_alignment_of_addresses(addresses: list[int], expected: int) -> None:
    assert alignment_bytes(np.array(addresses, dtype=np.int64)) == expected


@pytest.mark.parametrize(
    ("field", "value", "width"),
    [
        ("block_stride_bytes", 1_002_240, 16),
        ("block_stride_bytes", 1_002_244, 4),
        ("object_row_stride_bytes", 584, 8),
        ("row_addresses", (0, 8), 8),
        ("row_addresses", (0, 8640), 16),
        ("row_addresses", (2, 8640), 2),
    ],
)
def test_every_step_and_address_bounds_the_width(field: str, value: object, width: int) -> None:
    assert word_bytes(spec_of(576, **{field: value}), 16) == width


@pytest.mark.parametrize(
    ("field", "single"),
    [
        ("block_stride_bytes", {"num_blocks": 1}),
        ("object_row_stride_bytes", {"row_addresses": (0,)}),
        ("pool_stride0_bytes", {"n0": 1}),
        ("object_stride1_bytes", {"n1": 1}),
    ],
)
def test_steps_of_single_elements_do_not(field: str, single: dict[str, object]) -> None:
    spec = spec_of(576, **{field: 577}, **single)
    assert word_bytes(spec, 16) == 16
    assert set(vars_of(specialize(spec, Direction.STORE, 16, CONFIG)[1]).values()) <= {
        0,
        576 // 16,
        1152 // 16,
        70 * 576 // 16,
    }


def vars_of(steps: WordSteps) -> dict[str, int]:
    return {field.name: getattr(steps, field.name) for field in fields(steps)}


@pytest.mark.parametrize(
    ("run_bytes", "aligned", "words", "tail"),
    [
        (1, 16, (1, 1), (0, 0)),
        (3, 16, (2, 1), (1, 1)),
        (12, 16, (8, 1), (4, 1)),
        (96, 16, (16, 6), (0, 0)),
        (131, 16, (16, 8), (1, 3)),
        (132, 16, (16, 8), (4, 1)),
        (132, 4, (4, 33), (0, 0)),
        (576, 16, (16, 36), (0, 0)),
        (656, 8, (8, 82), (0, 0)),
        (131, 1, (1, 131), (0, 0)),
    ],
)
def test_runs_split_into_words_and_a_tail(
    run_bytes: int, aligned: int, words: tuple[int, int], tail: tuple[int, int]
) -> None:
    """The tail is (width, count); nothing of a run is lost."""
    far = dict.fromkeys(
        ("block_stride_bytes", "object_row_stride_bytes", "object_block_stride_bytes"), 1024
    )
    spec = spec_of(run_bytes, row_addresses=(0, 65536), **far)
    special, _ = specialize(spec, Direction.STORE, aligned, CONFIG)
    assert (special.word_bytes, special.run_words) == words
    assert (special.tail_word_bytes, special.tail_words) == tail
    assert special.page_bytes == run_bytes
    assert special.lane_bytes == min(words[0], 8)
    assert special.has_16_byte_accesses == (words[0] == 16)


@given(case=copy_cases(), aligned=st.sampled_from((1, 2, 4, 8, 16)))
def test_words_divide_every_address(case: CopyCase, aligned: int) -> None:
    """No access of any run is misaligned, and words and tail make up the page."""
    spec = case.spec
    special, steps = specialize(spec, Direction.RETRIEVE, aligned, CONFIG)
    width = special.word_bytes
    assert special.page_bytes == spec.page_bytes
    assert aligned % width == 0
    for row in spec.row_addresses:
        for a in range(spec.n0):
            for b in range(spec.n1):
                pool = row + a * spec.pool_stride0_bytes + b * spec.pool_stride1_bytes
                place = a * spec.object_stride0_bytes + b * spec.object_stride1_bytes
                assert pool % width == place % width == 0
                tail = special.run_words * width
                assert special.tail_words == 0 or (pool + tail) % special.tail_word_bytes == 0
    if spec.num_blocks > 1:
        assert steps.block * width == spec.block_stride_bytes


@pytest.mark.parametrize(
    ("page_words", "split"), [(255, False), (256, True), (257, True), (1, False)]
)
def test_big_pages_are_split_small_ones_share(page_words: int, split: bool) -> None:
    special, _ = specialize(spec_of(16 * page_words), Direction.STORE, 16, CONFIG)
    assert special.split_pages is split
    pages = 3 * special.rows
    by_page = pages * -(-page_words // 64)
    assert special.tiles(3) == (by_page if split else -(-pages * page_words // 64))


def test_steps_and_counts_are_not_compiled_in() -> None:
    """Case 110: pools of another size, steps beyond 2 GiB and other counts share a kernel."""
    near = spec_of(576)
    far = replace(near, block_stride_bytes=2**31 + 576, num_blocks=7, row_addresses=(0, 2**33))
    kernels = {specialize(spec, Direction.STORE, 16, CONFIG)[0] for spec in (near, far)}
    assert len(kernels) == 1
    assert specialize(far, Direction.STORE, 16, CONFIG)[1].block == (2**31 + 576) // 16


def test_direction_is_compiled_in() -> None:
    kernels = {specialize(spec_of(576), way, 16, CONFIG)[0] for way in Direction}
    assert len(kernels) == 2


def test_results_are_remembered() -> None:
    first = specialize(spec_of(576), Direction.STORE, 16, CONFIG)
    assert specialize(spec_of(576), Direction.STORE, 16, CONFIG) is first


def test_arena_alignment() -> None:
    spec = spec_of(132, object_block_stride_bytes=132, blocks_per_object=2)
    assert arena_alignment_bytes(spec) == 4
    assert arena_alignment_bytes(replace(spec, blocks_per_object=1)) == 16
    assert arena_alignment_bytes(replace(spec, blocks_per_object=1, region_offset_bytes=8)) == 8


def test_the_cause_of_narrow_words_is_named() -> None:
    assert narrowest_step(spec_of(576), 16) == ""
    assert narrowest_step(spec_of(132, row_addresses=(0,), n0=1), 16) == "block step 132 bytes"
    assert narrowest_step(spec_of(576), 8) == "object aligned to 8 bytes"
    assert narrowest_step(spec_of(576, row_addresses=(2, 34)), 16) == "pool aligned to 2 bytes"
    single = spec_of(12, row_addresses=(0,), num_blocks=1)
    assert narrowest_step(single, 16) == "runs of 12 bytes"


def test_pages_beyond_int32_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"kernel group 0.*68719476736 bytes.*2\*\*31 words"):
        specialize(spec_of(16 * 2**32), Direction.STORE, 16, CONFIG)


def test_tune_keys_are_in_bytes() -> None:
    key = tune_key(spec_of(576), Direction.RETRIEVE, 16, num_blocks=1000)
    assert (key.run_bytes, key.runs_per_page, key.rows, key.word_bytes) == (576, 1, 2, 16)
    assert (key.direction, key.size_bucket) == ("retrieve", 1)


def test_specializations_compare_by_value() -> None:
    one, two = (
        KernelSpecialization(Direction.STORE, 1, 1, 1, 36, 16, 8, 0, 0, False, 64, 1, 1)
        for _ in range(2)
    )
    assert one == two
    assert hash(one) == hash(two)
