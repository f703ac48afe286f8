"""Everything here needs a device: `pytest tests/gpu --device cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hma_triton.cuda_driver import CudaDriver

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def driver(device: torch.device) -> Iterator[CudaDriver]:
    """CUDA calls on the device under test."""
    torch.cuda.set_device(device)
    yield CudaDriver(device.index or 0)
    torch.cuda.synchronize(device)
