"""One executor per device, and the geometries it has been prepared for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import torch

from hma_triton.copiers import Copier
from hma_triton.errors import UnsupportedLayoutError
from hma_triton.host_memory import DeviceView
from hma_triton.integration.lmcache.geometry import TransferGeometry
from hma_triton.integration.lmcache.host_pieces import object_pieces
from hma_triton.integration.lmcache.plan_types import StagingCopy
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kernels.device import DeviceCopier
from hma_triton.kernels.runs import NO_PIECES

GEOMETRY_LIMIT = 1024


class Executors:
    """Runs transfers where their pools are. Safe under concurrent callers.

    Args:
        copier: takes every pool, whatever its device; by default the CPU copier for CPU pools and
            the device copier, as a part of the current stream, for CUDA and ROCm pools.
    """

    def __init__(self, copier: Copier | None = None) -> None:
        self._lock = threading.Lock()
        self._forced = copier
        self._copiers: dict[torch.device, Copier] = {}
        self._geometries: OrderedDict[Hashable, TransferGeometry] = OrderedDict()
        self._moved = [0, 0]

    def geometry(
        self, device: torch.device, key: Hashable, build: Callable[[], TransferGeometry]
    ) -> TransferGeometry:
        """The geometry of `key`, built and prepared the first time.

        Raises:
            UnsupportedLayoutError: pools on a device that no executor serves.
        """
        with self._lock:
            found = self._geometries.get((device, key))
            if found is not None:
                self._geometries.move_to_end((device, key))
                return found
        geometry = build()
        self.copier(device).prepare(geometry.specs)
        with self._lock:
            self._geometries[device, key] = geometry
            while len(self._geometries) > GEOMETRY_LIMIT:
                self._geometries.popitem(last=False)
        return geometry

    def run(
        self,
        device: torch.device,
        geometry: TransferGeometry,
        direction: Direction,
        block_ids: Int64Array,
        block_addresses: Int64Array,
        view: DeviceView | None = None,
    ) -> None:
        """Move `block_ids` [n] to or from `block_addresses` [n], those of the geometry.

        On a CUDA device the work is ordered as a part of the current stream, on the CPU it is
        done on return.

        Args:
            view: of `host_view`, for objects in host memory.
        """
        copier = self.copier(device)
        # LMCache orders its own work by the stream, so a device's copy must not wait for itself
        move = getattr(copier, "enqueue", copier.copy_blocks)
        if isinstance(copier, DeviceCopier):
            move = partial(copier.enqueue, view=view)
        for spec in geometry.specs:
            move(spec, direction, block_ids, block_addresses + spec.region_offset_bytes)
        with self._lock:
            self._moved[direction] += block_ids.size

    def host_view(
        self,
        device: torch.device,
        copies: Sequence[StagingCopy],
        way: Direction,
        alignment_bytes: int,
    ) -> DeviceView | None:
        """What `run` needs to move host objects straight; None where they must be staged first.

        Args:
            copies: their staging copies; pieces of `alignment_bytes` are registered one by one.
        """
        copier = self.copier(device)
        if isinstance(copier, DeviceCopier):
            return copier.registrations(*object_pieces(copies, way, alignment_bytes))
        return NO_PIECES if device.type == "cpu" else None

    @property
    def blocks_moved(self) -> tuple[int, int]:
        """Blocks stored and retrieved so far, over all kernel groups."""
        with self._lock:
            return self._moved[0], self._moved[1]

    def copier(self, device: torch.device) -> Copier:
        """The executor for pools on `device`.

        Raises:
            UnsupportedLayoutError: neither CPU nor CUDA nor ROCm.
        """
        with self._lock:
            if self._forced is not None:
                return self._forced
            if device == torch.device("cuda"):
                device = torch.device("cuda", torch.cuda.current_device())
            if device not in self._copiers:
                self._copiers[device] = _make_copier(device)
            return self._copiers[device]

    def warm(self, device: torch.device) -> None:
        """Compile what does not depend on a geometry, before the first request."""
        run = CopySpec(0, (0,), 4096, 1, 0, 4096, 4096, 1, 1, 4096, 4096, 1, 4096, 4096, 4096)
        page = CopySpec(0, (0,), 4096, 1, 0, 4096, 4096, 1, 8, 64, 128, 2, 512, 64, 64)
        self.copier(device).prepare((run, page))

    def close(self) -> None:
        """Release the executors made here; nothing enqueued may be pending."""
        with self._lock:
            for copier in self._copiers.values():
                copier.close()
            self._copiers.clear()
            self._geometries.clear()


def _make_copier(device: torch.device) -> Copier:
    if device.type == "cpu":
        return CpuCopier()
    if device.type != "cuda":
        raise UnsupportedLayoutError(f"no executor for pools on {device}")
    # only where there is a device: Triton reads its environment when it is imported
    from hma_triton.kernels.triton_copier import TritonCopier

    return DeviceCopier(device, kernel=TritonCopier(device, object_alignments=(16,)))
