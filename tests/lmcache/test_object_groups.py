"""Whole object groups through LMCache's planner: our plan entry against its own operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.lmcache_context import RETRIEVE, STORE, Layers, Registered, registered

from hma_triton.errors import BlockIdError, PlanError
from hma_triton.integration.lmcache import Installation, install, uninstall
from hma_triton.integration.lmcache.plan_types import (
    BatchStep,
    KernelGroupSpec,
    LaunchVar,
    StagingCopy,
)
from hma_triton.kernels.cpu import CpuCopier

ONE = [Layers(3, (40, 2, 8, 24))]
# blocks of 8 and 16 tokens, a key-only cache, and an indexer cache with planar pages
MIXED = [
    Layers(3, (40, 2, 8, 24)),
    Layers(2, (40, 2, 16, 24)),
    Layers(2, (40, 16, 40), torch.float16),
    Layers(2, (40, 16, 132), torch.uint8),
]
# a window inside a chunk of 64, one of two chunks, full attention, and compressed slots
WINDOWED = [
    Layers(2, (60, 2, 8, 24), window=24),
    Layers(2, (60, 2, 16, 24), window=100),
    Layers(1, (60, 2, 16, 24)),
    Layers(2, (60, 4, 40), tokens_per_block=16, dtype=torch.float32),
]
GEOMETRIES = {"one": ONE, "mixed": MIXED, "windowed": WINDOWED}


@pytest.fixture
def installed() -> Iterator[Installation]:
    yield install()
    uninstall()


def run(geometry: Sequence[Layers], separate: bool, ours: bool, moves: list[dict[str, Any]]) -> Any:
    """Bytes of pools and objects after `moves` in every object group."""
    installation = install() if ours else None
    try:
        with registered(geometry, 64, 4, separate) as cache:
            for move in moves:
                for group in cache.groups:
                    cache.move(group=group, **move)
            return cache.pool_bytes(), [cache.object_bytes(group) for group in cache.groups]
    finally:
        if installation is not None:
            assert installation.fallthrough.counts == {}
            uninstall()


CASES = {
    "store": [{"direction": STORE}],
    "store-with-holes": [{"direction": STORE, "without": (0, 2)}],
    "retrieve": [{"direction": RETRIEVE, "batch": 4}],
    "retrieve-in-batches": [{"direction": RETRIEVE, "batch": 3}],
    "retrieve-past-a-local-hit": [{"direction": RETRIEVE, "batch": 4, "skip_tokens": 96}],
    "retrieve-past-two-chunks": [{"direction": RETRIEVE, "batch": 2, "skip_tokens": 144}],
    "there-and-back": [{"direction": STORE}, {"direction": RETRIEVE, "batch": 4}],
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("geometry", "separate"),
    [
        pytest.param(
            geometry,
            separate,
            id=f"{geometry}-{'separate-objects' if separate else 'one-object'}",
            # windows matter most where they have objects of their own
            marks=() if separate == (geometry == "windowed") else pytest.mark.long,
        )
        for geometry in GEOMETRIES
        for separate in (False, True)
    ],
)
def test_object_groups_get_the_bytes_of_lmcache(geometry: str, separate: bool, case: str) -> None:
    own = run(GEOMETRIES[geometry], separate, False, CASES[case])
    ours = run(GEOMETRIES[geometry], separate, True, CASES[case])
    for left, right in zip(own[0], ours[0], strict=True):
        assert torch.equal(left, right)
    for left_parts, right_parts in zip(own[1], ours[1], strict=True):
        for left, right in zip(left_parts, right_parts, strict=True):
            assert torch.equal(left, right)


class Counting:
    """The CPU copier, and how often it was called."""

    def __init__(self, copier: Any) -> None:
        self.inner, self.calls = copier, 0

    def prepare(self, specs: Any) -> None:
        self.inner.prepare(specs)

    def copy_blocks(self, *args: Any) -> None:
        self.calls += 1
        self.inner.copy_blocks(*args)

    def close(self) -> None:
        self.inner.close()


def test_one_call_covers_an_object_group() -> None:
    """Both chunks are one copy per kernel group, straight between pages and objects."""
    counting = Counting(CpuCopier())
    install(counting)
    try:
        with registered(MIXED[:3], 64, 2, False) as cache:
            cache.context.tmp_cpu_buffer_.fill_(7)
            cache.move(STORE, 0)
            assert counting.calls == 3
            cache.move(RETRIEVE, 0, batch=2)
            assert counting.calls == 6
            assert bool((cache.context.tmp_cpu_buffer_ == 7).all())
    finally:
        uninstall()
        counting.close()


@pytest.mark.parametrize("direction", [STORE, RETRIEVE])
def test_ids_outside_the_pool_move_nothing(installed: Installation, direction: Any) -> None:
    with registered(WINDOWED, 64, 4, False) as cache:
        ids = cache.block_ids()
        ids[2][-1] = 60
        pools, objects = cache.pool_bytes(), cache.object_bytes(0)
        with pytest.raises(BlockIdError, match=r"kernel group 2 .*block id 60 .*pool of 60 blocks"):
            cache.move(direction, 0, ids=ids)
        assert all(map(torch.equal, pools, cache.pool_bytes()))
        assert all(map(torch.equal, objects, cache.object_bytes(0)))


def plan(cache: Registered, **changes: int) -> tuple[list[Any], list[BatchStep]]:
    """A plan of one chunk as LMCache's planner makes it, with one number changed."""
    context = cache.context
    staged = context.stage_block_ids(cache.block_ids())
    slot = context.get_temp_object_group_buffer(0, 0)
    made = cache.objects[0][0]
    spec = KernelGroupSpec(
        context.get_kernel_group_kv_pointers(0).data_ptr(),
        [context.get_temp_kernel_group_buffer(0, 0).data_ptr()],
        context.get_shape_desc(0),
        context.get_slots_per_chunk_in_sw(0),
        context.get_engine_kv_format(0),
        staged[0].data_ptr(),
        staged[0].numel(),
    )
    launch = {"group": 0, "offset": 0, "blocks": 8, "objects": 1, "skip": 0, **changes}
    nbytes = launch.pop("nbytes", made.get_size())
    copy = StagingCopy(made.data_ptr, slot.data_ptr(), nbytes, made.meta.address)
    return [spec], [BatchStep([copy], [LaunchVar(*launch.values())])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1}, "launch of group 1 of 1"),
        ({"group": -1}, "launch of group -1 of 1"),
        ({"offset": 33}, "block ids 33 to 41 of 32"),
        ({"offset": -1}, "block ids -1 to 7 of 32"),
        ({"objects": 2}, "2 objects in a launch over 1 staging slots"),
        ({"objects": 0}, "0 objects in a launch over 1 staging slots"),
        ({"skip": -1}, "skip_prefix_n_blocks -1"),
        ({"nbytes": 100}, "of an object of 100 bytes"),
    ],
)
def test_plans_that_do_not_fit(
    installed: Installation, changes: dict[str, int], message: str
) -> None:
    with registered(ONE, 64, 4, False) as cache:
        before = cache.object_bytes(0)
        specs, steps = plan(cache, **changes)
        with pytest.raises(PlanError, match=message):
            installed.device_ops.execute_object_group_transfer(
                STORE, torch.device("cpu"), 1 << 26, specs, steps
            )
        assert all(map(torch.equal, before, cache.object_bytes(0)))


def test_a_plan_whose_slots_belong_to_no_object_is_staged(installed: Installation) -> None:
    """Without a staging copy the blocks go where the launch says: into the staging slot."""
    with registered(ONE, 64, 4, False) as cache:
        specs, steps = plan(cache)
        entry = installed.device_ops.execute_object_group_transfer
        entry(STORE, torch.device("cpu"), 1 << 26, specs, steps)
        direct = cache.object_bytes(0)[0]
        bare = [BatchStep([], steps[0].launches)]
        cache.context.tmp_cpu_buffer_.zero_()
        entry(STORE, torch.device("cpu"), 1 << 26, specs, bare)
        slot = cache.context.get_temp_object_group_buffer(0, 0)
        assert torch.equal(slot, direct)
        # and a step that only copies objects is a copy of objects
        cache.objects[0][0].raw_data.view(torch.uint8).fill_(3)
        only = [BatchStep(steps[0].staging, [])]
        entry(STORE, torch.device("cpu"), 1 << 26, specs, only, phase_timing_enabled=True)
        assert torch.equal(cache.object_bytes(0)[0], direct)


def test_a_plan_that_we_do_not_serve_runs_on_lmcaches_operation(installed: Installation) -> None:
    """Launch by launch, where LMCache has no compiled entry: here to its own refusal."""
    with registered(ONE, 64, 4, False) as cache:
        specs, steps = plan(cache)
        desc = specs[0].shape_desc
        dense = desc.block_stride_elems
        desc.block_stride_elems = dense // 2
        entry = installed.device_ops.execute_object_group_transfer
        with pytest.raises(NotImplementedError, match="Non-tight"):
            entry(STORE, torch.device("cpu"), 1 << 26, specs, steps)
        reason = f"a step of {dense // 2} elements between blocks, where this format's pointers"
        assert list(installed.fallthrough.counts) == [
            ("NL_X_NB_NH_BS_CS", f"{reason} have {dense}")
        ]
        desc.block_stride_elems = dense
        entry(STORE, torch.device("cpu"), 1 << 26, specs, steps)
