"""Stage `correctness`: every known geometry, bit for bit, by every path, against the CPU's copy."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hma_triton.cli.gpu_stage import StageContext, StageReport, noise
from hma_triton.cuda_driver import CudaDriver
from hma_triton.engine import TransferEngine
from hma_triton.errors import GeometryError, HmaError
from hma_triton.geometries import (
    Geometry,
    build_pool,
    list_geometries,
    list_variants,
    load_geometry,
)
from hma_triton.group_view import EngineGroupInfo
from hma_triton.host_memory import HostMemory, PinnedHost
from hma_triton.kernels.addressing import Int64Array, ObjectLayout
from hma_triton.kernels.device import DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.plan import choose_chunk_tokens
from hma_triton.torch_driver import open_driver
from hma_triton.units import align_up

POISON = 0xEE
_LARGE_CHUNK_BYTES = 256 << 20
_MARGIN_BYTES = 4096
_KEEP_EVERY = 8


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of one model, with its objects in one layout."""

    model: str
    variant: str
    object_layout: ObjectLayout

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.model}/{self.variant}/{self.object_layout.value}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case. `wrong` is empty when every byte was right; `paths` were taken."""

    name: str
    nbytes: int
    seconds: float
    paths: tuple[str, ...]
    wrong: tuple[str, ...]
    refused: str = ""


def cases() -> list[Case]:
    """Every variant of every model in every object layout."""
    return [
        Case(model, variant, layout)
        for model in list_geometries()
        for variant in list_variants(model)
        for layout in ObjectLayout
    ]


@dataclass(slots=True)
class Request:
    """A geometry's pool and the ids of a request over it; block 0 is the null block."""

    geometry: Geometry
    num_blocks: int
    chunk_tokens: int
    num_chunks: int
    ids: dict[int, Int64Array]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the one storage."""
        return self.geometry.bytes_per_block * self.num_blocks

    def block_ids(self, infos: tuple[EngineGroupInfo, ...]) -> list[Int64Array]:
        """One list per info."""
        return [self.ids[info.engine_group_id] for info in infos]


def make_request(case: Case) -> Request:
    """Two chunks (one where a chunk is large), blocks in random order, each in one group.

    Raises:
        GeometryError: a variant that cannot be served.
    """
    geometry = load_geometry(case.model, case.variant)
    _, infos, _ = build_pool(geometry, 2, "meta")
    chunk = choose_chunk_tokens(
        [info.tokens_per_block for info in infos], any(info.recurrent_state for info in infos)
    )
    blocks = {info.engine_group_id: chunk // info.tokens_per_block for info in infos}
    chunks = 1 if sum(blocks.values()) * geometry.bytes_per_block > _LARGE_CHUNK_BYTES else 2
    total = chunks * sum(blocks.values())
    order = np.random.default_rng(0).permutation(total).astype(np.int64) + 1
    ends = np.cumsum([chunks * count for count in blocks.values()])
    ids = dict(zip(blocks, np.split(order, ends[:-1]), strict=True))
    return Request(geometry, total + 1, chunk, chunks, ids)


def _kept(engine: TransferEngine, ids: list[Int64Array]) -> list[Int64Array]:
    """`ids` as an engine gives them for a retrieve: null where a window keeps nothing."""
    kept = []
    for group, blocks in zip(engine.layout.groups, ids, strict=True):
        table = blocks.reshape(-1, group.blocks_per_chunk).copy()
        table[:, : group.blocks_per_chunk - group.kept_blocks] = 0
        kept.append(table.reshape(-1))
    return kept


def _flat(caches: Mapping[str, Any]) -> torch.Tensor:
    """The one storage under `caches`, as bytes."""
    first = next(iter(caches.values()))
    tensor = first if isinstance(first, torch.Tensor) else first[0]
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


class _Objects:
    """Objects in host memory with poison between and behind them."""

    def __init__(self, engine: TransferEngine, num_chunks: int) -> None:
        sizes = [engine.object_nbytes(g) for g in range(len(engine.manager.object_groups))]
        steps = [align_up(size + 1, 64) for size in sizes]
        self.offsets: list[Int64Array] = []
        end = _MARGIN_BYTES
        for step in steps:
            self.offsets.append(end + step * np.arange(num_chunks, dtype=np.int64))
            end += step * num_chunks
        self.nbytes = end + _MARGIN_BYTES

    def at(self, address: int) -> list[Int64Array]:
        """Addresses of the objects when their memory starts at `address`."""
        return [offsets + address for offsets in self.offsets]


def check_case(case: Case, device: torch.device, driver: CudaDriver) -> Outcome:
    """Store and retrieve by every path; pools, objects and what lies between compared whole.

    Raises:
        GeometryError: a variant that cannot be served.
    """
    started = time.perf_counter()
    request = make_request(case)
    caches, infos, hints = build_pool(request.geometry, request.num_blocks)
    settings: dict[str, Any] = {
        "layout_hints": hints,
        "chunk_tokens": request.chunk_tokens,
        "object_layout": case.object_layout.value,
    }
    host = TransferEngine(caches, infos, backend="cpu", **settings)
    pool, ids = _flat(caches), request.block_ids(infos)
    contents = noise(pool.numel(), seed=1)
    objects = _Objects(host, request.num_chunks)
    stored = torch.full((objects.nbytes,), POISON, dtype=torch.uint8)
    pool.copy_(contents)
    nbytes = host.store_addresses(ids, objects.at(stored.data_ptr())).nbytes
    pool.fill_(POISON)
    kept_ids = _kept(host, ids)
    host.retrieve_addresses(kept_ids, objects.at(stored.data_ptr()))
    device_caches, _, _ = build_pool(request.geometry, request.num_blocks, device)
    device_pool = _flat(device_caches)
    memory = HostMemory(objects.nbytes)
    pinned = PinnedHost(driver, memory.address, memory.pieces)
    arena = torch.frombuffer(memory.buffer, dtype=torch.uint8)[: objects.nbytes]
    wrong: list[str] = []
    taken: set[str] = set()
    try:
        for path in Path:
            engine = TransferEngine(
                device_caches,
                infos,
                backend="device",
                pinned_host=pinned,
                device_settings=DeviceSettings(path),
                **settings,
            )
            arena.fill_(POISON)
            device_pool.copy_(contents)
            result = engine.store_addresses(ids, objects.at(memory.address))
            wrong += _difference(f"{path.value} store, objects", arena, stored)
            wrong += _difference(f"{path.value} store, pool", device_pool.cpu(), contents)
            taken.update(f"store:{report.path.value}" for report in result.paths)
            arena.copy_(stored)
            device_pool.fill_(POISON)
            result = engine.retrieve_addresses(kept_ids, objects.at(memory.address))
            wrong += _difference(f"{path.value} retrieve, pool", device_pool.cpu(), pool)
            taken.update(f"retrieve:{report.path.value}" for report in result.paths)
            engine.close()
    finally:
        del arena
        pinned.close()
        memory.close()
    seconds = time.perf_counter() - started
    return Outcome(case.name, nbytes, seconds, tuple(sorted(taken)), tuple(wrong))


def _difference(what: str, found: torch.Tensor, expected: torch.Tensor) -> list[str]:
    if torch.equal(found, expected):
        return []
    places = (found != expected).nonzero()
    first = int(places[0])
    return [
        f"{what}: {places.shape[0]} of {expected.numel()} bytes differ, the first at {first}: "
        f"{int(found[first]):#04x} for {int(expected[first]):#04x}"
    ]


def _worker(case: Case, device_index: int, deadline: float) -> Outcome | None:
    """A case in a process of the pool; None when there was no time left for it."""
    if time.monotonic() > deadline:
        return None
    torch.set_num_threads(1)
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    try:
        return check_case(case, device, open_driver(device_index))
    except GeometryError as error:
        return Outcome(case.name, 0, 0.0, (), (), refused=str(error))
    except (HmaError, RuntimeError) as error:
        return Outcome(case.name, 0, 0.0, (), (f"{type(error).__name__}: {error}",))


def _outcomes(context: StageContext, todo: list[Case]) -> Iterator[tuple[Case, Outcome | None]]:
    processes = max(1, min(8, (os.cpu_count() or 2) - 1))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        futures = [
            (case, pool.submit(_worker, case, context.device_index, context.deadline))
            for case in todo
        ]
        for case, future in futures:
            yield case, future.result()


def run(context: StageContext) -> StageReport:
    """All cases, several processes at once, until the deadline."""
    context.driver()
    todo = cases()
    done: list[Outcome] = []
    late: list[str] = []
    for case, outcome in _outcomes(context, todo):
        if outcome is None:
            late.append(case.name)
            continue
        done.append(outcome)
        if len(done) % _KEEP_EVERY == 0:
            context.keep(_report(done, [], len(todo)))
    return _report(done, late, len(todo))


def _report(done: list[Outcome], late: list[str], total: int) -> StageReport:
    report = StageReport()
    right = [o for o in done if not o.wrong and not o.refused]
    for outcome in done:
        for text in outcome.wrong:
            report.expect(False, f"{outcome.name}: {text}")
    report.expect(bool(right), "no case was right")
    refused = [o for o in done if o.refused]
    report.lines.append(
        f"{len(right)} cases right, {sum(bool(o.wrong) for o in done)} wrong, {len(refused)} "
        f"variants refused by name, {sum(o.nbytes for o in right) / 1e9:.1f} GB each way and path"
    )
    if late:
        report.missing.append(f"{len(late)} of {total} cases: no time left ({late[0]} ...)")
    report.data = {
        "cases": [
            {
                "name": o.name,
                "nbytes": o.nbytes,
                "seconds": round(o.seconds, 3),
                "paths": list(o.paths),
                "wrong": list(o.wrong),
                "refused": o.refused,
            }
            for o in done
        ],
        "late": late,
    }
    return report
