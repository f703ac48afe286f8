"""From groups to what planning and copying need: block counts, reuse rules, copy specs, sizes."""

from __future__ import annotations

from dataclasses import dataclass

from hma_triton.kernels.addressing import (
    CopySpec,
    ObjectLayout,
    build_region,
    merge_adjacent,
    next_region_offset,
)
from hma_triton.kv_layer_groups import KVLayerGroupsManager
from hma_triton.plan import PlanGroup, PlanLayout, ReuseRule, TransferPlan, kept_blocks


@dataclass(frozen=True, slots=True)
class CopyLayout:
    """One registration, laid out. `specs[k]` belong to kernel group k, `object_nbytes[g]` to
    object group g."""

    plan: PlanLayout
    specs: tuple[tuple[CopySpec, ...], ...]
    object_nbytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TransferEstimate:
    """What a plan costs. `runs`: pieces contiguous on both sides, neighbouring blocks merged;
    `launches`: one for each copy spec that moves something."""

    nbytes: int
    num_blocks: int
    runs: int
    launches: int


def estimate(plan: TransferPlan, layout: CopyLayout) -> TransferEstimate:
    """Bytes, runs and launches of `plan`, from the layout alone."""
    nbytes = runs = launches = 0
    for group in plan.groups:
        if not group.block_ids.size:
            continue
        for spec in layout.specs[group.kernel_group_index]:
            # chunks are objects of their own and never adjoin
            step = layout.object_nbytes[group.object_group] + spec.run_bytes
            places = group.chunk_indices * step
            places = places + group.kept_indices * spec.object_block_stride_bytes
            firsts, _, _ = merge_adjacent(spec, group.block_ids, places)
            nbytes += group.block_ids.shape[0] * spec.block_bytes
            runs += firsts.shape[0] * spec.num_rows * spec.n0 * spec.n1
            launches += 1
    return TransferEstimate(nbytes, plan.num_blocks, runs, launches)


def lay_out(
    manager: KVLayerGroupsManager, object_layout: ObjectLayout, null_block_id: int | None
) -> CopyLayout:
    """Lay out the objects of `manager`'s groups.

    Raises:
        UnsupportedLayoutError: pages with interior padding.
    """
    plan = _plan_layout(manager, null_block_id)
    specs, sizes = _build_specs(manager, plan, object_layout)
    return CopyLayout(plan, specs, sizes)


def _plan_layout(manager: KVLayerGroupsManager, null_block_id: int | None) -> PlanLayout:
    """What planning needs of the manager's groups."""
    chunk_tokens = manager.chunk_tokens
    object_group_of = {
        kernel: index
        for index, group in enumerate(manager.object_groups)
        for kernel in group.kernel_group_indices
    }
    groups = []
    for index, info in enumerate(manager.kernel_groups):
        groups.append(
            PlanGroup(
                kernel_group_index=index,
                engine_group_idx=info.engine_group_idx,
                object_group=object_group_of[index],
                tokens_per_block=info.tokens_per_block,
                num_blocks=info.shape_desc.nb,
                blocks_per_chunk=chunk_tokens // info.tokens_per_block,
                kept_blocks=kept_blocks(
                    info.tokens_per_block, info.window_tokens, info.recurrent_state, chunk_tokens
                ),
            )
        )
    rules = tuple(
        ReuseRule(window_tokens=group.window_tokens, recurrent=group.recurrent)
        for group in manager.object_groups
    )
    return PlanLayout(chunk_tokens, null_block_id, tuple(groups), rules)


def _build_specs(
    manager: KVLayerGroupsManager, layout: PlanLayout, object_layout: ObjectLayout
) -> tuple[tuple[tuple[CopySpec, ...], ...], tuple[int, ...]]:
    """Copy specs per kernel group, and the bytes of one object per object group."""
    specs: dict[int, tuple[CopySpec, ...]] = {}
    sizes = []
    for object_group in manager.object_groups:
        end = 0
        for kernel in object_group.kernel_group_indices:
            start = next_region_offset(end)
            region = build_region(
                kernel,
                manager.layer_pages(kernel),
                layout.groups[kernel].kept_blocks,
                object_layout,
                start,
            )
            specs[kernel] = region.specs
            end = start + region.region_bytes
        sizes.append(end)
    return tuple(specs[index] for index in range(len(specs))), tuple(sizes)
