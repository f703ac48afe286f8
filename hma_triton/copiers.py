"""Which executor serves the pools of a registration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from hma_triton.errors import ConfigError, GroupMismatchError
from hma_triton.host_memory import PinnedHost
from hma_triton.kernels.addressing import CopySpec, Direction, Int64Array
from hma_triton.kernels.cpu import CpuCopier
from hma_triton.kernels.device import DeviceCopier, DeviceSettings
from hma_triton.kernels.reference import ReferenceCopier

BACKENDS = ("auto", "cpu", "device", "triton", "reference")


class Copier(Protocol):
    """What executes a plan; see `kernels.addressing` for the formula."""

    @property
    def name(self) -> str:
        """Short name, for results and metrics."""

    def prepare(self, specs: Sequence[CopySpec]) -> None:
        """Compile and upload whatever `specs` need, once, at registration."""

    def copy_blocks(
        self,
        spec: CopySpec,
        direction: Direction,
        block_ids: Int64Array,
        object_addresses: Int64Array,
    ) -> None:
        """Move `block_ids` [n] to or from `object_addresses` [n]; done when it returns."""

    def close(self) -> None:
        """Release threads and tables."""


def device_of(layers: Any) -> torch.device:
    """The one device that all caches are on.

    Raises:
        GroupMismatchError: caches on several devices.
    """
    devices = {tensor.device for tensor in _tensors(layers)}
    if len(devices) != 1:
        raise GroupMismatchError(
            f"caches are on {sorted(map(str, devices))}; one registration has one device"
        )
    return devices.pop()


def _tensors(caches: Any) -> list[torch.Tensor]:
    if isinstance(caches, torch.Tensor):
        return [caches]
    values = caches.values() if isinstance(caches, Mapping) else caches
    return [tensor for value in values for tensor in _tensors(value)]


def make_copier(
    backend: str,
    device: torch.device,
    threads: int | None,
    pinned_host: PinnedHost | None,
    device_settings: DeviceSettings | None,
) -> Copier:
    """The executor that `backend` names; `auto` takes the one made for the pools' device.

    Raises:
        ConfigError: an unknown backend, or one that cannot read pools on `device`.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown; use one of {', '.join(BACKENDS)}")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"caches on {device} cannot be served; they are on the CPU or a CUDA GPU")
    if backend == "auto":
        backend = "cpu" if device.type == "cpu" else "device"
    if backend in ("cpu", "reference"):
        if device.type != "cpu":
            raise ConfigError(f"backend {backend!r} cannot read caches on {device}; use 'device'")
        return CpuCopier(threads) if backend == "cpu" else ReferenceCopier()
    if backend == "device" and device.type == "cpu":
        raise ConfigError("backend 'device' serves caches on a GPU; CPU caches take 'cpu'")
    from hma_triton.kernels.triton_copier import TritonCopier

    if backend == "triton":
        return TritonCopier(device)
    settings = device_settings or DeviceSettings()
    kernel = TritonCopier(device, program_cap=settings.program_cap)
    return DeviceCopier(device, pinned_host, kernel=kernel, settings=settings)
