"""The arena's registration with CUDA: once for the server's life, when a pool on a device comes."""

from __future__ import annotations

import logging
import threading
import time

import torch

from hma_triton.cuda_driver import CudaDriver
from hma_triton.host_memory import PinnedHost, device_numa_node
from hma_triton.objects.arena import Arena

log = logging.getLogger("hma_triton.server")


class PinnedArena:
    """Pins an arena, piece by piece, the first time that a device asks for it.

    The registrations end with the process, after every copy.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._lock = threading.Lock()
        self._pinned: PinnedHost | None = None

    def for_device(self, device: torch.device) -> PinnedHost | None:
        """The registrations; None for a pool on the CPU.

        Raises:
            ConfigError: no CUDA bindings. CapacityError: memory that cannot be pinned.
        """
        if device.type == "cpu":
            return None
        with self._lock:
            if self._pinned is None:
                started = time.monotonic()
                memory = self._arena.memory
                driver = CudaDriver(device.index or 0)
                # in parallel and near the device, which the registration itself would not be
                memory.touch(device_numa_node(driver.device_info().pci_bus_id))
                self._pinned = PinnedHost(driver, memory.address, memory.pieces)
                log.info(
                    "pinned the arena bytes=%d pieces=%d seconds=%.2f",
                    memory.nbytes,
                    len(memory.pieces),
                    time.monotonic() - started,
                )
            return self._pinned
