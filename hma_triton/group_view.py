"""What an engine says about its cache groups, and block ids carried from one view to another.

An engine group is one paged-block address space of the engine; a block id means something only
inside it. An *info* describes the layers of one engine group that share one kernel group, so
several infos may name the same engine group. The order of the infos is the protocol's order:
transfer requests carry one block-id list per info.

The fields of :class:`EngineGroupInfo` are those of LMCache 0.5.6's payload of the same name, in
its order, so that payloads of either side decode on the other.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex, cast

import msgspec

from hma_triton.errors import AlignmentError, BlockIdError, GroupMismatchError
from hma_triton.units import exact_div

EXCLUDED_ENGINE_GROUP = -1
"""Per-layer engine group id of a layer that belongs to no info and is never moved."""


class EngineGroupInfo(msgspec.Struct, frozen=True):
    """Layers of one engine group that share one kernel group. New fields only at the end.

    On the wire an absent value is -1 or 0, because old payloads need it:
    ``tokens_per_block`` 0 is "not reported" (the tensor's slots count instead),
    ``sw_size_tokens`` -1 is "no window".
    """

    engine_group_id: int
    layer_indices: tuple[int, ...] = ()
    tokens_per_block: int = 0
    sw_size_tokens: int = -1
    extra_object_group_tag: int = 0
    recurrent_state: bool = False


def num_engine_groups(infos: Sequence[EngineGroupInfo]) -> int:
    """Block-id lists an engine reports per request: highest group id + 1, or 1 without infos."""
    return max((info.engine_group_id for info in infos), default=0) + 1


def num_engine_group_infos(infos: Sequence[EngineGroupInfo]) -> int:
    """Block-id lists a transfer request carries: one per info, or 1 without infos."""
    return len(infos) or 1


def engine_group_layer_indices(infos: Sequence[EngineGroupInfo]) -> list[list[int]]:
    """Ascending layer indices of each engine group, by group id; empty without infos."""
    if not infos:
        return []
    layers: list[list[int]] = [[] for _ in range(num_engine_groups(infos))]
    for info in infos:
        layers[info.engine_group_id].extend(info.layer_indices)
    return [sorted(indices) for indices in layers]


def get_engine_group_indices(infos: Sequence[EngineGroupInfo], num_layers: int) -> list[int] | None:
    """Engine group id of every registered layer; None without infos or without layers.

    A layer that no info names (it shares another layer's cache, or its group keeps nothing) is
    :data:`EXCLUDED_ENGINE_GROUP`.

    Raises:
        GroupMismatchError: a negative group id, a layer index outside ``range(num_layers)``, or
            a layer named by two infos.
    """
    if not infos or num_layers == 0:
        return None
    group_of_layer = [EXCLUDED_ENGINE_GROUP] * num_layers
    for position, info in enumerate(infos):
        if info.engine_group_id < 0:
            raise GroupMismatchError(
                f"info {position}: engine group id {info.engine_group_id} is negative"
            )
        for layer in info.layer_indices:
            if not 0 <= layer < num_layers:
                raise GroupMismatchError(
                    f"info {position} (engine group {info.engine_group_id}) names layer {layer}; "
                    f"{num_layers} layers are registered"
                )
            if group_of_layer[layer] != EXCLUDED_ENGINE_GROUP:
                raise GroupMismatchError(
                    f"layer {layer} is named twice: by info {position} (engine group "
                    f"{info.engine_group_id}) and by engine group {group_of_layer[layer]}"
                )
            group_of_layer[layer] = info.engine_group_id
    return group_of_layer


def expand_engine_block_ids(
    infos: Sequence[EngineGroupInfo],
    block_ids: Mapping[int, Sequence[int]] | Sequence[Sequence[int]] | Sequence[int],
) -> list[list[int]]:
    """One block-id list per info, each taken by the info's engine group id.

    ``block_ids`` holds one list per engine group, by position or by group id; the flat list of an
    engine with a single group is taken as that group's. Groups {0: [10, 11], 1: [20, 21]} and
    infos of groups 0, 1, 0 give ``[[10, 11], [20, 21], [10, 11]]``.

    Raises:
        BlockIdError: fewer lists than engine groups, or an entry that is no id.
    """
    lists = _by_group(block_ids)
    sources = [info.engine_group_id for info in infos] or [0]
    missing = sorted(set(sources) - set(lists))
    if missing:
        raise BlockIdError(
            f"no block ids for engine groups {missing}: the infos name groups "
            f"{sorted(set(sources))}, ids came for {sorted(lists)}"
        )
    return [list(lists[source]) for source in sources]


def _by_group(
    block_ids: Mapping[int, Sequence[int]] | Sequence[Sequence[int]] | Sequence[int],
) -> dict[int, list[int]]:
    """``block_ids`` as plain ints by engine group id."""
    if isinstance(block_ids, Mapping):
        return {group: _as_ints(ids, group) for group, ids in block_ids.items()}
    if len(block_ids) == 0:
        return {0: []}
    if not isinstance(block_ids[0], Sequence) and not hasattr(block_ids[0], "__len__"):
        return {0: _as_ints(cast("Sequence[SupportsIndex]", block_ids), 0)}
    nested = cast("Sequence[Sequence[SupportsIndex]]", block_ids)
    return {group: _as_ints(ids, group) for group, ids in enumerate(nested)}


def _as_ints(ids: Sequence[SupportsIndex], group: int) -> list[int]:
    try:
        return [operator.index(block_id) for block_id in ids]
    except TypeError as error:
        raise BlockIdError(f"engine group {group}: block ids must be integers ({error})") from error


def slice_block_ids_per_group(
    allocated: Mapping[int, Sequence[int]],
    group_tokens_per_block: Sequence[int],
    start_token_idx: int,
    end_token_idx: int,
) -> list[list[int]]:
    """Block ids of the token range ``[start_token_idx, end_token_idx)``, one list per engine group.

    ``allocated`` maps an engine group id to its block table from token 0 on.
    ``group_tokens_per_block`` is in engine-group order; a group of 0 tokens keeps nothing and
    gives an empty list. 256 tokens are 4 ids of a 64-token group and 1 id of a 256-token group.

    Raises:
        AlignmentError: the range does not start and end on a block edge of every group.
        BlockIdError: a cacheable group has fewer ids than the range needs.
    """
    if not 0 <= start_token_idx <= end_token_idx:
        raise AlignmentError(f"token range [{start_token_idx}, {end_token_idx}) is not a range")
    sliced: list[list[int]] = []
    for group, tokens_per_block in enumerate(group_tokens_per_block):
        if tokens_per_block == 0:
            sliced.append([])
            continue
        what = f"token range [{start_token_idx}, {end_token_idx}) in engine group {group}"
        first = exact_div(start_token_idx, tokens_per_block, what)
        last = exact_div(end_token_idx, tokens_per_block, what)
        ids = allocated.get(group, ())
        if len(ids) < last:
            raise BlockIdError(
                f"engine group {group}: {len(ids)} block ids of {tokens_per_block} tokens each "
                f"cover {len(ids) * tokens_per_block} tokens, {end_token_idx} are needed"
            )
        sliced.append([int(block_id) for block_id in ids[first:last]])
    return sliced
