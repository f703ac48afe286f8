"""The caller's ids and buffers, checked and turned into arrays of ids and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from hma_triton.errors import PlanError

ObjectBuffer: TypeAlias = torch.Tensor | memoryview | None


def id_arrays(block_ids: Sequence[Any]) -> list[npt.NDArray[np.integer]]:
    """Block-id lists as integer arrays.

    Raises:
        PlanError: ids that are no whole numbers.
    """
    arrays = []
    for index, ids in enumerate(block_ids):
        try:
            array = ids if isinstance(ids, np.ndarray) else np.asarray(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            raise PlanError(f"block ids of info {index} are no list of numbers: {error}") from error
        if array.size == 0:
            array = np.zeros(array.shape, dtype=np.int64)
        if not np.issubdtype(array.dtype, np.integer):
            raise PlanError(f"block ids of info {index} have dtype {array.dtype}, not integers")
        arrays.append(array)
    return arrays


def object_address(buffer: ObjectBuffer, nbytes: int, group: int, chunk: int) -> int:
    """Address of an object's bytes, 0 for None.

    Raises:
        PlanError: not contiguous bytes on the host, or another size.
    """
    if buffer is None:
        return 0
    where = f"object group {group}, chunk {chunk}"
    if isinstance(buffer, torch.Tensor):
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise PlanError(f"{where}: objects are contiguous uint8 tensors, not {buffer.dtype}")
        if buffer.device.type != "cpu":
            raise PlanError(f"{where}: objects lie in host memory, not on {buffer.device}")
        size, address = buffer.numel(), buffer.data_ptr()
    elif isinstance(buffer, memoryview):
        if not buffer.c_contiguous or buffer.readonly:
            raise PlanError(f"{where}: objects are contiguous writable memoryviews")
        size, address = buffer.nbytes, int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
    else:
        raise PlanError(f"{where}: an object is a uint8 tensor, a memoryview or None")
    if size != nbytes:
        raise PlanError(f"{where}: buffer of {size} bytes, its objects have {nbytes}")
    return address
