"""An executor that prepares what it copies."""

from __future__ import annotations

from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.cpu import CpuCopier


class Prepared:
    """Prepares every spec before it copies, as a registration does."""

    def __init__(self, copier: CpuCopier) -> None:
        self.copier = copier

    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None:
        self.copier.prepare([spec])
        self.copier.copy_blocks(spec, direction, block_ids, object_addresses)
