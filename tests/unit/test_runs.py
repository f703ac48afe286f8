"""Joining runs: the same bytes in fewer copies, and no copy across an edge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.copy_cases import CopyCase, copy_cases, single_run_case

from hma_triton.host_memory import DeviceView
from hma_triton.kernels.addressing import CopySpec, Int64Array
from hma_triton.kernels.runs import NO_PIECES, Runs, expand, join_items, split_at_pieces


def _view(*edges: int) -> DeviceView:
    """Pieces between consecutive edges."""
    starts, ends = np.array(edges[:-1]), np.array(edges[1:])
    return DeviceView(starts, ends, starts)


def _bytes_of(runs: Runs) -> dict[int, int]:
    """Pool byte of every object byte."""
    moved: dict[int, int] = {}
    for pool, place, nbytes in zip(
        runs.pool.tolist(), runs.objects.tolist(), runs.nbytes.tolist(), strict=True
    ):
        for i in range(nbytes):
            assert place + i not in moved, "a byte of an object is written twice"
            moved[place + i] = pool + i
    return moved


def _formula(spec: CopySpec, ids: Int64Array, places: Int64Array) -> dict[int, int]:
    """`addressing`'s formula, byte by byte."""
    moved = {}
    for block_id, place in zip(ids.tolist(), places.tolist(), strict=True):
        for row, address in enumerate(spec.row_addresses):
            for a in range(spec.n0):
                for b in range(spec.n1):
                    pool = address + block_id * spec.block_stride_bytes
                    pool += a * spec.pool_stride0_bytes + b * spec.pool_stride1_bytes
                    target = place + row * spec.object_row_stride_bytes
                    target += a * spec.object_stride0_bytes + b * spec.object_stride1_bytes
                    for i in range(spec.run_bytes):
                        moved[target + i] = pool + i
    return moved


@given(case=copy_cases(), cuts=st.lists(st.integers(1, 3000), max_size=5, unique=True))
def test_joined_and_split_runs_move_the_formula_s_bytes(case: CopyCase, cuts: list[int]) -> None:
    ids, places = np.array(case.block_ids), np.array(case.places)
    view = _view(0, *sorted(cuts), 1 << 40)
    runs = expand(case.spec, join_items(case.spec, ids, places, view), view)
    assert _bytes_of(runs) == _formula(case.spec, ids, places)
    for place, nbytes in zip(runs.objects.tolist(), runs.nbytes.tolist(), strict=True):
        assert not any(place < cut < place + nbytes for cut in cuts)


@given(
    ids=st.lists(st.integers(0, 40), min_size=1, max_size=40, unique=True),
    rows=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_runs_are_as_few_as_they_can_be(ids: list[int], rows: int, order: object) -> None:
    """Dense pages in `[row][block]` order: one copy for each stretch of neighbours and row."""
    spec = replace(
        single_run_case(16, range(len(ids)), rows=rows, place_step=16).spec,
        object_row_stride_bytes=16 * 64,
        object_block_stride_bytes=16,
    )
    kept = np.sort(np.array(ids))
    # the place follows the id, so neighbours in the pool are neighbours in the object
    items = np.array(kept)
    order.shuffle(items)  # type: ignore[attr-defined]
    joined = join_items(spec, items, items * 16, _view(0, 1 << 30))
    stretches = 1 + int((np.diff(kept) != 1).sum())
    assert len(joined.lengths) == stretches
    assert len(expand(spec, joined, _view(0, 1 << 30))) == stretches * rows


def test_pages_with_gaps_are_not_joined() -> None:
    case = single_run_case(16, range(5), rows=1, padding=16, place_step=16)
    joined = join_items(case.spec, np.arange(5), 16 * np.arange(5), _view(0, 1 << 20))
    assert joined.lengths.tolist() == [1] * 5


def test_ids_that_repeat_are_copied_as_often_as_they_are_named() -> None:
    case = single_run_case(16, range(3), rows=1, place_step=16)
    joined = join_items(case.spec, np.array([4, 4, 5]), 16 * np.arange(3), _view(0, 1 << 20))
    assert joined.block_ids.tolist() == [4, 4]
    assert joined.lengths.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ((0, 1000), [(0, 0, 300)]),
        ((0, 100, 1000), [(0, 0, 100), (100, 100, 200)]),
        ((0, 100, 200, 300), [(0, 0, 100), (100, 100, 100), (200, 200, 100)]),
        ((400, 500), [(0, 0, 300)]),
        # the arena ends inside the run: what lies outside is a copy of its own
        ((0, 200), [(0, 0, 200), (200, 200, 100)]),
    ],
)
def test_a_copy_is_split_at_every_edge(
    edges: tuple[int, ...], expected: list[tuple[int, int, int]]
) -> None:
    one = Runs(np.array([0]), np.array([0]), np.array([300]))
    found = split_at_pieces(one, _view(*edges))
    assert (
        sorted(zip(found.pool.tolist(), found.objects.tolist(), found.nbytes.tolist(), strict=True))
        == expected
    )


def test_nothing_pinned_means_nothing_joined_and_nothing_split() -> None:
    case = single_run_case(16, range(3), rows=2, place_step=16)
    spec = replace(case.spec, object_row_stride_bytes=48)
    items = join_items(spec, np.arange(3), 16 * np.arange(3), NO_PIECES)
    assert len(expand(spec, items, NO_PIECES)) == 6


def test_addresses_above_two_gibibytes_and_four_stay_exact() -> None:
    """K10: ids and strides whose products leave 32 bits."""
    base = 7 << 40
    spec = replace(
        single_run_case(1 << 20, [0], rows=1).spec,
        row_addresses=(base,),
        block_stride_bytes=1 << 20,
        num_blocks=1 << 20,
    )
    ids, places = np.array([5000, 5001]), np.array([base + (9 << 33), base + (9 << 33) + (1 << 20)])
    runs = expand(
        spec,
        join_items(spec, ids, places, _view(base, 8 << 40)),
        _view(base, 8 << 40),
    )
    assert runs.pool.tolist() == [base + 5000 * (1 << 20)]
    assert runs.nbytes.tolist() == [2 << 20]
