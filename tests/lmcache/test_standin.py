"""Our stand-in for LMCache's compiled core against that core."""

from __future__ import annotations

import os
import select
import time
from typing import Any

import lmcache.lmcache_native as core
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hma_triton.integration.lmcache import standin


def test_it_has_every_public_name_of_the_core() -> None:
    theirs = {name for name in dir(core) if not name.startswith("_")}
    assert theirs == set(standin.__all__)
    for name in theirs:
        made = getattr(core, name)
        if isinstance(made, type):
            # of members, looked at below, and of pybind11
            ordinary = {"name", "value", "_pybind11_conduit_v1_", "__setstate__", "__entries"}
            ours: Any = getattr(standin, name)
            lacking = {part for part in dir(made) if not hasattr(ours, part)} - ordinary
            if name == "PageBufferShapeDesc":
                lacking -= set(vars(standin.PageBufferShapeDesc()))
            assert not lacking, name


def test_formats_and_directions() -> None:
    for name in ("EngineKVFormat", "TransferDirection"):
        theirs, ours = getattr(core, name), getattr(standin, name)
        assert {n: int(v) for n, v in theirs.__members__.items()} == {
            n: int(v) for n, v in ours.__members__.items()
        }
        for member in theirs.__members__.values():
            mine = ours(int(member))
            assert (str(mine), mine.name, mine.value, hash(mine)) == (
                str(member),
                member.name,
                member.value,
                hash(member),
            )
    assert standin.GPUKVFormat is standin.EngineKVFormat


@pytest.mark.parametrize(
    "predicate",
    ["is_kv_list", "is_layer_list", "is_cross_layer", "is_mla", "is_kv_second_tuple"],
)
def test_predicates(predicate: str) -> None:
    for member in core.EngineKVFormat.__members__.values():
        ours = getattr(standin, predicate)(standin.EngineKVFormat(int(member)))
        assert ours == getattr(core, predicate)(member), member.name


def test_descriptor_starts_empty_and_takes_a_dtype() -> None:
    ours, theirs = standin.PageBufferShapeDesc(), core.PageBufferShapeDesc()
    for name in ("kv_size", "nl", "nb", "bs", "nh", "hs", "element_size", "block_stride_elems"):
        assert getattr(ours, name) == getattr(theirs, name) == 0
    assert not hasattr(ours, "dtype") and not hasattr(theirs, "dtype")
    ours.dtype = "bfloat16"  # type: ignore[attr-defined]
    standin.KernelGroupSpec(1, [2, 3], ours, 256, 3, 4, 5)


OPERATIONS = ["set", "clear", "set_range", "batched_set"]


@given(
    size=st.integers(0, 40),
    prefix=st.integers(0, 50),
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 45), st.integers(0, 45)), max_size=8
    ),
    other_size=st.integers(0, 40),
    other_prefix=st.integers(0, 40),
)
def test_bitmaps(
    size: int, prefix: int, steps: list[tuple[str, int, int]], other_size: int, other_prefix: int
) -> None:
    pair = (standin.Bitmap(size, prefix), core.Bitmap(size, prefix))
    for name, first, second in steps:
        for bitmap in pair:
            if name == "set_range":
                bitmap.set_range(first, second)
            elif name == "batched_set":
                bitmap.batched_set([first, second])
            else:
                getattr(bitmap, name)(first)
    others = (standin.Bitmap(other_size, other_prefix), core.Bitmap(other_size, other_prefix))
    ours, theirs = (_facts(b, o) for b, o in zip(pair, others, strict=True))
    assert ours == theirs


def _facts(bitmap: Any, other: Any) -> list[Any]:
    copied = bitmap.copy()
    copied.set(0)
    return [
        repr(bitmap),
        bitmap.size(),
        len(bitmap),
        [bitmap.test(i) for i in range(50)],
        bitmap.popcount(),
        bitmap.count_leading_zeros(),
        bitmap.count_leading_ones(),
        bitmap.highest_set_bit(),
        bitmap.get_indices_list(),
        bitmap.get_indices_set(),
        bitmap.gather(list(range(100, 137))),
        repr(bitmap & other),
        repr(bitmap | other),
        bool(bitmap),
        repr(~bitmap),
        repr(copied),
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda bitmap: bitmap(-1),
        lambda bitmap: bitmap(3).set(-1),
        lambda bitmap: bitmap(3).test(-1),
        lambda bitmap: bitmap(3).batched_set([1, -1]),
    ],
)
def test_negative_positions(call: Any) -> None:
    for bitmap in (standin.Bitmap, core.Bitmap):
        with pytest.raises(TypeError):
            call(bitmap)


WINDOWS = st.lists(st.integers(-1, 5), min_size=1, max_size=4)


@given(
    chunks=st.integers(0, 7),
    ranks=st.integers(1, 3),
    windows=WINDOWS,
    hit=st.integers(0, 9),
    data=st.data(),
)
def test_folding(
    chunks: int, ranks: int, windows: list[int], hit: int, data: st.DataObject
) -> None:
    total = chunks * ranks * len(windows)
    bits = data.draw(st.sets(st.integers(0, max(0, total - 1))))
    results = []
    for module in (standin, core):
        found = module.Bitmap(total)
        found.batched_set(sorted(bits))
        folded = module.fold(found, chunks, ranks, windows)
        unfolded = module.unfold(hit, chunks, ranks, windows)
        results.append((repr(folded), repr(unfolded)))
    assert results[0] == results[1]


@given(chunks=st.integers(0, 7), windows=WINDOWS, hit=st.integers(0, 9), data=st.data())
def test_folding_rows(chunks: int, windows: list[int], hit: int, data: st.DataObject) -> None:
    bits = [data.draw(st.sets(st.integers(0, max(0, chunks - 1)))) for _ in windows]
    results = []
    for module in (standin, core):
        rows = [module.Bitmap(chunks) for _ in windows]
        for row, wanted in zip(rows, bits, strict=True):
            row.batched_set(sorted(wanted))
        folded = module.fold_grouped(rows, windows)
        unfolded = [repr(row) for row in module.unfold_grouped(hit, chunks, windows)]
        results.append((repr(folded), unfolded))
    assert results[0] == results[1]


def test_folding_rows_that_do_not_fit() -> None:
    for module in (standin, core):
        with pytest.raises(ValueError):
            module.fold_grouped([module.Bitmap(3)], [1, 2])
        with pytest.raises(ValueError):
            module.fold_grouped([module.Bitmap(3), module.Bitmap(4)], [1, 2])
        assert repr(module.fold_grouped([], [])) == ""


SMALL = st.integers(0, 3)


@given(pattern=st.lists(SMALL, min_size=1, max_size=3), data=st.lists(SMALL, max_size=30))
def test_patterns(pattern: list[int], data: list[int]) -> None:
    ours, theirs = (m.ParallelPatternMatcher(pattern).match(data) for m in (standin, core))
    assert ours == theirs


@given(
    start=st.lists(SMALL, min_size=1, max_size=3),
    end=st.lists(SMALL, min_size=1, max_size=3),
    data=st.lists(SMALL, max_size=30),
)
def test_range_patterns(start: list[int], end: list[int], data: list[int]) -> None:
    ours, theirs = (m.RangePatternMatcher(start, end).match(data) for m in (standin, core))
    assert ours == theirs


@pytest.mark.parametrize("patterns", [([],), ([], [1]), ([1], [])])
def test_patterns_that_are_refused(patterns: tuple[list[int], ...]) -> None:
    name = "ParallelPatternMatcher" if len(patterns) == 1 else "RangePatternMatcher"
    for module in (standin, core):
        with pytest.raises(ValueError):
            getattr(module, name)(*patterns)


@given(st.lists(st.sampled_from(["lock", "unlock", "reset"]), max_size=12))
def test_locks(steps: list[str]) -> None:
    ours, theirs = standin.TTLLock(), core.TTLLock()
    for step in steps:
        getattr(ours, step)()
        getattr(theirs, step)()
        assert ours.is_locked() == theirs.is_locked()


def test_a_lock_opens_when_its_time_is_over() -> None:
    for module in (standin, core):
        lock = module.TTLLock(0)
        lock.lock()
        lock.lock()
        assert not lock.is_locked()


@pytest.mark.parametrize("module", [standin, core], ids=["ours", "theirs"])
def test_the_notifier_wakes_a_pipe(module: Any) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    notifiers = module.PeriodicEventNotifier
    assert notifiers.get() is None
    notifiers.create(1, False)
    notifiers.create(1000, False)
    try:
        notifiers.get().register_fd(writer)
        ready, _, _ = select.select([reader], [], [], 20)
        assert ready and os.read(reader, 1) == b"\x01"
        notifiers.get().unregister_fd(writer)
        notifiers.get().set_interval_ms(0)
    finally:
        notifiers.shutdown()
        notifiers.shutdown()
        os.close(reader)
        os.close(writer)
    assert notifiers.get() is None


def test_the_notifier_wakes_an_eventfd() -> None:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    notifier = standin.PeriodicEventNotifier
    notifier.create(1, True)
    try:
        running = notifier.get()
        assert running is not None
        running.register_fd(descriptor)
        deadline = time.monotonic() + 20
        count = 0
        while count < 2 and time.monotonic() < deadline:
            select.select([descriptor], [], [], 1)
            count += os.eventfd_read(descriptor)
        assert count >= 2
    finally:
        notifier.shutdown()
        os.close(descriptor)
