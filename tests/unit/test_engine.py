"""`TransferEngine` as a library user meets it: round trips over poisoned, overlaid pools."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hma_triton.engine import TransferEngine, TransferResult
from hma_triton.errors import (
    AlignmentError,
    BlockIdError,
    ConfigError,
    GroupMismatchError,
    IncompleteRetrieveError,
    PlanError,
)
from hma_triton.group_view import EngineGroupInfo
from hma_triton.kernels.addressing import Direction

NUM_BLOCKS = 12
BACKENDS = ["reference", "cpu"]
GROUP_LAYERS = (("window.0", "window.1"), ("state.0",), ("full.0", "full.1"))


def fill(tensor: torch.Tensor, seed: int) -> None:
    raw = torch.randint(
        0,
        256,
        (tensor.untyped_storage().nbytes(),),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).copy_(raw)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@dataclass
class Hybrid:
    """Two layers of full attention, two of a window, one state row: one storage, all overlaid."""

    pool: torch.Tensor
    caches: dict[str, torch.Tensor]
    infos: list[EngineGroupInfo]

    @classmethod
    def build(cls) -> Hybrid:
        page = 16 * 2 * 8  # 16 slots, 2 heads, content 8
        layer_stride = page * NUM_BLOCKS
        pool = torch.zeros(2 * layer_stride, dtype=torch.int8)

        def attention(layer: int) -> torch.Tensor:
            # heads outside slots in memory; the shape is always [NB, H, N, C]
            return torch.as_strided(
                pool, (NUM_BLOCKS, 2, 16, 8), (page, 128, 8, 1), layer * layer_stride
            )

        state = torch.as_strided(pool, (NUM_BLOCKS, 1, 1, 200), (page, 200, 200, 1), 0)
        caches = {
            "window.0": attention(0),
            "window.1": attention(1),
            "state.0": state,
            "full.0": attention(0),
            "full.1": attention(1),
            "shared.0": attention(1),
        }
        infos = [
            EngineGroupInfo(0, (0, 1), 16, 20),
            EngineGroupInfo(1, (2,), 32, -1, 0, True),
            EngineGroupInfo(2, (3, 4), 16),
        ]
        return cls(pool, caches, infos)

    def engine(self, backend: str, **options: object) -> TransferEngine:
        return TransferEngine(
            self.caches,
            self.infos,
            layout_hints={"kv_layout": "LBHNC"},
            chunk_tokens=32,
            backend=backend,
            **options,  # type: ignore[arg-type]
        )


def make_objects(engine: TransferEngine, chunks: int) -> list[list[torch.Tensor | None]]:
    return [
        [torch.full((engine.object_nbytes(group),), 0x5A, dtype=torch.uint8) for _ in range(chunks)]
        for group in range(len(engine.manager.object_groups))
    ]


@pytest.mark.parametrize("layout", ["opaque", "token_major"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hybrid_prefix_comes_back_into_other_blocks(backend: str, layout: str) -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine(backend, object_layout=layout)
    assert [g.kernel_group_indices for g in engine.manager.object_groups] == [(0,), (1,), (2,)]
    fill(hybrid.pool, 1)
    before = {name: cache.clone() for name, cache in hybrid.caches.items()}
    # per chunk of 32 tokens: two attention blocks or one state block; ids live in one space each
    ids = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
    objects = make_objects(engine, 2)
    stored = engine.store(ids, objects)
    page = 16 * 2 * 8
    assert isinstance(stored, TransferResult)
    # a window of 20 tokens keeps ceil(19 / 16) = 2 blocks, all of the chunk
    assert stored.nbytes == 2 * 4 * page + 2 * 200 + 2 * 4 * page
    assert stored.num_blocks == 10
    assert stored.backend == engine.backend
    assert stored.skipped == ()

    fill(hybrid.pool, 2)
    poison = storage_bytes(hybrid.pool).clone()
    new = [[0, 0, 3, 11], [0, 2], [4, 5, 6, 7]]
    result = engine.retrieve(new, objects)
    assert result.num_blocks == 7
    for index, names in (
        (0, ["window.0", "window.1"]),
        (1, ["state.0"]),
        (2, ["full.0", "full.1"]),
    ):
        for name in names:
            for old_id, new_id in zip(ids[index], new[index], strict=True):
                if new_id:
                    assert torch.equal(hybrid.caches[name][new_id], before[name][old_id]), name
    # everything else keeps its poison: the null block, padding of the state rows, other blocks
    touched = torch.zeros_like(poison, dtype=torch.bool)
    for index, names in (
        (0, ["window.0", "window.1"]),
        (1, ["state.0"]),
        (2, ["full.0", "full.1"]),
    ):
        for name in names:
            cache = hybrid.caches[name]
            mark = torch.as_strided(touched, cache.shape, cache.stride(), cache.storage_offset())
            for new_id in new[index]:
                if new_id:
                    mark[new_id] = True
    after = storage_bytes(hybrid.pool)
    assert torch.equal(after[~touched], poison[~touched])
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_with_a_null_is_left_out_and_its_object_untouched(backend: str) -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine(backend)
    fill(hybrid.pool, 1)
    objects = make_objects(engine, 2)
    result = engine.store([[0, 2, 3, 4], [0, 6], [7, 8, 9, 10]], objects)
    assert result.skipped == ((0, 0), (1, 0))
    for group, chunk in result.skipped:
        held = objects[group][chunk]
        assert held is not None
        assert bool((held == 0x5A).all())
    engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_skips_objects_as_memoryviews_and_none(backend: str) -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine(backend)
    fill(hybrid.pool, 1)
    kept = hybrid.caches["full.0"][7:11].clone()
    arena = bytearray(sum(2 * engine.object_nbytes(g) for g in range(3)))
    view, objects, offset = memoryview(arena), [], 0
    for group in range(3):
        row: list[memoryview | None] = []
        for _ in range(2):
            row.append(view[offset : offset + engine.object_nbytes(group)])
            offset += engine.object_nbytes(group)
        objects.append(row)
    ids = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10]]
    engine.store(ids, objects, skip_tokens=32)
    half = sum(engine.object_nbytes(g) for g in range(1))
    assert not any(arena[:half])
    assert any(arena[half : 2 * half])
    fill(hybrid.pool, 2)
    wiped = hybrid.caches["full.0"][7:11].clone()
    objects[0][0] = objects[1][0] = objects[2][0] = None
    result = engine.retrieve(ids, objects, skip_tokens=32)
    assert result.num_blocks == 5
    assert torch.equal(hybrid.caches["full.0"][7:9], wiped[:2])
    assert torch.equal(hybrid.caches["full.0"][9:11], kept[2:])
    with pytest.raises(IncompleteRetrieveError, match="chunk 0"):
        engine.retrieve(ids, objects)
    engine.close()


def test_a_failed_retrieve_writes_nothing() -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine("cpu")
    fill(hybrid.pool, 3)
    before = storage_bytes(hybrid.pool).clone()
    objects = make_objects(engine, 1)
    objects[2][0] = None  # the last group has nothing to give
    with pytest.raises(IncompleteRetrieveError, match="kernel group 2"):
        engine.retrieve([[1, 2], [3], [4, 5]], objects)
    with pytest.raises(BlockIdError, match=r"kernel group 2.*block id 12"):
        engine.retrieve([[1, 2], [3], [4, 12]], make_objects(engine, 1))
    with pytest.raises(AlignmentError):
        engine.retrieve([[1, 2], [3], [4, 5]], make_objects(engine, 1), skip_tokens=8)
    assert torch.equal(storage_bytes(hybrid.pool), before)
    engine.close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda objects: objects[:2], "objects for 2 object groups; this registration has 3"),
        (lambda objects: [objects[0][:0], *objects[1:]], "chunks; every group needs the same"),
        (lambda objects: [[objects[0][0][1:]], *objects[1:]], "object group 0, chunk 0: buffer"),
        (lambda objects: [[objects[0][0].float()], *objects[1:]], "contiguous uint8"),
        (lambda objects: [[memoryview(b"x" * 4096)], *objects[1:]], "writable"),
        (lambda objects: [["bytes"], *objects[1:]], "a uint8 tensor, a memoryview or None"),
        (lambda objects: [[objects[0][0].to("meta")], *objects[1:]], "host memory, not on meta"),
    ],
)
def test_wrong_objects_are_refused_by_name(change: object, match: str) -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine("reference")
    objects = change(make_objects(engine, 1))  # type: ignore[operator]
    with pytest.raises(PlanError, match=match):
        engine.store([[1, 2], [3], [4, 5]], objects)


def test_wrong_ids_and_options_are_refused_by_name() -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine("reference")
    with pytest.raises(PlanError, match="info 1 have dtype float64"):
        engine.store([[1, 2], [3.5], [4, 5]], make_objects(engine, 1))
    with pytest.raises(PlanError, match="info 1 are no list of numbers"):
        engine.store([[1, 2], [[3], [4, 5]], [4, 5]], make_objects(engine, 1))
    for backend in ("auto", "cpu", "reference"):
        with pytest.raises(ConfigError, match="caches on meta cannot be served"):
            TransferEngine(
                {"layer": torch.empty(4, 2, 16, 8, dtype=torch.uint8, device="meta")},
                layout_hints={"kv_layout": "HND"},
                chunk_tokens=16,
                backend=backend,
            )
    with pytest.raises(ConfigError, match="backend 'gpu' is unknown"):
        hybrid.engine("gpu")
    with pytest.raises(ConfigError, match="object_layout 'rows' is unknown"):
        hybrid.engine("cpu", object_layout="rows")
    with pytest.raises(GroupMismatchError, match="nearest valid chunk is 32"):
        TransferEngine(
            hybrid.caches,
            hybrid.infos,
            layout_hints={"kv_layout": "LBHNC"},
            chunk_tokens=16,
            backend="reference",
        )


def test_expansion_goes_by_engine_group_id() -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine("reference")
    assert engine.expand({0: [1, 2], 2: [5, 6], 1: [3]}) == [[1, 2], [3], [5, 6]]


def test_case_91_the_first_byte_waits_for_the_event() -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine("cpu")
    fill(hybrid.pool, 1)
    objects = make_objects(engine, 1)
    ids = [[1, 2], [3], [4, 5]]
    engine.store(ids, objects)
    fill(hybrid.pool, 2)
    before = storage_bytes(hybrid.pool).clone()
    reached, fired = threading.Event(), threading.Event()

    class Pending:
        def synchronize(self) -> None:
            reached.set()
            assert fired.wait(30)

    worker = threading.Thread(
        target=engine.retrieve, args=(ids, objects), kwargs={"wait_event": Pending()}
    )
    worker.start()
    assert reached.wait(30)
    assert torch.equal(storage_bytes(hybrid.pool), before)
    fired.set()
    worker.join(30)
    assert not torch.equal(storage_bytes(hybrid.pool), before)
    # and a store reads what the producer wrote before its event fired
    reached.clear()
    fired.clear()
    worker = threading.Thread(
        target=engine.store, args=(ids, objects), kwargs={"wait_event": Pending()}
    )
    worker.start()
    assert reached.wait(30)
    fill(hybrid.pool, 4)
    expected = hybrid.caches["full.0"][4:6].clone().reshape(-1).view(torch.uint8)
    fired.set()
    worker.join(30)
    held = objects[2][0]
    assert held is not None
    assert torch.equal(held[: expected.numel()], expected)
    engine.close()


def test_a_non_hybrid_engine_needs_no_infos() -> None:
    # rank 5, K and V apart, as older engines register
    layers = [torch.zeros(2, NUM_BLOCKS, 4, 3, 8, dtype=torch.bfloat16) for _ in range(2)]
    for index, layer in enumerate(layers):
        fill(layer, index)
    engine = TransferEngine(
        layers, layout_hints={"kv_layout": "NHD"}, chunk_tokens=8, backend="cpu"
    )
    before = [layer.clone() for layer in layers]
    objects = make_objects(engine, 3)
    engine.store([[1, 2, 3, 4, 5, 6]], objects)
    for index, layer in enumerate(layers):
        fill(layer, 10 + index)
    engine.retrieve([np.array([6, 5, 4, 3, 2, 1], dtype=np.int32)], objects)
    for old, new in zip(before, layers, strict=True):
        # compared as bytes: random bf16 bits hold NaNs
        assert torch.equal(old[:, 1:7].flip(1).view(torch.int16), new[:, 1:7].view(torch.int16))
    engine.close()


def test_a_plan_says_what_it_costs_before_a_byte_moves() -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine("reference")
    before = storage_bytes(hybrid.pool).clone()
    present = np.ones((3, 2), dtype=np.bool_)
    ids = [[1, 2, 3, 4], [5, 6], [7, 8, 10, 11]]
    plan = engine.plan(Direction.STORE, ids, present)
    cost = engine.estimate(plan)
    page = 16 * 2 * 8
    assert cost.nbytes == 2 * 4 * page + 2 * 200 + 2 * 4 * page
    assert cost.num_blocks == 10
    assert cost.launches == 3
    # ids 1 2 | 3 4 and 7 8 | 10 11 join inside each chunk, in two layers each; states never adjoin
    assert cost.runs == 2 * 2 + 2 + 2 * 2
    skipped = engine.plan(Direction.RETRIEVE, ids, present, skip_tokens=32)
    assert engine.estimate(skipped).nbytes == 2 * 2 * page + 200 + 2 * 2 * page
    assert engine.estimate(engine.plan(Direction.STORE, ids, ~present)).launches == 0
    assert torch.equal(storage_bytes(hybrid.pool), before)


@pytest.mark.parametrize("layout", ["opaque", "token_major"])
def test_every_spec_ends_inside_its_object(layout: str) -> None:
    hybrid = Hybrid.build()
    engine = hybrid.engine("reference", object_layout=layout)
    for group in engine.layout.groups:
        for spec in engine.specs_of(group.kernel_group_index):
            last = (spec.blocks_per_object - 1) * spec.object_block_stride_bytes
            end = spec.region_offset_bytes + last + spec.object_extent_bytes
            assert end <= engine.object_nbytes(group.object_group)
