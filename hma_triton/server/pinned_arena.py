"""The arena's registration with CUDA: once, when the server starts, beside the request loop."""

from __future__ import annotations

import logging
import threading
import time

import torch

from hma_triton.cuda_driver import CudaDriver
from hma_triton.errors import ConfigError, HmaError
from hma_triton.host_memory import PinnedHost, device_numa_node
from hma_triton.objects.arena import Arena

log = logging.getLogger("hma_triton.server")

# above what contexts were seen to take: a few hundred megabytes
_CONTEXT_BYTES = 512 << 20


def device_node(mode: str) -> int | None:
    """NUMA node of all devices that this process sees, if pins come and it is one node."""
    if mode == "off" or not torch.cuda.is_available():
        return None
    try:
        buses = [
            CudaDriver(index).device_info().pci_bus_id for index in range(torch.cuda.device_count())
        ]
    except HmaError:
        return None
    nodes = {device_numa_node(bus) for bus in buses}
    return nodes.pop() if len(nodes) == 1 else None


def context_bytes() -> int:
    """Private memory of this process that CUDA may take: a context for each device it sees."""
    return torch.cuda.device_count() * _CONTEXT_BYTES


class PinnedArena:
    """Pins an arena piece by piece. The registrations end with the process, after every copy.

    Args:
        mode: `auto` pins where a device can be used, in the background; `on` pins before `start`
            returns; `off` never does. Pools on a device are served either way: without pins the
            copy engine has to go through the driver's own buffers, which is slower.
        numa_node: where memory that is not there yet is taken from; the devices' where None.
    """

    def __init__(self, arena: Arena, mode: str, numa_node: int | None = None) -> None:
        self._arena = arena
        self._mode = mode
        self._numa_node = device_node(mode) if numa_node is None else numa_node
        self._settled = threading.Event()
        self._pinned: PinnedHost | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether every piece is registered now."""
        return self._pinned is not None

    def start(self) -> None:
        """Pin, or say in one line why not.

        Raises:
            ConfigError: mode `on` without a device or its bindings.
            CapacityError: mode `on` and memory that cannot be pinned.
        """
        if self._mode == "off":
            self._leave_plain("--pin off")
            return
        try:
            driver = _first_driver()
        except ConfigError as error:
            if self._mode == "on":
                raise
            self._leave_plain(str(error))
            return
        if self._mode == "on":
            self._pin(driver)
        else:
            threading.Thread(
                target=self._try_pin, args=(driver,), name="hma-pin", daemon=True
            ).start()

    def for_device(self, device: torch.device) -> PinnedHost | None:
        """The registrations, when it is known whether there are any; None for a pool on the CPU.

        Waits for the pinning: for control threads, not for the loop.
        """
        if device.type == "cpu":
            return None
        self._settled.wait()
        if self._pinned is None:
            log.warning("a pool on %s is served from memory that is not pinned: slower", device)
        return self._pinned

    def _leave_plain(self, why: str) -> None:
        log.info("the arena is plain shared memory: %s", why)
        self._settled.set()

    def _try_pin(self, driver: CudaDriver) -> None:
        try:
            self._pin(driver)
        except (HmaError, RuntimeError, OSError) as error:
            log.warning("the arena is plain shared memory: %s", error)
        finally:
            self._settled.set()

    def _pin(self, driver: CudaDriver) -> None:
        started = time.monotonic()
        memory = self._arena.memory
        # in parallel and near the device, which the registration itself would not be
        memory.touch(self._numa_node)
        self._pinned = PinnedHost(driver, memory.address, memory.pieces)
        self._settled.set()
        log.info(
            "pinned the arena bytes=%d pieces=%d seconds=%.2f",
            memory.nbytes,
            len(memory.pieces),
            time.monotonic() - started,
        )


def _first_driver() -> CudaDriver:
    """A driver of some device: registrations hold for all of them.

    Raises:
        ConfigError: no device, or no bindings.
    """
    if not torch.cuda.is_available():
        raise ConfigError(f"torch {torch.__version__} finds no GPU that it can use")
    return CudaDriver()
