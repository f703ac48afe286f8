"""The sampler of tuning over the fake device: what it runs for each path, and what it releases."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.copy_cases import single_run_case
from support.fake_cuda import FakeCudaDriver, FakeGpu, FakeKernel

from hma_triton import autotune_scratch
from hma_triton.autotune_scratch import ScratchCopy, ScratchSampler
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.device import CopyJob, DeviceCopier
from hma_triton.tuning import KernelConfig, TuneKey

CONFIG = KernelConfig(1024, 8, 1, 32)
KEYS = [TuneKey(4096, 1, 2, 16, direction.name.lower(), 0) for direction in Direction]


class _Kernel(FakeKernel):
    """`TritonCopier` as the sampler uses it: without a stream it takes the current one."""

    def enqueue(self, *args: Any) -> None:
        super().enqueue(*args[:4], args[4] if len(args) > 4 else self.gpu.current)  # type: ignore[attr-defined]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu()
    driver = FakeCudaDriver(made)
    made.current = driver.create_stream()  # type: ignore[attr-defined]

    class Event:
        def __init__(self, **kwargs: bool) -> None:
            self.event = driver.create_event()

        def record(self) -> None:
            driver.record_event(self.event, made.current)  # type: ignore[attr-defined]

        def synchronize(self) -> None:
            while not driver.query_event(self.event):
                pass

        def elapsed_time(self, end: Event) -> float:
            return 0.25

    cuda = SimpleNamespace(
        is_available=lambda: True,
        Event=Event,
        synchronize=lambda device: made.drain(),
        current_stream=lambda device: SimpleNamespace(cuda_stream=made.current),  # type: ignore[attr-defined]
    )
    fake = SimpleNamespace(
        cuda=cuda,
        uint8=torch.uint8,
        device=torch.device,
        zeros=lambda size, **kwargs: torch.zeros(size, dtype=torch.uint8),
    )
    monkeypatch.setattr(autotune_scratch, "torch", fake)
    monkeypatch.setattr(autotune_scratch, "open_driver", lambda index: driver)
    monkeypatch.setattr(autotune_scratch, "TritonCopier", lambda device, config: _Kernel(made))
    monkeypatch.setattr(
        autotune_scratch,
        "DeviceCopier",
        lambda device, pinned, **rest: DeviceCopier(torch.device("cpu"), pinned, **rest),
    )
    return made


def _sampler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> ScratchSampler:
    spec = single_run_case(4096, range(8), rows=2, num_blocks=16).spec
    spec = replace(spec, blocks_per_object=4)
    copies = {
        key: ScratchCopy(spec, 2 * 16 * 4096, direction, 8)
        for key, direction in zip(KEYS, Direction, strict=True)
    }
    # the test of types is by class, and a stand-in has another one
    monkeypatch.setattr(autotune_scratch.ScratchSampler, "_enqueue", _enqueue)
    return ScratchSampler(torch.device("cuda", 0), copies)


def _enqueue(sampler: ScratchSampler, copier: Any) -> None:
    if isinstance(copier, _Kernel):
        copier.prepare((sampler._spec,))
        copier.enqueue(sampler._spec, sampler._direction, sampler._ids, sampler._mapped_addresses)
        return
    job = CopyJob(sampler._spec, sampler._ids, sampler._addresses)
    pending = copier.start(sampler._direction, (job,))
    pending.wait_on(autotune_scratch.torch.cuda.current_stream(sampler.device).cuda_stream)
    pending.close()


@pytest.mark.parametrize("path", ["zero_copy", "staged", "dma"])
def test_every_path_moves_the_bytes_that_are_timed(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    sampler = _sampler(gpu, monkeypatch)
    for key in KEYS:
        sampler(key, replace(CONFIG, path=path))
        pool, host = sampler._pool.numpy(), np.frombuffer(sampler._memory.buffer, dtype=np.uint8)
        source, target = (pool, host) if key.direction == "store" else (host, pool)
        source[:] = 7
        assert sampler(key, replace(CONFIG, path=path)) == 250.0
        # 8 of the pool's 16 blocks in both rows, or all of the objects' bytes
        assert int((target == 7).sum()) == 8 * 2 * 4096
        del pool, host, source, target
    posted = {"copy_async", "copy_batch_async"} & set(gpu.names())
    assert bool(posted) == (path != "zero_copy")
    assert ("launch" in gpu.names()) == (path != "dma")
    sampler.close()
    sampler.close()
    FakeCudaDriver(gpu).destroy_stream(gpu.current)  # type: ignore[attr-defined]
    left = [name for name in gpu.leaks() if not name.startswith("event")]
    assert not left


def test_only_paths_that_can_take_a_copy_are_measured() -> None:
    spec = single_run_case(4096, range(8), rows=2, num_blocks=16).spec
    assert ScratchCopy(spec, 1 << 20, Direction.STORE, 8).other_paths == ("dma", "staged")
    holes = replace(spec, n0=2, run_bytes=1024, pool_stride0_bytes=2048, object_stride0_bytes=2048)
    assert ScratchCopy(holes, 1 << 20, Direction.STORE, 8).other_paths == ("dma",)
