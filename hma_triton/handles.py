"""How memory and events of one process are named to another: frozen structs, no behaviour.

`tensor_ipc` makes and opens them. Every array and string has a bound that is checked before memory
is taken for it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_LAYERS = 4096

Name = Annotated[str, msgspec.Meta(max_length=512)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Dims = Annotated[tuple[Count, ...], msgspec.Meta(max_length=16)]


class ProcessRef(msgspec.Struct, frozen=True):
    """A process, named so that neither another host nor a recycled pid can be taken for it.

    `start_ticks` is field 22 of `/proc/<pid>/stat`; `pid_namespace` and `time_namespace` are the
    inodes of `/proc/self/ns/{pid,time}`; `boot_id` is the kernel's `random/boot_id`.
    """

    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start_ticks: Count
    pid_namespace: Count
    boot_id: Name
    time_namespace: Count = 0


class ShmHandle(msgspec.Struct, frozen=True, tag="shm"):
    """An unlinked shared-memory segment, reached through its owner's descriptor `fd`."""

    owner: ProcessRef
    fd: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    nbytes: Count
    device: Count
    inode: Count


class CudaIpcHandle(msgspec.Struct, frozen=True, tag="cuda_ipc"):
    """A CUDA allocation by IPC handle. `offset_bytes` is where the storage starts in it."""

    owner: ProcessRef
    device_uuid: Name
    handle: Annotated[bytes, msgspec.Meta(max_length=256)]
    offset_bytes: Count
    nbytes: Count


StorageHandle = ShmHandle | CudaIpcHandle


class TensorHandle(msgspec.Struct, frozen=True):
    """A strided view of one storage. Shape, strides and offset are in elements of `dtype`."""

    storage: Annotated[int, msgspec.Meta(ge=0, lt=MAX_LAYERS)]
    dtype: Name
    shape: Dims
    strides: Dims
    offset: Count


class LayerHandle(msgspec.Struct, frozen=True):
    """One registered layer: a tensor, or the list of tensors the engine registers for it."""

    name: Name
    tensors: Annotated[tuple[TensorHandle, ...], msgspec.Meta(max_length=16)]
    is_list: bool = False


class CpuEventHandle(msgspec.Struct, frozen=True, tag="cpu_event"):
    """A 64-bit word of shared memory. The event has fired when the word is at least `value`."""

    segment: ShmHandle
    offset_bytes: Count
    value: Count


class CudaEventHandle(msgspec.Struct, frozen=True, tag="cuda_event"):
    """An interprocess CUDA event."""

    owner: ProcessRef
    device_uuid: Name
    handle: Annotated[bytes, msgspec.Meta(max_length=256)]


EventHandle = CpuEventHandle | CudaEventHandle
