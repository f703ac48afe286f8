"""LMCache's host objects as pieces of registered memory, which no single copy may straddle.

LMCache pins its buffer in pieces of `host_buffer_alignment` bytes, counted from the buffer's start
(0.5.6, `lmcache_memcpy_async`); an object's `host_offset` says where in the buffer it lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hma_triton.integration.lmcache.plan_types import StagingCopy
from hma_triton.kernels.addressing import Direction, Int64Array


def object_pieces(
    copies: Sequence[StagingCopy], way: Direction, alignment_bytes: int
) -> tuple[Int64Array, Int64Array]:
    """First addresses and ends [num_pieces], ascending, of the parts of pieces that hold objects.

    Args:
        copies: staging copies of the plan; their host side is the object.
        alignment_bytes: length of a piece.
    """
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for copy in copies:
        host = copy.dest if way is Direction.STORE else copy.src
        base, end = host - copy.host_offset, host + copy.nbytes
        for number in range(
            copy.host_offset // alignment_bytes,
            -(-(copy.host_offset + copy.nbytes) // alignment_bytes),
        ):
            low = max(host, base + number * alignment_bytes)
            high = min(end, base + (number + 1) * alignment_bytes)
            lowest, highest = found.get((base, number), (low, high))
            found[base, number] = min(low, lowest), max(high, highest)
    edges = np.array(sorted(found.values()), dtype=np.int64).reshape(-1, 2)
    return edges[:, 0], edges[:, 1]
