"""The library on torch's own calls, as `bench gpu` runs without cuda-bindings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hma_triton.cli.gpu_ipc import NUM_BLOCKS, PAGE_BYTES, page_spec
from hma_triton.cli.gpu_stage import noise
from hma_triton.cuda_driver import CudaDriver, PointerKind
from hma_triton.host_memory import HostMemory, PinnedHost, split_pieces
from hma_triton.kernels.addressing import Direction
from hma_triton.kernels.device import CopyJob, DeviceCopier, DeviceSettings
from hma_triton.kernels.paths import Path
from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.torch_driver import TorchDriver


@pytest.fixture
def torch_calls(device: torch.device) -> Iterator[TorchDriver]:
    yield TorchDriver(device.index or 0)
    torch.cuda.synchronize(device)


@pytest.mark.parametrize("path", [*Path, None])
def test_pages_come_back_by_every_path(
    device: torch.device, torch_calls: TorchDriver, path: Path | None
) -> None:
    pool = noise(NUM_BLOCKS * PAGE_BYTES, 1).to(device)
    before = pool.clone()
    memory = HostMemory(NUM_BLOCKS * PAGE_BYTES)
    pieces = split_pieces(memory.nbytes, 20 * PAGE_BYTES + PAGE_BYTES // 2)
    pinned = PinnedHost(torch_calls, memory.address, pieces)
    copier = DeviceCopier(
        device,
        pinned,
        kernel=TritonCopier(device),
        settings=DeviceSettings(path, 1 << 20),
        driver=torch_calls,
    )
    spec = page_spec(pool.data_ptr())
    copier.prepare((spec,))
    ids = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int64)
    job = CopyJob(spec, ids, memory.address + PAGE_BYTES * ids)
    host = torch.frombuffer(memory.buffer, dtype=torch.uint8)
    copier.start(Direction.STORE, (job,)).synchronize()
    assert torch.equal(host, before.cpu())
    pool.fill_(0xEE)
    copier.start(Direction.RETRIEVE, (job,)).synchronize()
    assert torch.equal(pool, before)
    del host
    copier.close()
    pinned.close()
    memory.close()


def test_it_says_of_a_device_and_its_addresses_what_the_bindings_say(
    device: torch.device, driver: CudaDriver, torch_calls: TorchDriver
) -> None:
    theirs, ours = driver.device_info(), torch_calls.device_info()
    assert (ours.uuid, ours.architecture) == (theirs.uuid, theirs.architecture)
    assert ours.pci_bus_id in ("", theirs.pci_bus_id)
    pinned = torch.zeros(4096, dtype=torch.uint8, pin_memory=True)
    memory = HostMemory(8192)
    registered = PinnedHost(torch_calls, memory.address, memory.pieces)
    own = torch.zeros(4096, dtype=torch.uint8, device=device)
    for address, kind in (
        (torch.zeros(4096, dtype=torch.uint8).data_ptr(), PointerKind.PAGEABLE),
        (pinned.data_ptr() + 100, PointerKind.PINNED),
        (memory.address + 100, PointerKind.PINNED),
        (own.data_ptr() + 100, PointerKind.DEVICE),
    ):
        assert torch_calls.pointer(address)[0] is kind
        assert driver.pointer(address) == torch_calls.pointer(address)
    registered.close()
    memory.close()


@pytest.mark.parametrize("path", [None, *Path])
def test_objects_on_the_device_follow_and_precede_the_current_stream(
    device: torch.device, path: Path | None
) -> None:
    """As inside LMCache: slow work before the copy, a reader behind it, no wait on the host."""
    pool = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8, device=device)
    slot, new = torch.zeros_like(pool), noise(pool.numel(), 2).to(device)
    copier = DeviceCopier(device, kernel=TritonCopier(device), settings=DeviceSettings(path))
    spec, ids = page_spec(pool.data_ptr()), np.arange(NUM_BLOCKS, dtype=np.int64)
    copier.prepare((spec,))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        pool.copy_(new)
        copier.enqueue(spec, Direction.STORE, ids, slot.data_ptr() + PAGE_BYTES * ids)
        seen = slot.clone()
    stream.synchronize()
    assert torch.equal(seen, new)
    copier.close()
