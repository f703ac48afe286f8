"""`lmcache.lmcache_native` in Python, for where LMCache's compiled core does not load.

That core is linked against one torch build, and without it LMCache cannot be imported at all. It
holds no copy code: enumerations, descriptors, bitmaps, locks and matchers. Names and meanings are
those of its stub file and, where that is silent, of its behaviour in LMCache 0.5.6, against which
`tests/lmcache` compares every function. What LMCache does not pass to other processes need not be
equal byte for byte; none of these values is passed.
"""

from __future__ import annotations

from hma_triton.integration.lmcache.standin.bitmap import Bitmap
from hma_triton.integration.lmcache.standin.descriptors import (
    EngineKVFormat,
    GPUKVFormat,
    KernelGroupSpec,
    PageBufferShapeDesc,
    TransferDirection,
    is_cross_layer,
    is_kv_list,
    is_kv_second_tuple,
    is_layer_list,
    is_mla,
)
from hma_triton.integration.lmcache.standin.folding import (
    fold,
    fold_grouped,
    unfold,
    unfold_grouped,
)
from hma_triton.integration.lmcache.standin.locks import TTLLock
from hma_triton.integration.lmcache.standin.matchers import (
    ParallelPatternMatcher,
    RangePatternMatcher,
)
from hma_triton.integration.lmcache.standin.notifier import PeriodicEventNotifier

__all__ = [
    "Bitmap",
    "EngineKVFormat",
    "GPUKVFormat",
    "KernelGroupSpec",
    "PageBufferShapeDesc",
    "ParallelPatternMatcher",
    "PeriodicEventNotifier",
    "RangePatternMatcher",
    "TTLLock",
    "TransferDirection",
    "fold",
    "fold_grouped",
    "is_cross_layer",
    "is_kv_list",
    "is_kv_second_tuple",
    "is_layer_list",
    "is_mla",
    "unfold",
    "unfold_grouped",
]
