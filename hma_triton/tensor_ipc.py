"""Pools shared between processes: a storage is re-homed in place, its peer maps the same bytes.
CUDA storages stay where they are and are named by `tensor_ipc_cuda`.

CPU storages move into an unlinked shared-memory segment of mode 0600, one per storage, so that
every view of them (the engine's own too) moves along and keeps its offset, and nothing stays behind
when a process is killed. The peer opens the segment through the owner's descriptor,
`/proc/<pid>/fd/<n>`, which the kernel allows to the same user in the same process namespace.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from hma_triton.cuda_driver import CudaDriver
from hma_triton.errors import (
    CapacityError,
    ProtocolError,
    TransferError,
    UnsupportedLayoutError,
)
from hma_triton.handles import (
    MAX_LAYERS,
    CudaIpcHandle,
    LayerHandle,
    ShmHandle,
    StorageHandle,
    TensorHandle,
)
from hma_triton.process_identity import check_same_kernel, start_ticks, this_process
from hma_triton.tensor_ipc_cuda import CudaStorages, export_storage

_SHM_DIRECTORY = "/dev/shm"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

KVCaches = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


def share_storage(storage: torch.UntypedStorage) -> ShmHandle:
    """Move a CPU storage into shared memory, in place, and name the segment.

    Addresses taken earlier from the storage are no longer its own. A storage that is shared already
    stays where it is.

    Raises:
        CapacityError: shared memory is too small; names both sizes.
        UnsupportedLayoutError: not a CPU storage, or an empty one.
    """
    if storage.device.type != "cpu":
        raise UnsupportedLayoutError(
            f"a storage on {storage.device} cannot be shared through shared memory"
        )
    nbytes = storage.nbytes()
    if nbytes == 0:
        raise UnsupportedLayoutError("an empty storage cannot be shared")
    if not storage.is_shared():
        _check_room(nbytes)
    try:
        fd, size = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise CapacityError(
            f"{nbytes} bytes of KV cache do not fit into {_SHM_DIRECTORY}: {error}; enlarge it "
            "(docker run --shm-size, or a tmpfs mount)"
        ) from error
    info = os.fstat(fd)
    return ShmHandle(
        owner=this_process(), fd=fd, nbytes=size, device=info.st_dev, inode=info.st_ino
    )


def _name_storage(storage: torch.UntypedStorage) -> StorageHandle:
    if storage.device.type != "cuda":
        return share_storage(storage)
    return export_storage(storage, this_process(), CudaDriver(storage.device.index or 0))


def _check_room(nbytes: int) -> None:
    try:
        filesystem = os.statvfs(_SHM_DIRECTORY)
    except OSError as error:
        raise CapacityError(f"{_SHM_DIRECTORY} cannot be used: {error}") from error
    free = filesystem.f_bavail * filesystem.f_frsize
    if free < nbytes:
        raise CapacityError(
            f"{nbytes} bytes of KV cache do not fit into {_SHM_DIRECTORY}, which has {free} bytes "
            "free; enlarge it (docker run --shm-size, or a tmpfs mount)"
        )


def export_kv_caches(
    kv_caches: KVCaches,
) -> tuple[tuple[StorageHandle, ...], tuple[LayerHandle, ...]]:
    """Share every storage under `kv_caches` and describe the views, in registration order.

    Raises:
        CapacityError: shared memory is too small.
        UnsupportedLayoutError: a layer that is no strided tensor, or memory that another process
            cannot map; names it.
        ConfigError: a CUDA tensor without CUDA bindings.
    """
    handles: list[StorageHandle] = []
    positions: dict[int, int] = {}
    layers = []
    for name, cache in kv_caches.items():
        is_list = not isinstance(cache, torch.Tensor)
        tensors = list(cache) if is_list else [cache]
        described = []
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
                raise UnsupportedLayoutError(f"layer {name!r}: {type(tensor)} is no strided tensor")
            storage = tensor.untyped_storage()
            identity = storage._cdata
            if identity not in positions:
                try:
                    handles.append(_name_storage(storage))
                except UnsupportedLayoutError as error:
                    raise UnsupportedLayoutError(f"layer {name!r}: {error}") from error
                positions[identity] = len(handles) - 1
            described.append(_describe(tensor, positions[identity]))
        layers.append(LayerHandle(name=name, tensors=tuple(described), is_list=is_list))
    if len(layers) > MAX_LAYERS:
        raise UnsupportedLayoutError(f"{len(layers)} layers; at most {MAX_LAYERS} can be shared")
    return tuple(handles), tuple(layers)


def _describe(tensor: torch.Tensor, storage: int) -> TensorHandle:
    return TensorHandle(
        storage=storage,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        offset=int(tensor.storage_offset()),
    )


def map_segment(handle: ShmHandle) -> mmap.mmap:
    """Map another process's segment, readable and writable. It lives until the last reference.

    Raises:
        ConfigError: the owner is on another host or in another process namespace.
        ProtocolError: the descriptor is not the segment that the handle names.
        ServerUnavailableError: the owner is gone.
    """
    check_same_kernel(handle.owner)
    path = f"/proc/{handle.owner.pid}/fd/{handle.fd}"
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ProtocolError(f"{path} is no shared-memory segment")
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ProtocolError(
            f"{path} cannot be opened ({error.strerror}): client and server must run as one user"
        ) from error
    try:
        info = os.fstat(fd)
        same = (info.st_dev, info.st_ino) == (handle.device, handle.inode)
        if not same or start_ticks(handle.owner.pid) != handle.owner.start_ticks:
            raise ProtocolError(f"{path} is not the segment that was registered")
        if not 0 < handle.nbytes <= info.st_size:
            raise ProtocolError(f"{path} has {info.st_size} bytes, {handle.nbytes} were registered")
        return mmap.mmap(fd, handle.nbytes)
    finally:
        os.close(fd)


def device_of(kv_caches: KVCaches) -> torch.device:
    """Where the first cache is; the transfer engine checks that the others are there too."""
    for cache in kv_caches.values():
        for tensor in [cache] if isinstance(cache, torch.Tensor) else cache:
            return tensor.device
    return torch.device("cpu")


@dataclass(slots=True)
class ImportedCaches:
    """Views of a peer's caches, by layer name in registration order."""

    kv_caches: dict[str, Any]
    nbytes: int
    _segments: list[mmap.mmap] = field(default_factory=list)
    _cuda: CudaStorages | None = None

    def check(self) -> None:
        """Raise TransferError when a peer has shrunk a segment: touching it would kill us."""
        for index, segment in enumerate(self._segments):
            if segment.size() < len(segment):
                raise TransferError(
                    f"storage {index}: its segment has shrunk to {segment.size()} bytes, "
                    f"{len(segment)} were registered; register the pool again"
                )

    def close(self) -> None:
        """Let go of the mappings; those of CPU pools end with the last view.

        Raises:
            TransferError: the driver refuses to unmap a CUDA pool.
        """
        self.kv_caches = {}
        self._segments = []
        if self._cuda is not None:
            self._cuda.close()


def import_kv_caches(
    storages: Sequence[StorageHandle], layers: Sequence[LayerHandle]
) -> ImportedCaches:
    """Rebuild a peer's views over its segments; every view is checked against its segment.

    Raises:
        ProtocolError: a view outside its segment, an unknown dtype; names the layer.
        ConfigError, ServerUnavailableError: see `map_segment`; a device that is not visible here.
        TransferError: a CUDA pool that cannot be mapped. Nothing stays mapped after an error.
    """
    with ExitStack() as when_refused:
        cuda = CudaStorages(this_process())
        when_refused.callback(cuda.close)
        segments: list[mmap.mmap] = []
        bases: list[torch.UntypedStorage] = []
        for handle in storages:
            if isinstance(handle, CudaIpcHandle):
                bases.append(cuda.open(handle).untyped_storage())
                continue
            segment = map_segment(handle)
            segments.append(segment)
            bases.append(torch.frombuffer(segment, dtype=torch.uint8).untyped_storage())
        caches = _views(layers, bases)
        when_refused.pop_all()
    return ImportedCaches(caches, sum(base.nbytes() for base in bases), segments, cuda)


def _views(layers: Sequence[LayerHandle], bases: Sequence[torch.UntypedStorage]) -> dict[str, Any]:
    caches: dict[str, Any] = {}
    for layer in layers:
        if layer.name in caches:
            raise ProtocolError(f"layer {layer.name!r} is registered twice")
        views = [_rebuild(layer.name, tensor, bases) for tensor in layer.tensors]
        if not layer.is_list and len(views) != 1:
            raise ProtocolError(f"layer {layer.name!r}: {len(views)} tensors where one is needed")
        caches[layer.name] = views if layer.is_list else views[0]
    return caches


def _rebuild(
    name: str, handle: TensorHandle, bases: Sequence[torch.UntypedStorage]
) -> torch.Tensor:
    dtype = _DTYPES.get(handle.dtype)
    if dtype is None:
        raise ProtocolError(f"layer {name!r}: dtype {handle.dtype!r} is unknown here")
    if handle.storage >= len(bases):
        raise ProtocolError(
            f"layer {name!r}: storage {handle.storage} of {len(bases)} is not there"
        )
    if len(handle.shape) != len(handle.strides) or 0 in handle.shape:
        raise ProtocolError(
            f"layer {name!r}: shape {handle.shape} with strides {handle.strides} is no cache"
        )
    last = handle.offset + sum(
        (size - 1) * stride for size, stride in zip(handle.shape, handle.strides, strict=True)
    )
    base = bases[handle.storage]
    if (last + 1) * dtype.itemsize > base.nbytes():
        raise ProtocolError(
            f"layer {name!r}: element {last} of {dtype.itemsize} bytes lies outside its segment "
            f"of {base.nbytes()} bytes"
        )
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base, handle.offset, handle.shape, handle.strides)
