"""Our operation against LMCache's own, over every format, shape, form, skip and direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmcache.v1.platform import torch_ops
from support.lmcache_cases import (
    ELEMENT_TYPES,
    Case,
    Setting,
    assert_planar_rows,
    block_ids,
    refuse,
)

from hma_triton.errors import BlockIdError
from hma_triton.integration.lmcache.executors import Executors
from hma_triton.integration.lmcache.fallthrough import FallthroughLog
from hma_triton.integration.lmcache.operation import BlockTransfer
from hma_triton.kv_format import FORMAT_ROWS, EngineKVFormat

RETRIEVE, STORE = 0, 1
BOTH_WAYS = pytest.mark.parametrize("direction", [STORE, RETRIEVE], ids=["store", "retrieve"])
ALL_FORMATS = pytest.mark.parametrize("fmt", list(EngineKVFormat), ids=lambda f: f.name)
# What LMCache's own operation cannot do in this form, and how it says so; docs/lmcache.md.
REFUSED = {
    ("pointers", EngineKVFormat.NL_X_TWO_X_NB_BS_NH_HS): TypeError,
    ("pointers", EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS): TypeError,
    ("tensors", EngineKVFormat.NL_X_TWO_NB_NH_ONE_BS_HS): ValueError,
}
# Formats whose blocks may lie apart: LMCache's own list of those whose first axis is the block.
PADDABLE = [
    EngineKVFormat.NL_X_NB_BS_HS,
    EngineKVFormat.NL_X_NB_BSV_BSS,
    EngineKVFormat.NL_X_NB_NH_BS_CS,
    EngineKVFormat.NL_X_NB_BS_NH_CS,
    EngineKVFormat.NL_X_NB_BS_NH_HS,
    EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS,
]

Operation = Callable[..., None]


@pytest.fixture(scope="module")
def ours() -> Iterator[Operation]:
    """Our operation as `install()` makes it on the CPU; nothing may fall through."""
    executors = Executors()
    transfer = BlockTransfer(refuse, executors, FallthroughLog(), planar_rows=False)
    yield transfer.multi_layer_block_kv_transfer
    executors.close()


def forms_of(form: str) -> dict[str, bool]:
    return {"pointers": form == "pointers", "object_pointers": form == "pointers"}


def assert_same(case: Case, ours: Operation, direction: int, **forms: bool) -> None:
    """Equal bytes in the whole arena: objects, pages, and everything that must stay."""
    mine, theirs = Setting.make(case), Setting.make(case)
    mine.call(ours, direction, **forms)
    theirs.call(torch_ops.multi_layer_block_kv_transfer, direction, **forms)
    assert torch.equal(mine.arena.bytes, theirs.arena.bytes)


def assert_as_indexed(case: Case, ours: Operation, direction: int, **forms: bool) -> None:
    """The bytes that plain indexing gives."""
    mine, plain = Setting.make(case), Setting.make(case)
    mine.call(ours, direction, **forms)
    plain.expect(direction)
    assert torch.equal(mine.arena.bytes, plain.arena.bytes)


@BOTH_WAYS
@pytest.mark.parametrize("form", ["pointers", "tensors"])
@ALL_FORMATS
def test_every_format(ours: Operation, fmt: EngineKVFormat, form: str, direction: int) -> None:
    if ("pointers", fmt) in REFUSED and fmt is EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS:
        form = "tensors"
    for skip, given_ids in ((0, None), (1, 5), (2, None), (3, 5), (5, None), (6, None), (0, 1)):
        case = Case(fmt, skip=skip, given=given_ids, seed=17 * skip)
        forms = forms_of(form) | {"tensor_ids": skip % 2 == 0}
        if (form, fmt) not in REFUSED:
            assert_same(case, ours, direction, **forms)
        if fmt is not EngineKVFormat.NL_X_NB_BSV_BSS:
            assert_as_indexed(case, ours, direction, **forms)


@pytest.mark.parametrize(("form", "fmt"), list(REFUSED), ids=lambda v: getattr(v, "name", v))
def test_what_lmcache_refuses(form: str, fmt: EngineKVFormat) -> None:
    setting = Setting.make(Case(fmt))
    before = setting.arena.bytes.clone()
    with pytest.raises(REFUSED[form, fmt]):
        setting.call(torch_ops.multi_layer_block_kv_transfer, STORE, **forms_of(form))
    assert torch.equal(setting.arena.bytes, before)


@BOTH_WAYS
@pytest.mark.parametrize("fmt", PADDABLE, ids=lambda f: f.name)
def test_blocks_that_lie_apart(ours: Operation, fmt: EngineKVFormat, direction: int) -> None:
    """Tensors as LMCache does; pointers, where LMCache gives up, as the tensors."""
    case = Case(fmt, padding=24, skip=1)
    assert_same(case, ours, direction)
    if ("pointers", fmt) in REFUSED:
        return
    with pytest.raises(NotImplementedError, match="Non-tight"):
        Setting.make(case).call(
            torch_ops.multi_layer_block_kv_transfer, direction, **forms_of("pointers")
        )
    mine, theirs = Setting.make(case), Setting.make(case)
    mine.call(ours, direction, **forms_of("pointers"))
    theirs.call(torch_ops.multi_layer_block_kv_transfer, direction)
    assert torch.equal(mine.arena.bytes, theirs.arena.bytes)


@BOTH_WAYS
@pytest.mark.parametrize(
    "fmt", [EngineKVFormat.NL_X_NB_NH_BS_TWO_HS, EngineKVFormat.NL_X_NB_BS_NH_TWO_HS]
)
def test_packed_content_as_one_axis(ours: Operation, fmt: EngineKVFormat, direction: int) -> None:
    assert_same(Case(fmt, joined_content=True), ours, direction)


@BOTH_WAYS
def test_keys_and_values_in_one_flat_list(ours: Operation, direction: int) -> None:
    case = Case(EngineKVFormat.TWO_X_NL_X_NB_BS_NH_HS)
    mine, theirs = Setting.make(case), Setting.make(case)
    for setting in (mine, theirs):
        setting.flat = True
    mine.call(ours, direction)
    theirs.call(torch_ops.multi_layer_block_kv_transfer, direction)
    assert torch.equal(mine.arena.bytes, theirs.arena.bytes)


@BOTH_WAYS
@ALL_FORMATS
def test_objects_longer_than_a_chunk(ours: Operation, fmt: EngineKVFormat, direction: int) -> None:
    """A tensor that holds more slots than one call fills: the rest stays."""
    if ("tensors", fmt) in REFUSED:
        fmt = EngineKVFormat.NL_X_TWO_NB_NH_BS_HS
    assert_same(Case(fmt, spare_slots=3, skip=1), ours, direction)


@BOTH_WAYS
@pytest.mark.parametrize("planes", [1, 2, 3])
@pytest.mark.parametrize("equal_widths", [False, True])
def test_tuples_of_latents(
    ours: Operation, planes: int, equal_widths: bool, direction: int
) -> None:
    """Planes stand side by side in a slot's row, also where all are equally wide."""
    widths = (8, 8, 8) if equal_widths else (16, 8, 4)
    case = Case(EngineKVFormat.NL_X_NP_X_NB_BS_ONE_HS, latent_widths=widths[:planes])
    assert_same(case, ours, direction)
    assert_as_indexed(case, ours, direction)


@BOTH_WAYS
def test_planar_pages_become_rows_where_kernels_make_them(direction: int) -> None:
    """LMCache's compiled kernels write rows, its torch operations the page: docs/lmcache.md."""
    executors = Executors()
    transfer = BlockTransfer(refuse, executors, FallthroughLog(), planar_rows=True)
    assert_planar_rows(transfer.multi_layer_block_kv_transfer, direction)
    executors.close()


def test_the_smallest_planar_difference(ours: Operation) -> None:
    """One block of two slots: the object of the torch operation is the page, not its rows."""
    case = Case(
        EngineKVFormat.NL_X_NB_BSV_BSS, layers=1, blocks=1, slots=2, blocks_per_object=1, objects=1
    )
    theirs = Setting.make(case)
    theirs.call(torch_ops.multi_layer_block_kv_transfer, STORE)
    page = theirs.caches[0][0].flatten()
    assert torch.equal(theirs.objects[0].flatten(), page)
    rows = torch.cat([page[:128], page[256:260], page[128:256], page[260:]])
    assert not torch.equal(page, rows)
    executors = Executors()
    transfer = BlockTransfer(refuse, executors, FallthroughLog(), planar_rows=True)
    mine = Setting.make(case)
    mine.call(transfer.multi_layer_block_kv_transfer, STORE)
    assert torch.equal(mine.objects[0].flatten(), rows)
    executors.close()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    slots = draw(st.sampled_from([1, 2, 3, 8, 16]))
    blocks_per_object, objects = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    most = blocks_per_object * objects
    fmt = draw(st.sampled_from(list(EngineKVFormat)))
    return Case(
        fmt,
        layers=draw(st.integers(1, 5)),
        blocks=most + draw(st.integers(1, 5)),
        slots=slots,
        heads=draw(st.sampled_from([1, 2, 3, 5])),
        head_size=draw(st.sampled_from([1, 3, 8, 33, 64])),
        dtype=draw(st.sampled_from(ELEMENT_TYPES)),
        padding=draw(st.sampled_from([0, 1, 40])) if fmt in PADDABLE else 0,
        blocks_per_object=blocks_per_object,
        objects=objects,
        skip=draw(st.integers(0, most + 1)),
        given=draw(st.one_of(st.none(), st.integers(0, most))),
        seed=draw(st.integers(0, 1000)),
    )


@given(
    case=cases(),
    direction=st.sampled_from([STORE, RETRIEVE]),
    pointers=st.booleans(),
    object_pointers=st.booleans(),
    tensor_ids=st.booleans(),
)
def test_random_cases(
    ours: Operation,
    case: Case,
    direction: int,
    pointers: bool,
    object_pointers: bool,
    tensor_ids: bool,
) -> None:
    form = "pointers" if pointers else "tensors"
    if (form, case.format) in REFUSED or (pointers and case.padding):
        return
    forms = {"pointers": pointers, "object_pointers": object_pointers, "tensor_ids": tensor_ids}
    assert_same(case, ours, direction, **forms)


@BOTH_WAYS
@ALL_FORMATS
@pytest.mark.parametrize("bad", [-1, 11, 1 << 40])
def test_ids_outside_the_pool_move_nothing(
    ours: Operation, fmt: EngineKVFormat, direction: int, bad: int
) -> None:
    case = Case(fmt)
    for position in (0, 3, 5):
        setting = Setting.make(case)
        before = setting.arena.bytes.clone()
        ids = block_ids(case)
        ids[position] = bad
        with pytest.raises(BlockIdError, match=f"block id {bad} at position {position}"):
            setting.call(ours, direction, ids=ids)
        assert torch.equal(setting.arena.bytes, before)


def test_ids_that_are_skipped_may_be_anything(ours: Operation) -> None:
    case = Case(EngineKVFormat.NL_X_NB_BS_HS, skip=2)
    mine, theirs = Setting.make(case), Setting.make(case)
    ids = block_ids(case)
    mine.call(ours, STORE, ids=[-1, 1 << 40, *ids[2:]])
    theirs.call(torch_ops.multi_layer_block_kv_transfer, STORE, ids=ids)
    assert torch.equal(mine.arena.bytes, theirs.arena.bytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_slots_given": 0}, "lmcache_chunk_size 0"),
        ({"chunk_slots_given": 7}, "lmcache_chunk_size 7"),
        ({"skip": -1}, "skip_prefix_n_blocks -1"),
    ],
)
def test_arguments_that_lmcache_refuses_too(
    ours: Operation, changes: dict[str, int], message: str
) -> None:
    case = replace(Case(EngineKVFormat.NL_X_NB_BS_HS), **changes)
    with pytest.raises(ValueError, match=r"chunk_size|skip_prefix"):
        Setting.make(case).call(torch_ops.multi_layer_block_kv_transfer, STORE)
    with pytest.raises(ValueError, match=message):
        Setting.make(case).call(ours, STORE)


def test_our_formats_are_those_of_lmcache() -> None:
    import lmcache.lmcache_native as core
    from lmcache.v1.gpu_connector.kv_format.specs.registry import get_spec_class

    assert {n: int(v) for n, v in core.EngineKVFormat.__members__.items()} == {
        member.name: member.value for member in EngineKVFormat
    }
    for member, row in FORMAT_ROWS.items():
        spec = get_spec_class(core.EngineKVFormat(member.value))
        assert (
            spec.is_cross_layer,
            spec.is_kv_list,
            spec.is_layer_list,
            spec.is_mla,
            spec.is_kv_second_tuple,
            spec.is_pbs_fused,
            spec.is_hnd,
        ) == (
            row.is_cross_layer,
            row.is_kv_list,
            row.is_layer_list,
            row.is_single_latent,
            row.is_plane_tuple,
            row.is_folded,
            row.heads_first,
        ), member.name
