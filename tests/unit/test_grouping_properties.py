"""Random geometries: what detection, grouping and addressing say is what was laid down."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_layouts import (
    Registration,
    as_bytes,
    chunk_of,
    registrations,
    token_rows,
)
from support.random_structures import Structure, structures

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.engine import TransferEngine
from hma_triton.errors import AlignmentError, BlockIdError, GroupMismatchError
from hma_triton.group_view import (
    EXCLUDED_ENGINE_GROUP,
    EngineGroupInfo,
    engine_group_layer_indices,
    expand_engine_block_ids,
    get_engine_group_indices,
    slice_block_ids_per_group,
)
from hma_triton.kv_format import EngineKVFormat, PlanePages
from hma_triton.kv_layer_groups import KVLayerGroupsManager
from hma_triton.plan import kept_blocks


def register(registration: Registration) -> KVLayerGroupsManager:
    caches, formats = normalize_and_discover_per_layer_formats(
        registration.kv_caches,
        engine_group_layer_indices(registration.infos),
        "vllm",
        registration.hints,
    )
    return KVLayerGroupsManager(
        caches, formats, registration.infos, chunk_of(registration.plans), True
    )


def at_address(plane: PlanePages, blocks: int, slots: int, heads: int) -> np.ndarray[Any, Any]:
    """`[blocks, slots, heads, content]` bytes, read at the plane's addresses and strides."""
    reach = (
        (blocks - 1) * plane.block_stride_bytes
        + (slots - 1) * plane.slot_stride_bytes
        + (heads - 1) * plane.head_stride_bytes
        + plane.content_bytes
    )
    raw = (ctypes.c_uint8 * reach).from_address(plane.address)
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(raw, np.uint8),
        (blocks, slots, heads, plane.content_bytes),
        (plane.block_stride_bytes, plane.slot_stride_bytes, plane.head_stride_bytes, 1),
    )


def _addresses_are_the_tensors_own(registration: Registration) -> None:
    manager = register(registration)
    is_hinted = registration.hints.kv_layout is not None
    for kernel_group, (plan_index, layers) in enumerate(registration.expected):
        plan = registration.plans[plan_index]
        group = manager.kernel_groups[kernel_group]
        assert group.layer_indices == tuple(layers)
        assert group.engine_kv_format is EngineKVFormat[plan.format_name(is_hinted)]
        assert (group.slots_per_block, group.tokens_per_block) == (
            plan.slots,
            plan.tokens_per_block,
        )
        for layer, pages in zip(layers, manager.layer_pages(kernel_group), strict=True):
            assert (pages.num_blocks, pages.num_slots, pages.num_heads) == (
                plan.num_blocks,
                plan.slots,
                plan.heads,
            )
            planes = registration.layers[layer].planes
            assert len(pages.planes) == len(planes)
            for place, plane in zip(pages.planes, planes, strict=True):
                read = at_address(place, plan.num_blocks, plan.slots, plan.heads)
                assert np.array_equal(read, as_bytes(plane))


def _a_gather_is_indexing_by_the_tensors_axes(registration: Registration, random: Any) -> None:
    chunk = chunk_of(registration.plans)
    engine = TransferEngine(
        registration.kv_caches,
        registration.infos,
        layout_hints=registration.hints,
        chunk_tokens=chunk,
        object_layout="token_major",
        backend="reference",
        null_block_id=None,
    )
    ids = [
        [random.randrange(plan.num_blocks) for _ in range(chunk // plan.tokens_per_block)]
        for plan in (registration.plans[index] for index, _ in registration.expected)
    ]
    objects = [
        [torch.zeros(engine.object_nbytes(group), dtype=torch.uint8)]
        for group in range(engine.manager.num_object_groups)
    ]
    engine.store(ids, objects)
    for object_group, members in enumerate(engine.manager.object_groups):
        stored, start = objects[object_group][0].numpy(), 0
        for kernel_group in members.kernel_group_indices:
            plan_index, layers = registration.expected[kernel_group]
            plan = registration.plans[plan_index]
            window = plan.window_tokens if plan.window_tokens > 0 else None
            kept = kept_blocks(plan.tokens_per_block, window, plan.recurrent, chunk)
            wanted = token_rows(
                plan, [registration.layers[i] for i in layers], ids[kernel_group][-kept:]
            )
            start = -(-start // 64) * 64
            assert np.array_equal(stored[start : start + wanted.size], wanted)
            start += wanted.size
        assert start == stored.size


def _grouping_is_a_partition_and_asks_no_value(registration: Registration, seed: int) -> None:
    manager = register(registration)
    covered = [layer for group in manager.kernel_groups for layer in group.layer_indices]
    in_groups = [i for i, plan in enumerate(registration.plan_of) if plan is not None]
    assert sorted(covered) == in_groups
    firsts = [group.layer_indices[0] for group in manager.kernel_groups]
    assert firsts == sorted(firsts)
    placed = [k for group in manager.object_groups for k in group.kernel_group_indices]
    assert sorted(placed) == list(range(manager.num_kernel_groups))
    for members in manager.object_groups:
        rules = {
            (manager.kernel_groups[k].recurrent_state, manager.kernel_groups[k].window_tokens)
            for k in members.kernel_group_indices
        }
        assert rules == {(members.recurrent, members.window_tokens)}
    # other values, same groups; registering again changes nothing
    generator = torch.Generator().manual_seed(seed)
    for layer in registration.layers:
        for plane in layer.planes:
            plane.view(torch.uint8).random_(0, 256, generator=generator)
    again = register(registration)
    assert again.kernel_groups == manager.kernel_groups
    assert again.object_groups == manager.object_groups
    assert [again.layer_pages(k) for k in range(again.num_kernel_groups)] == [
        manager.layer_pages(k) for k in range(manager.num_kernel_groups)
    ]


def _other_structures_have_the_tensors_addresses(structure: Structure) -> None:
    caches, formats = normalize_and_discover_per_layer_formats(
        structure.caches, [], structure.engine, structure.hints
    )
    assert formats == [EngineKVFormat[structure.format_name]] * len(structure.planes)
    manager = KVLayerGroupsManager(caches, formats, (), structure.slots)
    assert [group.layer_indices for group in manager.kernel_groups] == [
        tuple(range(len(structure.planes)))
    ]
    for planes, pages in zip(structure.planes, manager.layer_pages(0), strict=True):
        assert (pages.num_blocks, pages.num_slots, pages.num_heads) == (
            structure.num_blocks,
            structure.slots,
            structure.heads,
        )
        assert len(pages.planes) == len(planes)
        for place, plane in zip(pages.planes, planes, strict=True):
            read = at_address(place, structure.num_blocks, structure.slots, structure.heads)
            assert np.array_equal(read, as_bytes(plane))


def _infos_that_say_otherwise_are_refused(registration: Registration) -> None:
    infos = registration.infos
    caches, formats = normalize_and_discover_per_layer_formats(
        registration.kv_caches, engine_group_layer_indices(infos), "vllm", registration.hints
    )
    last = infos[-1]
    rest = infos[:-1]
    wrong = [[*rest, msgspec.structs.replace(last, layer_indices=last.layer_indices[:1] * 2)]]
    if rest:
        wrong += [[*rest[:-1], last, rest[-1]]]
    if len(last.layer_indices) > 1:
        halves = (last.layer_indices[:1], last.layer_indices[1:])
        wrong += [[*rest, *(msgspec.structs.replace(last, layer_indices=h) for h in halves)]]
    if registration.plans[registration.expected[-1][0]].slots > 1:
        more = msgspec.structs.replace(last, tokens_per_block=last.tokens_per_block + 1)
        wrong += [[*rest, more]]
    for others in wrong:
        with pytest.raises(GroupMismatchError):
            KVLayerGroupsManager(caches, formats, others, chunk_of(registration.plans), True)


@st.composite
def infos_and_ids(draw: st.DrawFn) -> tuple[list[EngineGroupInfo], list[list[int]], int]:
    """Infos of up to four engine groups over up to nine layers, and a block-id list per group."""
    groups = draw(st.integers(1, 4))
    layers = draw(st.permutations(range(draw(st.integers(groups, 9)))))
    covered = layers[: draw(st.integers(groups, len(layers)))]
    owner = [draw(st.integers(0, groups - 1)) if i >= groups else i for i in range(len(covered))]
    parts: dict[int, list[list[int]]] = {}
    for layer, group in zip(covered, owner, strict=True):
        splits = parts.setdefault(group, [])
        if splits and draw(st.booleans()):
            splits[-1].append(layer)
        else:
            splits.append([layer])
    infos = [EngineGroupInfo(g, tuple(sorted(s)), 4) for g, ss in parts.items() for s in ss]
    infos = sorted(infos, key=lambda info: info.layer_indices)
    ids = [draw(st.lists(st.integers(0, 99), max_size=5)) for _ in range(groups)]
    return infos, ids, len(layers)


def _ids_follow_the_group_id(
    case: tuple[list[EngineGroupInfo], list[list[int]], int],
) -> None:
    infos, ids, num_layers = case
    expanded = expand_engine_block_ids(infos, ids)
    assert expanded == [ids[info.engine_group_id] for info in infos]
    assert expand_engine_block_ids(infos, dict(enumerate(ids))) == expanded
    group_of_layer = get_engine_group_indices(infos, num_layers)
    assert group_of_layer is not None
    for layer, group in enumerate(group_of_layer):
        owners = [info.engine_group_id for info in infos if layer in info.layer_indices]
        assert owners == ([group] if group != EXCLUDED_ENGINE_GROUP else [])
    unions = engine_group_layer_indices(infos)
    assert [sorted(u) for u in unions] == unions
    assert sorted(layer for union in unions for layer in union) == sorted(
        layer for info in infos for layer in info.layer_indices
    )
    if len(ids) > 1:
        with pytest.raises(BlockIdError):
            expand_engine_block_ids(infos, ids[:-1])


def _slices_are_token_ranges(blocks: list[int], first: int, more: int, shift: int) -> None:
    unit = int(np.lcm.reduce([block for block in blocks if block] or [1]))
    start, end = first * unit, (first + more) * unit
    tables = {
        group: list(
            range(1000 * group, 1000 * group + ((end + shift) // block if block else 0) + 2)
        )
        for group, block in enumerate(blocks)
    }
    sliced = slice_block_ids_per_group(tables, blocks, start, end)
    for group, (block, ids) in enumerate(zip(blocks, sliced, strict=True)):
        # id n of a group stands for tokens [n * block, (n + 1) * block)
        tokens = list(range(start, end)) if block else []
        assert ids == list(dict.fromkeys(1000 * group + token // block for token in tokens))
    if any(block and shift % block for block in blocks):
        with pytest.raises(AlignmentError):
            slice_block_ids_per_group(tables, blocks, start, end + shift)
    if more and any(blocks):
        short = {g: ids[: end // blocks[g] - 1] for g, ids in tables.items() if blocks[g]}
        with pytest.raises(BlockIdError, match="are needed"):
            slice_block_ids_per_group(short, blocks, start, end)


def _a_window_keeps_what_its_last_tokens_touch(window: int, block: int, per_chunk: int) -> None:
    chunk = block * per_chunk
    # a token at the chunk's end reads the window - 1 tokens before it, this chunk's part of them
    read = range(max(0, chunk - (window - 1)), chunk)
    touched = {token // block for token in read} | {per_chunk - 1}
    assert kept_blocks(block, window, False, chunk) == len(touched)
    assert kept_blocks(block, None, False, chunk) == per_chunk
    assert kept_blocks(block, window, True, chunk) == 1


SLICES = (
    st.lists(st.sampled_from((0, 1, 2, 3, 4, 8, 16, 544)), min_size=1, max_size=4),
    st.integers(0, 6),
    st.integers(0, 6),
    st.integers(0, 600),
)
# property, its strategies, examples in every run, examples in a long run
PROPERTIES: tuple[tuple[Callable[..., None], tuple[Any, ...], int, int], ...] = (
    (_addresses_are_the_tensors_own, (registrations(),), 1500, 30_000),
    (
        _a_gather_is_indexing_by_the_tensors_axes,
        (registrations(), st.randoms(use_true_random=False)),
        1000,
        25_000,
    ),
    (
        _grouping_is_a_partition_and_asks_no_value,
        (registrations(), st.integers(0, 2**31)),
        1000,
        20_000,
    ),
    (_infos_that_say_otherwise_are_refused, (registrations(),), 300, 5_000),
    (_other_structures_have_the_tensors_addresses, (structures(),), 500, 10_000),
    (_ids_follow_the_group_id, (infos_and_ids(),), 600, 10_000),
    (_slices_are_token_ranges, SLICES, 600, 10_000),
    (
        _a_window_keeps_what_its_last_tokens_touch,
        (st.integers(1, 700), st.integers(1, 64), st.integers(1, 24)),
        600,
        10_000,
    ),
)
CASES = [
    pytest.param(check, strategies, short, id=check.__name__.strip("_"))
    for check, strategies, short, _ in PROPERTIES
]
LONG_CASES = [
    pytest.param(check, strategies, long, id=check.__name__.strip("_"))
    for check, strategies, _, long in PROPERTIES
]


def test_the_examples_are_as_many_as_promised() -> None:
    assert sum(short for _, _, short, _ in PROPERTIES) >= 5000
    assert sum(long for _, _, _, long in PROPERTIES) >= 100_000


@pytest.mark.parametrize(("check", "strategies", "examples"), CASES)
def test_property(check: Callable[..., None], strategies: tuple[Any, ...], examples: int) -> None:
    settings(max_examples=examples)(given(*strategies)(check))()


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("check", "strategies", "examples"), LONG_CASES)
def test_property_at_length(
    check: Callable[..., None], strategies: tuple[Any, ...], examples: int
) -> None:
    profile = settings.get_profile("long")
    settings(profile, max_examples=examples)(given(*strategies)(check))()
