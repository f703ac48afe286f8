"""Whether a kernel on a device can use the addresses of objects, and by which addresses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hma_triton.cuda_driver import CudaDriver, PointerKind
from hma_triton.host_memory import DeviceView
from hma_triton.kernels.addressing import CopySpec, Int64Array
from hma_triton.kernels.runs import crosses_piece, piece_of


@dataclass(frozen=True, slots=True)
class Reach:
    """What a kernel sees of a copy's objects.

    Args:
        addresses: `[n]`, the device's; None where it cannot reach all of them.
        on_device: all of them are device memory, so that no byte crosses the link.
    """

    addresses: Int64Array | None
    on_device: bool = False


def reach(driver: CudaDriver, spec: CopySpec, places: Int64Array, view: DeviceView) -> Reach:
    """Look up `places` `[n]`: in `view` first, else by asking the driver."""
    pieces = piece_of(view, places)
    if (pieces >= 0).all():
        mapped = bool((view.starts != view.device_starts).any())
        if mapped and crosses_piece(spec, places, view):
            return Reach(None)
        return Reach(view.device_addresses(places, pieces))
    return _ask(driver, places)


def registrations(driver: CudaDriver, starts: Int64Array, ends: Int64Array) -> DeviceView | None:
    """Pinned memory of somebody else's as a view; None where a piece is not pinned.

    Args:
        starts, ends: `[n]`, ascending; each piece lies in one registration.
    """
    mapped = np.empty_like(starts)
    for index, start in enumerate(starts.tolist()):
        kind, mapped[index] = driver.pointer(start)
        if kind is not PointerKind.PINNED:
            return None
    return DeviceView(starts, ends, mapped)


def _ask(driver: CudaDriver, places: Int64Array) -> Reach:
    addresses = np.empty_like(places)
    known = np.zeros(places.shape, dtype=np.bool_)
    kinds = set()
    for index, place in enumerate(places.tolist()):
        if known[index]:
            continue
        kind, address = driver.pointer(place)
        kinds.add(kind)
        if kind is PointerKind.PAGEABLE:
            return Reach(None)
        if kind is PointerKind.PINNED:
            addresses[index] = address
            continue
        # one answer for all objects of a device allocation, such as a staging buffer
        start, nbytes = driver.allocation_of(place)
        inside = (places >= start) & (places < start + nbytes)
        addresses[inside] = places[inside] + (address - place)
        known |= inside
    return Reach(addresses, on_device=kinds == {PointerKind.DEVICE})
