"""What a store has taken and what a retrieve holds, until the copy has ended."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hma_triton.objects.chunk_index import Records
from hma_triton.objects.namespace import Namespace


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots taken for one store. `addresses[g]` is int64 [num_chunks], 0 where nothing is written.

    `records`, `columns` and `offsets` list the objects, in the order of `places`: (group, chunk).
    """

    namespace: Namespace
    addresses: list[npt.NDArray[np.int64]]
    records: Records
    columns: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    places: list[tuple[int, int]]
    there: int
    open: bool = True


@dataclass(slots=True, eq=False)
class Reading:
    """Objects held for one retrieve. `addresses[g]` is int64 [num_chunks], 0 where none is."""

    namespace: Namespace
    addresses: list[npt.NDArray[np.int64]]
    records: Records
    columns: npt.NDArray[np.int64]
    held: Records
    open: bool = True
