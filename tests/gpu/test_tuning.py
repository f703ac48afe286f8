"""Tuning on a device: nothing but its own buffers is read or written."""

from __future__ import annotations

from itertools import islice

import torch

from hma_triton.autotune_scratch import ScratchSampler
from hma_triton.cli.gpu_stage import noise
from hma_triton.geometries.scratch_copies import scratch_copies
from hma_triton.kernels.addressing import ObjectLayout
from hma_triton.kernels.paths import Path
from hma_triton.tuning import KernelConfig


def test_case_104_tuning_never_touches_a_live_cache(device: torch.device) -> None:
    live = noise(64 << 20, 1).to(device)
    before = live.clone()
    copies = scratch_copies("gemma-3-27b", "main", ObjectLayout.OPAQUE, (1 << 20,))
    sampler = ScratchSampler(device, copies)
    start, end = live.data_ptr(), live.data_ptr() + live.numel()
    for key in islice(copies, 4):
        for path in ("zero_copy", *copies[key].other_paths):
            config = KernelConfig(512, 4, 1, 16, Path(path).value)
            assert sampler(key, config) > 0
        pool = sampler._pool
        assert not start <= pool.data_ptr() < end
        assert not start < pool.data_ptr() + pool.numel() <= end
    sampler.close()
    assert torch.equal(live, before)
