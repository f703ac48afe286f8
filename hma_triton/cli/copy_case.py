"""What `bench copy` measures: the pools of a model or shape, a request's blocks, its objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.engine import TransferEngine
from hma_triton.errors import ConfigError
from hma_triton.geometries import build_pool, load_geometry
from hma_triton.group_view import EngineGroupInfo, engine_group_layer_indices
from hma_triton.kernels.addressing import CopySpec, Int64Array
from hma_triton.kv_format import EngineKVFormat
from hma_triton.kv_layer_groups import KernelGroupInfo, PageBufferShapeDesc
from hma_triton.layout_hints import LayoutHints, hints_with_blocks
from hma_triton.plan import choose_chunk_tokens, plan_store
from hma_triton.shape_spec import parse_kvcache_shape_spec
from hma_triton.units import align_up, cdiv

# The smallest request that the marks speak of; below it the last-level cache takes part.
DEFAULT_REQUEST_BYTES = 128 << 20
_ALIGN_BYTES = 4096
_SEED = 20261129


@dataclass(frozen=True, slots=True)
class Registration:
    """Caches as a worker registers them."""

    kv_caches: Mapping[str, torch.Tensor]
    infos: tuple[EngineGroupInfo, ...]
    hints: LayoutHints


@dataclass(frozen=True, slots=True)
class RequestSize:
    """Length of the measured request: `tokens` if given, else as many as make `nbytes`."""

    tokens: int | None = None
    nbytes: int = DEFAULT_REQUEST_BYTES

    def chunks(self, case: str, chunk_tokens: int, chunk_bytes: int) -> int:
        """Whole chunks of the request.

        Raises:
            ConfigError: fewer tokens than a chunk.
        """
        if self.tokens is None:
            return cdiv(self.nbytes, chunk_bytes)
        if self.tokens < chunk_tokens:
            raise ConfigError(
                f"{self.tokens} tokens are less than one chunk of {case}: {chunk_tokens} tokens"
            )
        return self.tokens // chunk_tokens


# Makes the pools for a number of block ids.
Register = Callable[[int], Registration]


@dataclass(frozen=True, slots=True)
class GroupCopy:
    """The blocks of one kernel group that a request moves.

    `blocks` pairs each copy spec with ids [n] and object addresses [n]; `objects` are the group's
    regions, one uint8 tensor per chunk.
    """

    kernel_group_index: int
    block_ids: Int64Array
    blocks: tuple[tuple[CopySpec, Int64Array, Int64Array], ...]
    objects: tuple[torch.Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that one direction moves."""
        return sum(ids.shape[0] * spec.block_bytes for spec, ids, _ in self.blocks)


@dataclass(frozen=True, slots=True)
class CopyCase:
    """Everything that one request touches; all memory is written before it is measured."""

    name: str
    engine: TransferEngine
    # each layer's cache with its axes in the order of its format
    layers: tuple[torch.Tensor, ...]
    num_tokens: int
    # one list per info, and per object group the addresses of its objects
    block_ids: tuple[Int64Array, ...]
    object_addresses: tuple[Int64Array, ...]
    groups: tuple[GroupCopy, ...]
    # all pools, and all objects, as flat bytes: the two sides of the plain copy
    pool: torch.Tensor
    arena: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the whole request."""
        return sum(group.nbytes for group in self.groups)

    def info(self, kernel_group_index: int) -> KernelGroupInfo:
        """The kernel group's description."""
        return self.engine.manager.kernel_groups[kernel_group_index]

    def format_name(self, kernel_group_index: int) -> str:
        """Name of the format that was detected."""
        found = self.info(kernel_group_index).engine_kv_format
        return "" if found is None else found.name


def model_registration(name: str, variant: str, num_blocks: int) -> Registration:
    """The pools of a known model with `num_blocks` block ids.

    Raises:
        ConfigError: no such model or variant.
        GeometryError: a variant that cannot be served.
    """
    return Registration(*build_pool(load_geometry(name, variant), num_blocks))


def shape_registration(spec: str, num_blocks: int) -> Registration:
    """Pools for `(kv_size,NB,BS,NH,HS):dtype:layers;...`, each group an engine group of its own.

    Keys and values as `[2, NB, BS, NH, HS]`, one plane as `[NB, BS, NH, HS]`, one plane of one
    head as `[NB, BS, HS]`. `num_blocks` stands for every NB.
    """
    groups = parse_kvcache_shape_spec(spec)
    axes = [_axes(group.shape_desc, num_blocks) for group in groups]
    sizes = [
        math.prod(shape) * group.shape_desc.element_size
        for group, (shape, _) in zip(groups, axes, strict=True)
    ]
    steps = [align_up(size, _ALIGN_BYTES) for size in sizes]
    counts = [len(group.layer_indices) for group in groups]
    # one storage under all layers, as engines have it
    flat = torch.zeros(sum(map(math.prod, zip(steps, counts, strict=True))), dtype=torch.uint8)
    caches: dict[str, torch.Tensor] = {}
    formats: list[str] = []
    infos = []
    start = 0
    for index, (group, (shape, fmt)) in enumerate(zip(groups, axes, strict=True)):
        for layer in group.layer_indices:
            held = flat[start : start + sizes[index]]
            caches[f"layers.{layer}"] = held.view(group.dtype).view(shape)
            formats.append(fmt.name)
            start += steps[index]
        infos.append(EngineGroupInfo(index, group.layer_indices, group.shape_desc.bs))
    return Registration(caches, tuple(infos), LayoutHints(formats=tuple(formats)))


def _axes(shape: PageBufferShapeDesc, num_blocks: int) -> tuple[tuple[int, ...], EngineKVFormat]:
    if shape.kv_size == 2:
        return (2, num_blocks, shape.bs, shape.nh, shape.hs), EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
    if shape.nh == 1:
        return (num_blocks, shape.bs, shape.hs), EngineKVFormat.NL_X_NB_BS_HS
    return (num_blocks, shape.bs, shape.nh, shape.hs), EngineKVFormat.NL_X_NB_BS_NH_HS


def chunk_tokens_of(infos: tuple[EngineGroupInfo, ...]) -> int:
    """The chunk that the connector would choose."""
    blocks = [info.tokens_per_block for info in infos]
    return choose_chunk_tokens(blocks, any(info.recurrent_state for info in infos))


def make_case(
    name: str, register: Register, size: RequestSize, threads: int, object_layout: str
) -> CopyCase:
    """Pools that hold one request, its blocks in random order.

    Raises:
        ConfigError: a request shorter than a chunk.
    """
    probe = register(2)
    chunk = chunk_tokens_of(probe.infos)
    engine = _engine(probe, chunk, 1, object_layout)
    groups = range(len(engine.manager.object_groups))
    chunks = size.chunks(name, chunk, sum(engine.object_nbytes(group) for group in groups))
    group_blocks = {
        info.engine_group_id: chunks * chunk // info.tokens_per_block for info in probe.infos
    }
    # groups lie over each other, so a block id belongs to one of them; 0 is the null block
    num_blocks = sum(group_blocks.values()) + 1
    registration = register(num_blocks)
    pool = _fill(registration.kv_caches)
    order = np.random.default_rng(_SEED).permutation(num_blocks - 1).astype(np.int64) + 1
    ends = np.cumsum(list(group_blocks.values()))
    ids = dict(zip(group_blocks, np.split(order, ends[:-1]), strict=True))
    engine = _engine(registration, chunk, threads, object_layout)
    arena, addresses, objects = _objects(engine, chunks)
    block_ids = tuple(ids[info.engine_group_id] for info in registration.infos)
    return CopyCase(
        name=name,
        engine=engine,
        layers=_layers(registration),
        num_tokens=chunks * chunk,
        block_ids=block_ids,
        object_addresses=addresses,
        groups=_group_copies(engine, block_ids, addresses, objects),
        pool=pool,
        arena=arena,
    )


def _engine(
    registration: Registration, chunk_tokens: int, threads: int, object_layout: str
) -> TransferEngine:
    return TransferEngine(
        registration.kv_caches,
        registration.infos,
        layout_hints=registration.hints,
        chunk_tokens=chunk_tokens,
        object_layout=object_layout,
        backend="cpu",
        threads=threads,
    )


def _layers(registration: Registration) -> tuple[torch.Tensor, ...]:
    layers, _ = normalize_and_discover_per_layer_formats(
        registration.kv_caches,
        engine_group_layer_indices(registration.infos),
        "vllm",
        hints_with_blocks(registration.hints, registration.infos, registration.kv_caches),
    )
    return tuple(layers)


def _fill(kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Write all storages with noise; the longest of them, as bytes."""
    noise = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    flats = {}
    for tensor in kv_caches.values():
        storage = tensor.untyped_storage()
        flats[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    for flat in flats.values():
        for start in range(0, flat.numel(), noise.numel()):
            end = min(start + noise.numel(), flat.numel())
            flat[start:end].copy_(noise[: end - start])
    return max(flats.values(), key=lambda flat: flat.numel())


def _objects(
    engine: TransferEngine, chunks: int
) -> tuple[torch.Tensor, tuple[Int64Array, ...], tuple[tuple[torch.Tensor, ...], ...]]:
    """One written arena, and per object group the addresses and bytes of its objects."""
    sizes = [engine.object_nbytes(group) for group in range(len(engine.manager.object_groups))]
    steps = [align_up(size, _ALIGN_BYTES) for size in sizes]
    raw = torch.zeros(sum(steps) * chunks + _ALIGN_BYTES, dtype=torch.uint8)
    raw.fill_(1)
    arena = raw[-raw.data_ptr() % _ALIGN_BYTES :]
    addresses, objects, start = [], [], 0
    for size, step in zip(sizes, steps, strict=True):
        places = start + step * np.arange(chunks, dtype=np.int64)
        addresses.append(places + arena.data_ptr())
        objects.append(tuple(arena[place : place + size] for place in places.tolist()))
        start += step * chunks
    return arena, tuple(addresses), tuple(objects)


def _group_copies(
    engine: TransferEngine,
    block_ids: tuple[Int64Array, ...],
    addresses: tuple[Int64Array, ...],
    objects: tuple[tuple[torch.Tensor, ...], ...],
) -> tuple[GroupCopy, ...]:
    """The request as the engine plans it, apart by kernel group."""
    chunks = len(addresses[0])
    wanted = np.ones((len(addresses), chunks), dtype=np.bool_)
    copies = []
    for group in plan_store(engine.layout, list(block_ids), wanted).groups:
        specs = engine.specs_of(group.kernel_group_index)
        bases = addresses[group.object_group][group.chunk_indices]
        start = min(spec.region_offset_bytes for spec in specs)
        kept = engine.layout.groups[group.kernel_group_index].kept_blocks
        size = kept * sum(spec.block_bytes for spec in specs)
        copies.append(
            GroupCopy(
                kernel_group_index=group.kernel_group_index,
                block_ids=group.block_ids,
                blocks=tuple(
                    (
                        spec,
                        group.block_ids,
                        bases
                        + spec.region_offset_bytes
                        + group.kept_indices * spec.object_block_stride_bytes,
                    )
                    for spec in specs
                ),
                objects=tuple(held[start : start + size] for held in objects[group.object_group]),
            )
        )
    return tuple(copies)
