"""The request that all suites measure: 128k tokens of a hybrid model with five kernel groups."""

from __future__ import annotations

import numpy as np

from hma_triton.group_view import EngineGroupInfo
from hma_triton.kernels.addressing import Int64Array
from hma_triton.plan import PlanGroup, PlanLayout, ReuseRule, kept_blocks
from hma_triton.units import cdiv

NUM_TOKENS = 128 << 10
CHUNK_TOKENS = 544
NUM_CHUNKS = NUM_TOKENS // CHUNK_TOKENS
WINDOW_TOKENS = 1024

# engine group, tokens per block, window, recurrent
_GROUPS = (
    (0, 16, None, False),
    (1, 16, WINDOW_TOKENS, False),
    (2, 32, WINDOW_TOKENS, False),
    (3, 544, None, True),
    (3, 544, None, True),
)

INFOS = tuple(
    EngineGroupInfo(
        engine_group_id=group,
        layer_indices=tuple(range(12 * index, 12 * index + 12)),
        tokens_per_block=tokens,
        sw_size_tokens=window or -1,
        recurrent_state=recurrent,
    )
    for index, (group, tokens, window, recurrent) in enumerate(_GROUPS)
)
RULES = (ReuseRule(), ReuseRule(WINDOW_TOKENS), ReuseRule(recurrent=True))
_OBJECT_GROUP = (0, 1, 1, 2, 2)


def plan_layout() -> PlanLayout:
    """What planning knows of the registration."""
    groups = tuple(
        PlanGroup(
            kernel_group_index=index,
            engine_group_idx=group,
            object_group=_OBJECT_GROUP[index],
            tokens_per_block=tokens,
            num_blocks=1 << 20,
            blocks_per_chunk=CHUNK_TOKENS // tokens,
            kept_blocks=kept_blocks(tokens, window, recurrent, CHUNK_TOKENS),
        )
        for index, (group, tokens, window, recurrent) in enumerate(_GROUPS)
    )
    return PlanLayout(CHUNK_TOKENS, 0, groups, RULES)


def ids_of_engine_groups() -> dict[int, Int64Array]:
    """Block ids of each engine group in random order, none of them null."""
    tokens_of = {group: tokens for group, tokens, _, _ in _GROUPS}
    counts = {group: NUM_CHUNKS * CHUNK_TOKENS // tokens for group, tokens in tokens_of.items()}
    ids = np.random.default_rng(0).permutation(sum(counts.values())).astype(np.int64) + 1
    parts = np.split(ids, np.cumsum(list(counts.values()))[:-1])
    return dict(zip(counts, parts, strict=True))


def ids_of_infos() -> list[Int64Array]:
    """One array per info, as a store takes them."""
    ids = ids_of_engine_groups()
    return [ids[info.engine_group_id] for info in INFOS]


def ids_to_retrieve() -> list[Int64Array]:
    """As a hit leaves them: nulls before the window, and before the last state."""
    arrays = [ids.copy() for ids in ids_of_infos()]
    for info, ids in zip(INFOS, arrays, strict=True):
        if info.recurrent_state:
            ids[:-1] = 0
        elif info.sw_size_tokens > 0:
            ids[: -cdiv(info.sw_size_tokens - 1, info.tokens_per_block)] = 0
    return arrays
