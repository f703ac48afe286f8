"""The longest prefix that can be served (rules 5 to 7 of the design)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hma_triton.errors import PlanError
from hma_triton.plan.windows import ReuseRule

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Hit:
    """A prefix that can be served, and why it ends there.

    `reason`: `all` chunks served, the `limit` was met, `none` were asked for, or the hole's place.
    """

    tokens: int
    chunks: int
    reason: str


def longest_hit(
    rules: Sequence[ReuseRule], present: BoolArray, chunk_tokens: int, max_tokens: int
) -> Hit:
    """The longest prefix in whole chunks for which every object group has what its rule needs.

    Args:
        present: `[num_object_groups, num_chunks]`, true where all ranks hold the object.
        max_tokens: cap on the hit (the prompt, or one token less with recurrent groups).
    """
    if present.shape[0] != len(rules):
        raise PlanError(f"presence of {present.shape[0]} object groups for {len(rules)} rules")
    num_chunks = present.shape[1]
    limit = min(num_chunks, max_tokens // chunk_tokens)
    if limit <= 0:
        return Hit(0, 0, "limit" if num_chunks else "none")
    if present[:, :limit].all():
        return Hit(limit * chunk_tokens, limit, "all" if limit == num_chunks else "limit")
    ends = np.arange(1, limit + 1)
    served = np.ones(limit, dtype=np.bool_)
    runs = np.empty((len(rules), limit), dtype=np.int64)
    for index, rule in enumerate(rules):
        last_hole = np.maximum.accumulate(np.where(present[index, :limit], 0, ends))
        runs[index] = ends - last_hole
        needed = rule.chunks_for_hit(chunk_tokens)
        served &= runs[index] >= (ends if needed is None else np.minimum(ends, needed))
    hits = np.flatnonzero(served)
    chunks = int(hits[-1]) + 1 if hits.size else 0
    if chunks == limit:
        reason = "all" if limit == num_chunks else "limit"
        return Hit(chunks * chunk_tokens, chunks, reason)
    return Hit(chunks * chunk_tokens, chunks, _stopped_by(rules, runs, chunks, chunk_tokens))


def _stopped_by(
    rules: Sequence[ReuseRule], runs: Int64Array, chunks: int, chunk_tokens: int
) -> str:
    """Name the object groups without which the next chunk would have been a hit."""
    missing = []
    for index, rule in enumerate(rules):
        needed = rule.chunks_for_hit(chunk_tokens)
        end = chunks + 1
        if runs[index, chunks] < (end if needed is None else min(end, needed)):
            missing.append(f"object group {index}")
    return f"chunk {chunks} missing in {', '.join(missing)}"
