"""Times copies on scratch buffers of one device; live caches are never touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hma_triton.errors import ConfigError
from hma_triton.kernels.addressing import (
    REGION_ALIGN_BYTES,
    CopySpec,
    Direction,
    Int64Array,
)
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.tuning import KernelConfig, TuneKey
from hma_triton.units import align_up, cdiv

_MATRIX_SIZE = 4096
_MATRIX_REPEATS = 20


@dataclass(frozen=True, slots=True)
class ScratchCopy:
    """A copy to be timed; `spec.row_addresses` are offsets into a pool of `pool_bytes`."""

    spec: CopySpec
    pool_bytes: int
    direction: Direction
    num_blocks: int


class ScratchSampler:
    """Microseconds of one launch, by device events, on buffers made for one copy at a time.

    Raises:
        ConfigError: no such device.
    """

    def __init__(self, device: torch.device, copies: dict[TuneKey, ScratchCopy]) -> None:
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ConfigError(
                f"tuning needs a GPU and {device} is none that torch {torch.__version__} can "
                "use here; --replay FILE decides on recorded measurements without one"
            )
        self.device = device
        self._copies = copies
        self._copiers: dict[KernelConfig, TritonCopier] = {}
        self._key: TuneKey | None = None

    def __call__(self, key: TuneKey, config: KernelConfig) -> float:
        """Time one copy of `key` with `config`."""
        copier = self._copiers.get(config)
        if copier is None:
            copier = self._copiers[config] = TritonCopier(self.device, config)
        self._make_buffers(key)
        begin, end = _timing_event(), _timing_event()
        begin.record()
        self._enqueue(copier)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def matrix_slowdown(self, key: TuneKey, config: KernelConfig) -> float:
        """How many times as long a matrix product takes while the copy runs beside it."""
        copier = TritonCopier(self.device, config)
        self._make_buffers(key)
        self._enqueue(copier)
        shape = (_MATRIX_SIZE, _MATRIX_SIZE)
        matrix = torch.randn(shape, device=self.device, dtype=torch.float16)
        beside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        alone_ms = self._matrix_ms(matrix)
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(beside):
            # more copies than the products take, so that one is always running
            copy_us = max(1.0, self(key, config))
            for _ in range(int(2e3 * alone_ms * _MATRIX_REPEATS / copy_us) + 2):
                self._enqueue(copier)
        beside_ms = self._matrix_ms(matrix)
        torch.cuda.synchronize(self.device)
        return beside_ms / alone_ms

    def _matrix_ms(self, matrix: torch.Tensor) -> float:
        matrix @ matrix
        begin, end = _timing_event(), _timing_event()
        begin.record()
        for _ in range(_MATRIX_REPEATS):
            matrix @ matrix
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / _MATRIX_REPEATS

    def _enqueue(self, copier: TritonCopier) -> None:
        copier.enqueue(self._spec, self._direction, self._ids, self._addresses)

    def _make_buffers(self, key: TuneKey) -> None:
        if key == self._key:
            return
        copy = self._copies[key]
        self._pool = torch.zeros(copy.pool_bytes, dtype=torch.uint8, device=self.device)
        # whole objects, one behind the other, as an arena holds them
        spec = copy.spec
        items = np.arange(copy.num_blocks, dtype=np.int64)
        step = spec.object_block_stride_bytes
        region_bytes = spec.object_extent_bytes + (spec.blocks_per_object - 1) * step
        object_bytes = align_up(REGION_ALIGN_BYTES + region_bytes, REGION_ALIGN_BYTES)
        count = cdiv(copy.num_blocks, spec.blocks_per_object)
        self._object = torch.zeros(count * object_bytes, dtype=torch.uint8, pin_memory=True)
        places = items // spec.blocks_per_object * object_bytes
        places += items % spec.blocks_per_object * step
        places += spec.region_offset_bytes % REGION_ALIGN_BYTES
        self._addresses: Int64Array = places + self._object.data_ptr()
        base = self._pool.data_ptr()
        self._spec = replace(
            copy.spec, row_addresses=tuple(base + row for row in copy.spec.row_addresses)
        )
        self._direction = copy.direction
        # no two neighbours: as a pool looks after a while
        order = np.random.default_rng(0).permutation(copy.spec.num_blocks)
        self._ids: Int64Array = order[: copy.num_blocks].astype(np.int64)
        self._key = key


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
