"""The twin of every executor: one memory move per run, in the order of the formula."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array


class ReferenceCopier:
    """Executor that follows `addressing`'s formula literally; for tests and for reading."""

    name = "reference"

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Nothing to compile."""

    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None:
        """Move `block_ids` [n] of `spec` to or from `object_addresses` [n]."""
        for block_id, object_address in zip(
            block_ids.tolist(), object_addresses.tolist(), strict=True
        ):
            for row, row_address in enumerate(spec.row_addresses):
                pool_page = row_address + block_id * spec.block_stride_bytes
                object_page = object_address + row * spec.object_row_stride_bytes
                for a in range(spec.n0):
                    for b in range(spec.n1):
                        pool = pool_page + a * spec.pool_stride0_bytes + b * spec.pool_stride1_bytes
                        place = (
                            object_page
                            + a * spec.object_stride0_bytes
                            + b * spec.object_stride1_bytes
                        )
                        if direction is Direction.STORE:
                            ctypes.memmove(place, pool, spec.run_bytes)
                        else:
                            ctypes.memmove(pool, place, spec.run_bytes)

    def close(self) -> None:
        """Nothing to release."""
