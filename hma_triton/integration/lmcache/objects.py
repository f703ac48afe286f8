"""LMCache's objects and block ids as addresses and arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hma_triton.errors import UnsupportedLayoutError
from hma_triton.kernels.addressing import Int64Array


@dataclass(frozen=True, slots=True)
class ObjectBuffers:
    """Base addresses [num_objects] and the bytes of each; None where LMCache gave raw pointers."""

    addresses: Int64Array
    nbytes: int | None
    dtype: torch.dtype | None
    shape: tuple[int, ...]


def read_objects(objects: Any, device: torch.device) -> ObjectBuffers:
    """Addresses of `lmcache_objects_ptrs`: a list of integers or of tensors.

    Raises:
        UnsupportedLayoutError: another form; tensors that are not contiguous, not alike, or on
            another device than the pool.
    """
    if not isinstance(objects, list):
        raise UnsupportedLayoutError(f"objects in a {type(objects).__name__}")
    if all(isinstance(item, int) for item in objects):
        if 0 in objects:
            raise UnsupportedLayoutError("a null pointer among the objects")
        return ObjectBuffers(np.asarray(objects, dtype=np.int64), None, None, ())
    if not all(isinstance(item, torch.Tensor) for item in objects):
        raise UnsupportedLayoutError("objects that are neither integers nor tensors")
    first = objects[0]
    for item in objects:
        if item.shape != first.shape or item.dtype != first.dtype:
            raise UnsupportedLayoutError("objects of several shapes or types")
        if not item.is_contiguous():
            raise UnsupportedLayoutError(f"an object with strides {item.stride()}")
        if item.device != device:
            raise UnsupportedLayoutError(f"objects on {item.device}, pools on {device}")
    addresses = np.asarray([item.data_ptr() for item in objects], dtype=np.int64)
    return ObjectBuffers(addresses, first.nbytes, first.dtype, tuple(first.shape))


def read_block_ids(block_ids: Any) -> Int64Array:
    """`block_ids` [n] as int64 on the host; a device's tensor is fetched, which waits for it.

    Raises:
        UnsupportedLayoutError: neither a tensor of one axis nor a list.
    """
    if isinstance(block_ids, torch.Tensor):
        if block_ids.dim() != 1 or block_ids.is_floating_point():
            raise UnsupportedLayoutError(
                f"block ids of shape {tuple(block_ids.shape)} and type {block_ids.dtype}"
            )
        return np.ascontiguousarray(block_ids.detach().cpu().numpy(), dtype=np.int64)
    if isinstance(block_ids, Sequence) and not isinstance(block_ids, str | bytes):
        return np.asarray(block_ids, dtype=np.int64).reshape(-1)
    raise UnsupportedLayoutError(f"block ids in a {type(block_ids).__name__}")
