"""The numbers of an inspection: groups, what a block and a token cost, and where bytes lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hma_triton.cli.inspect_subject import Registered, Subject
from hma_triton.detection import normalize_and_discover_per_layer_formats
from hma_triton.group_view import engine_group_layer_indices
from hma_triton.integration.vllm.kv_cache_groups import VllmGroup, describe_groups
from hma_triton.integration.vllm.kv_cache_specs import groups_of, leaf_specs, spec_kind
from hma_triton.kv_layer_groups import KernelGroupInfo, KVLayerGroupsManager
from hma_triton.plan import choose_chunk_tokens, kept_blocks


@dataclass(frozen=True, slots=True)
class EngineGroupRow:
    """One engine group; ``block_bytes`` are the live bytes of one block id."""

    engine_group: int
    kind: str
    num_layers: int
    tokens_per_block: int
    window_tokens: int | None
    recurrent: bool
    cacheable: bool
    block_bytes: int


@dataclass(frozen=True, slots=True)
class KernelGroupRow:
    """One kernel group; ``edit`` says what was done to its caches before registration."""

    kernel_group: int
    engine_group: int
    num_layers: int
    layers: tuple[str, ...]
    format: str
    planes: int
    heads: int
    head_size: int
    dtype: str
    slots_per_block: int
    tokens_per_block: int
    block_bytes: int
    bytes_per_token: float
    edit: str


@dataclass(frozen=True, slots=True)
class ObjectGroupRow:
    """One object group and the bytes of one object of it."""

    object_group: int
    kernel_groups: tuple[int, ...]
    window_tokens: int | None
    recurrent: bool
    object_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """All of an inspection.

    ``pool_block_bytes`` is what one block id takes of the pool that all groups share; None for a
    shape spec, whose groups share none.
    """

    title: str
    platform: str
    layout: str
    chunk_tokens: int
    chunk_bytes: int
    bytes_per_token: float
    pool_block_bytes: int | None
    engine_groups: tuple[EngineGroupRow, ...]
    kernel_groups: tuple[KernelGroupRow, ...]
    object_groups: tuple[ObjectGroupRow, ...]
    excluded_layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LayerLook:
    """Shape and strides of layers that look alike, for explaining a refusal."""

    kind: str
    layers: tuple[str, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def build_report(subject: Subject, chunk_tokens: int | None) -> Report:
    """Everything that a registration of the subject's caches would have.

    Raises:
        GeometryError: caches or a chunk that cannot be served.
    """
    registered = subject.register()
    infos = registered.infos
    caches, formats = normalize_and_discover_per_layer_formats(
        registered.kv_caches, engine_group_layer_indices(infos), "vllm", registered.layout_hints
    )
    chunk = chunk_tokens or choose_chunk_tokens(
        [info.tokens_per_block for info in infos], any(info.recurrent_state for info in infos)
    )
    manager = KVLayerGroupsManager(caches, formats, infos, chunk, separate_object_groups=True)
    names = tuple(registered.kv_caches)
    kernel_rows = tuple(
        _kernel_row(index, group, names, registered)
        for index, group in enumerate(manager.kernel_groups)
    )
    object_rows = _object_rows(manager)
    is_engine = subject.kv_cache_config is not None
    covered = {layer for group in manager.kernel_groups for layer in group.layer_indices}
    return Report(
        title=subject.title,
        platform=subject.platform,
        layout=subject.layout,
        chunk_tokens=chunk,
        chunk_bytes=sum(row.object_bytes for row in object_rows),
        bytes_per_token=sum(row.bytes_per_token for row in kernel_rows),
        pool_block_bytes=subject.pool_bytes // subject.num_blocks if is_engine else None,
        engine_groups=_engine_rows(subject, kernel_rows),
        kernel_groups=kernel_rows,
        object_groups=object_rows,
        excluded_layers=tuple(n for i, n in enumerate(names) if i not in covered),
    )


def _kernel_row(
    index: int, group: KernelGroupInfo, names: Sequence[str], registered: Registered
) -> KernelGroupRow:
    desc, edits = group.shape_desc, registered.layout_hints.edits
    return KernelGroupRow(
        kernel_group=index,
        engine_group=group.engine_group_idx,
        num_layers=group.num_layers,
        layers=tuple(names[layer] for layer in group.layer_indices),
        format=group.engine_kv_format.name if group.engine_kv_format is not None else "",
        planes=desc.kv_size,
        heads=desc.nh,
        head_size=desc.hs,
        dtype=str(group.dtype).removeprefix("torch."),
        slots_per_block=group.slots_per_block,
        tokens_per_block=group.tokens_per_block,
        block_bytes=group.block_bytes,
        bytes_per_token=group.block_bytes / group.tokens_per_block,
        edit=edits[group.layer_indices[0]] if edits else "",
    )


def _object_rows(manager: KVLayerGroupsManager) -> tuple[ObjectGroupRow, ...]:
    rows = []
    for index, members in enumerate(manager.object_groups):
        groups = [manager.kernel_groups[i] for i in members.kernel_group_indices]
        rows.append(
            ObjectGroupRow(
                object_group=index,
                kernel_groups=members.kernel_group_indices,
                window_tokens=members.window_tokens,
                recurrent=members.recurrent,
                object_bytes=sum(_kept_bytes(g, manager.chunk_tokens) for g in groups),
            )
        )
    return tuple(rows)


def _kept_bytes(group: KernelGroupInfo, chunk_tokens: int) -> int:
    """Live bytes of a chunk that its object keeps."""
    blocks = kept_blocks(
        group.tokens_per_block, group.window_tokens, group.recurrent_state, chunk_tokens
    )
    return blocks * group.block_bytes


def _engine_rows(
    subject: Subject, kernel_rows: Sequence[KernelGroupRow]
) -> tuple[EngineGroupRow, ...]:
    live: dict[int, int] = {}
    for row in kernel_rows:
        live[row.engine_group] = live.get(row.engine_group, 0) + row.block_bytes
    if subject.kv_cache_config is None:
        return tuple(
            EngineGroupRow(
                row.engine_group,
                "shape spec",
                row.num_layers,
                row.tokens_per_block,
                None,
                False,
                True,
                row.block_bytes,
            )
            for row in kernel_rows
        )
    specs = groups_of(subject.kv_cache_config)
    return tuple(
        _engine_row(group, specs[group.engine_group_id], live.get(group.engine_group_id, 0))
        for group in describe_groups(subject.kv_cache_config)
    )


def _engine_row(group: VllmGroup, declared: Any, block_bytes: int) -> EngineGroupRow:
    kinds = dict.fromkeys(spec_kind(leaf) for leaf in leaf_specs(declared.kv_cache_spec))
    return EngineGroupRow(
        engine_group=group.engine_group_id,
        kind=" + ".join(kinds),
        num_layers=len(group.layer_names),
        tokens_per_block=group.tokens_per_block,
        window_tokens=group.window_tokens,
        recurrent=group.is_recurrent,
        cacheable=group.is_cacheable,
        block_bytes=block_bytes,
    )


def layer_looks(subject: Subject) -> tuple[LayerLook, ...]:
    """The registered caches as they are, those that look alike together."""
    kinds: dict[str, str] = {}
    for index, group in enumerate(groups_of(subject.kv_cache_config)):
        for leaf in leaf_specs(group.kv_cache_spec):
            kinds.update(dict.fromkeys(group.layer_names, f"group {index}: {spec_kind(leaf)}"))
    alike: dict[tuple[Any, ...], list[str]] = {}
    for name, cache in subject.raw_caches.items():
        look = (kinds.get(name, "in no group"), tuple(cache.shape), tuple(cache.stride()))
        alike.setdefault((*look, str(cache.dtype).removeprefix("torch.")), []).append(name)
    return tuple(
        LayerLook(kind, tuple(names), shape, strides, dtype)
        for (kind, shape, strides, dtype), names in alike.items()
    )


def caches_to_draw(subject: Subject, report: Report | None) -> Mapping[str, torch.Tensor]:
    """Edited caches when they can be served, else the caches as registered."""
    return subject.register().kv_caches if report is not None else subject.raw_caches
