"""One rank's pool at the server: mapped, grouped, ready to be copied, and its key namespace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hma_triton.config import ServerConfig
from hma_triton.engine import TransferEngine
from hma_triton.errors import ConfigError, RemoteError
from hma_triton.kernels.addressing import CopySpec
from hma_triton.kernels.device import DeviceSettings
from hma_triton.keys import EngineFacts, KernelGroupKey, KeyFields, fingerprint
from hma_triton.kv_format import LayerPages
from hma_triton.messages import MAX_INFOS, ErrorCode, RegisterKVCache
from hma_triton.objects.namespace import NamespaceShape
from hma_triton.server.pinned_arena import PinnedArena
from hma_triton.tensor_ipc import ImportedCaches, device_of, import_kv_caches

IdArrays = list[npt.NDArray[np.int64]]


@dataclass(slots=True, eq=False)
class Registration:
    """A registered pool. `running` copies touch it; it is unmapped when it closes and they end."""

    instance_id: str
    rank: int
    world_size: int
    owner: bytes
    engine: TransferEngine
    caches: ImportedCaches
    fingerprint: bytes
    shape: NamespaceShape
    running: int = 0
    closing: bool = False
    when_closed: list[Callable[[], None]] = field(default_factory=list)

    @property
    def lane(self) -> tuple[str, int, int]:
        """Its lane in the copy pool; another registration of the same rank has another one."""
        return self.instance_id, self.rank, id(self)

    def needed_chunks(
        self, block_ids: IdArrays, num_chunks: int, skip_tokens: int
    ) -> npt.NDArray[np.bool_]:
        """[num_groups, num_chunks]: objects with a real id at or behind `skip_tokens`."""
        layout = self.engine.layout
        needed = np.zeros((self.shape.num_groups, num_chunks), dtype=np.bool_)
        for group, ids in zip(layout.groups, block_ids, strict=True):
            real = np.ones(ids.shape, dtype=np.bool_)
            if layout.null_block_id is not None:
                real = ids != layout.null_block_id
            real[: skip_tokens // group.tokens_per_block] = False
            needed[group.object_group] |= real.reshape(num_chunks, -1).any(axis=1)
        return needed

    def check_lengths(self, block_ids: IdArrays, num_chunks: int) -> None:
        """Raise ConfigError unless every list covers exactly `num_chunks` chunks."""
        groups = self.engine.layout.groups
        if len(block_ids) != len(groups):
            raise ConfigError(f"{len(block_ids)} block-id lists for {len(groups)} kernel groups")
        for index, (group, ids) in enumerate(zip(groups, block_ids, strict=True)):
            wanted = num_chunks * group.blocks_per_chunk
            if ids.shape[0] != wanted:
                raise ConfigError(
                    f"{ids.shape[0]} block ids for info {index}: {num_chunks} chunks of "
                    f"{self.shape.chunk_tokens} tokens take {wanted}"
                )

    def describe(self) -> dict[str, object]:
        """For the status view."""
        return {
            "instance_id": self.instance_id,
            "rank": self.rank,
            "world_size": self.world_size,
            "fingerprint": self.fingerprint.hex(),
            "backend": self.engine.backend,
            "pool_bytes": self.caches.nbytes,
            "chunk_tokens": self.shape.chunk_tokens,
            "object_groups": [
                {
                    "nbytes": nbytes,
                    "window_tokens": rule.window_tokens,
                    "recurrent": rule.recurrent,
                    "replicated": replicated,
                }
                for nbytes, rule, replicated in zip(
                    self.shape.object_nbytes, self.shape.rules, self.shape.replicated, strict=True
                )
            ],
            "running": self.running,
        }


def build_registration(
    request: RegisterKVCache, owner: bytes, config: ServerConfig, pinned: PinnedArena
) -> Registration:
    """Map the pool and make its engine; takes seconds when a copy path has to be compiled.

    Raises:
        HmaError: a pool, layout, group or setting that cannot be served, by name.
    """
    _check_infos(request)
    facts = EngineFacts.from_wire(request.facts)
    separate = request.separate_object_groups
    with ExitStack() as when_refused:
        caches = import_kv_caches(request.storages, request.kv_caches)
        when_refused.callback(caches.close)
        engine = TransferEngine(
            caches.kv_caches,
            request.engine_group_infos,
            layout_hints=request.layout_hints or None,
            chunk_tokens=request.chunk_tokens,
            separate_object_groups=(
                config.separate_object_groups if separate is None else separate
            ),
            object_layout=config.object_layout,
            backend=config.backend,
            null_block_id=request.null_block_id,
            threads=config.copier_threads,
            engine_type=request.engine_type,
            pinned_host=pinned.for_device(device_of(caches.kv_caches)),
            device_settings=DeviceSettings(program_cap=config.program_cap),
        )
        when_refused.callback(engine.close)
        shape = _shape_of(request, engine)
        registration = Registration(
            instance_id=request.instance_id,
            rank=request.rank,
            world_size=request.world_size,
            owner=owner,
            engine=engine,
            caches=caches,
            fingerprint=fingerprint(_key_fields(request, engine, shape, facts)),
            shape=shape,
        )
        when_refused.pop_all()
    return registration


def _check_infos(request: RegisterKVCache) -> None:
    """Raise ConfigError for numbers that could make this process work or take memory for nothing.

    Whether the infos fit the tensors is the manager's to say.
    """
    if request.rank >= request.world_size:
        raise ConfigError(f"rank {request.rank} of a world of {request.world_size}")
    layers, infos = len(request.kv_caches), request.engine_group_infos
    if any(position >= len(infos) for position in request.replicated_infos):
        raise ConfigError(f"replicated infos {request.replicated_infos}: {len(infos)} are there")
    for position, info in enumerate(infos):
        # engine groups are numbered densely, so none has a number beyond this
        if not 0 <= info.engine_group_id < MAX_INFOS:
            raise ConfigError(
                f"info {position}: engine group {info.engine_group_id}; groups are numbered from "
                f"0, and there are at most {MAX_INFOS}"
            )
        if len(info.layer_indices) > layers:
            raise ConfigError(
                f"info {position} names {len(info.layer_indices)} layers; {layers} are registered"
            )
        for name in ("tokens_per_block", "sw_size_tokens", "extra_object_group_tag"):
            value = getattr(info, name)
            if not -1 <= value < 1 << 31:
                raise ConfigError(
                    f"info {position}: {name} {value} is outside -1 to {(1 << 31) - 1}"
                )


def _shape_of(request: RegisterKVCache, engine: TransferEngine) -> NamespaceShape:
    groups = engine.manager.object_groups
    sizes = tuple(engine.object_nbytes(index) for index in range(len(groups)))
    replicated = set(request.replicated_infos)
    regions = []
    for size, group in zip(sizes, groups, strict=True):
        starts = [
            min(spec.region_offset_bytes for spec in engine.specs_of(kernel))
            for kernel in group.kernel_group_indices
        ]
        ends = [*starts[1:], size]
        regions.append(tuple((start, end - start) for start, end in zip(starts, ends, strict=True)))
    return NamespaceShape(
        rules=engine.layout.rules,
        object_nbytes=sizes,
        replicated=tuple(
            all(kernel in replicated for kernel in group.kernel_group_indices) for group in groups
        ),
        world_size=request.world_size,
        chunk_tokens=engine.chunk_tokens,
        regions=tuple(regions),
    )


def _key_fields(
    request: RegisterKVCache, engine: TransferEngine, shape: NamespaceShape, facts: EngineFacts
) -> KeyFields:
    names = tuple(layer.name for layer in request.kv_caches)
    kernel_groups = []
    for index, info in enumerate(engine.manager.kernel_groups):
        desc = info.shape_desc
        kv_format = info.engine_kv_format
        kernel_groups.append(
            KernelGroupKey(
                layer_names=tuple(names[layer] for layer in info.layer_indices),
                kv_size=desc.kv_size,
                num_heads=desc.nh,
                head_size=desc.hs,
                slots_per_block=info.slots_per_block,
                engine_group_idx=info.engine_group_idx,
                dtype=str(info.dtype),
                engine_kv_format="" if kv_format is None else kv_format.name,
                tokens_per_block=info.tokens_per_block,
                window_tokens=info.window_tokens,
                recurrent=info.recurrent_state,
                page_bytes=info.layer_page_bytes,
                page_strides=_page_strides(engine.manager.layer_pages(index)[0]),
                object_runs=tuple(_object_runs(spec) for spec in engine.specs_of(index)),
            )
        )
    return KeyFields(
        model_name=request.model_name,
        facts=facts,
        world_size=request.world_size,
        engine_type=request.engine_type,
        layout_hints=request.layout_hints,
        layer_names=names,
        kernel_groups=tuple(kernel_groups),
        object_groups=tuple(
            tuple(group.kernel_group_indices) for group in engine.manager.object_groups
        ),
        replicated_object_groups=tuple(
            index for index, replicated in enumerate(shape.replicated) if replicated
        ),
        object_nbytes=shape.object_nbytes,
        object_layout=engine.object_layout.value,
        chunk_tokens=shape.chunk_tokens,
        namespace=request.namespace,
    )


def _page_strides(pages: LayerPages) -> tuple[tuple[int, int], ...]:
    return tuple(
        (
            plane.slot_stride_bytes if pages.num_slots > 1 else 0,
            plane.head_stride_bytes if pages.num_heads > 1 else 0,
        )
        for plane in pages.planes
    )


def _object_runs(spec: CopySpec) -> tuple[int, ...]:
    return (
        spec.region_offset_bytes,
        spec.num_rows,
        spec.object_row_stride_bytes,
        spec.blocks_per_object,
        spec.object_block_stride_bytes,
        spec.n0,
        spec.object_stride0_bytes,
        spec.n1,
        spec.object_stride1_bytes,
        spec.run_bytes,
    )


class RegistrationTable:
    """Registrations by instance and rank. All ranks of an instance must agree."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._instances: dict[str, dict[int, Registration]] = {}

    def __len__(self) -> int:
        return sum(len(ranks) for ranks in self._instances.values())

    def all(self) -> list[Registration]:
        """Every registration."""
        instances = list(self._instances.values())
        return [found for ranks in instances for found in list(ranks.values())]

    def check_room(self, request: RegisterKVCache) -> None:
        """Raise RemoteError when another registration would be one too many."""
        replaces = request.rank in self._instances.get(request.instance_id, {})
        if not replaces and len(self) >= self._limit:
            raise RemoteError(
                f"{len(self)} pools are registered, the server's --max-registrations is "
                f"{self._limit}: raise it to serve instance {request.instance_id!r} rank "
                f"{request.rank}",
                ErrorCode.TOO_MANY_REGISTRATIONS.value,
            )

    def add(self, registration: Registration) -> Registration | None:
        """Enter it; gives the one it replaces.

        Raises:
            ConfigError: another rank of the instance differs in what must be equal.
        """
        ranks = self._instances.get(registration.instance_id, {})
        for rank, other in ranks.items():
            if rank == registration.rank:
                continue
            if other.world_size != registration.world_size:
                raise ConfigError(
                    f"instance {registration.instance_id!r}: rank {registration.rank} says world "
                    f"size {registration.world_size}, rank {rank} said {other.world_size}"
                )
            if other.fingerprint != registration.fingerprint:
                raise ConfigError(
                    f"instance {registration.instance_id!r}: rank {registration.rank} has another "
                    f"key fingerprint than rank {rank}: all ranks need the same layers, layouts "
                    "and settings (pipeline parallel ranks cannot share an instance)"
                )
        ranks = self._instances.setdefault(registration.instance_id, {})
        replaced = ranks.get(registration.rank)
        ranks[registration.rank] = registration
        return replaced

    def get(self, instance_id: str, rank: int) -> Registration | None:
        """The registration, if it is there."""
        return self._instances.get(instance_id, {}).get(rank)

    def ranks(self, instance_id: str) -> dict[int, Registration]:
        """Registrations of an instance by rank."""
        return self._instances.get(instance_id, {})

    def remove(self, registration: Registration) -> None:
        """Forget it, unless another one has taken its place."""
        ranks = self._instances.get(registration.instance_id, {})
        if ranks.get(registration.rank) is registration:
            del ranks[registration.rank]
            if not ranks:
                del self._instances[registration.instance_id]
