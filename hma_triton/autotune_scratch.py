"""Times copies on scratch buffers of one device; live caches are never touched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hma_triton.errors import ConfigError
from hma_triton.host_memory import HostMemory, PinnedHost
from hma_triton.kernels.addressing import (
    REGION_ALIGN_BYTES,
    CopySpec,
    Direction,
    Int64Array,
)
from hma_triton.kernels.device import DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.staged import STAGING_BYTES, row_slices
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.torch_driver import open_driver
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

    @property
    def other_paths(self) -> tuple[str, ...]:
        """Paths that can take this copy besides the kernel reaching over the link."""
        staged = bool(row_slices(self.spec, STAGING_BYTES // 2))
        return (Path.DMA.value, Path.STAGED.value) if staged else (Path.DMA.value,)


class ScratchSampler:
    """Microseconds of one copy, by device events, on buffers made for one copy at a time.

    The first event fires before the copy is planned, so what the host does is in the time.

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
        self._driver = open_driver(device.index or 0)
        self._copiers: dict[KernelConfig, TritonCopier] = {}
        self._by_path: dict[KernelConfig, DeviceCopier] = {}
        self._pinned: PinnedHost | None = None
        self._key: TuneKey | None = None

    def __call__(self, key: TuneKey, config: KernelConfig) -> float:
        """Time one copy of `key` with `config`."""
        self._make_buffers(key)
        copier = self._copier(config)
        begin, end = _timing_event(), _timing_event()
        begin.record()
        self._enqueue(copier)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def matrix_slowdown(self, key: TuneKey, config: KernelConfig) -> float:
        """How many times as long a matrix product takes while the copy runs beside it."""
        self._make_buffers(key)
        copier = self._copier(config)
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

    def _copier(self, config: KernelConfig) -> TritonCopier | DeviceCopier:
        if config.path == Path.ZERO_COPY.value:
            if config not in self._copiers:
                self._copiers[config] = TritonCopier(self.device, config)
            return self._copiers[config]
        if config not in self._by_path:
            self._by_path[config] = DeviceCopier(
                self.device,
                self._pinned,
                kernel=TritonCopier(self.device, config),
                settings=DeviceSettings(Path(config.path)),
                driver=self._driver,
            )
            self._by_path[config].prepare((self._spec,))
        return self._by_path[config]

    def _enqueue(self, copier: TritonCopier | DeviceCopier) -> None:
        own = isinstance(copier, TritonCopier)
        places = self._mapped_addresses if own else self._addresses
        copier.enqueue(self._spec, self._direction, self._ids, places)

    def close(self) -> None:
        """Release the buffers; waits for the device first."""
        if self._pinned is not None:
            torch.cuda.synchronize(self.device)
            for copier in self._by_path.values():
                copier.close()
            self._by_path.clear()
            self._pinned.close()
            self._pinned = None
            self._memory.close()

    def _make_buffers(self, key: TuneKey) -> None:
        if key == self._key:
            return
        self.close()
        copy = self._copies[key]
        self._pool = torch.zeros(copy.pool_bytes, dtype=torch.uint8, device=self.device)
        # whole objects, one behind the other, as an arena holds them
        spec = copy.spec
        items = np.arange(copy.num_blocks, dtype=np.int64)
        step = spec.object_block_stride_bytes
        region_bytes = spec.object_extent_bytes + (spec.blocks_per_object - 1) * step
        object_bytes = align_up(REGION_ALIGN_BYTES + region_bytes, REGION_ALIGN_BYTES)
        count = cdiv(copy.num_blocks, spec.blocks_per_object)
        self._memory = HostMemory(count * object_bytes)
        self._pinned = PinnedHost(self._driver, self._memory.address, self._memory.pieces)
        places = items // spec.blocks_per_object * object_bytes
        places += items % spec.blocks_per_object * step
        places += spec.region_offset_bytes % REGION_ALIGN_BYTES
        self._addresses: Int64Array = places + self._memory.address
        view = self._pinned.view(self._driver)
        self._mapped_addresses = view.device_addresses(
            self._addresses, view.piece_of(self._addresses)
        )
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
