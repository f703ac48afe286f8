"""Windows, skips, nulls and hits: the only home of this arithmetic.

Everything is counted in tokens and divided by each group's own block. `windows` says what a
chunk keeps and what a hit needs, `hits` finds the longest prefix that can be served, `transfer`
turns block ids into a frozen plan. A `TransferPlan` stays factored: ids and places per kernel
group, in arrays; `kernels.addressing` knows the bytes.
"""

from hma_triton.plan.hits import BoolArray, Hit, longest_hit
from hma_triton.plan.transfer import (
    Direction,
    GroupPlan,
    PlanGroup,
    PlanLayout,
    TransferPlan,
    plan_retrieve,
    plan_store,
    plan_transfer,
    storable_chunks,
)
from hma_triton.plan.windows import (
    MINIMUM_CHUNK_TOKENS,
    ReuseRule,
    check_chunk_tokens,
    choose_chunk_tokens,
    chunks_needed,
    kept_blocks,
)

__all__ = [
    "MINIMUM_CHUNK_TOKENS",
    "BoolArray",
    "Direction",
    "GroupPlan",
    "Hit",
    "PlanGroup",
    "PlanLayout",
    "ReuseRule",
    "TransferPlan",
    "check_chunk_tokens",
    "choose_chunk_tokens",
    "chunks_needed",
    "kept_blocks",
    "longest_hit",
    "plan_retrieve",
    "plan_store",
    "plan_transfer",
    "storable_chunks",
]
