"""The executor under test: interpreted on CPU buffers, compiled with `--device cuda`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.guarded_memory import Memory

from hma_triton.kernels.triton_copier import TritonCopier
from hma_triton.tuning import KernelConfig

# Small tiles and few programs: loops, splits and partial tiles in every test.
SMALL = KernelConfig(tile_words=64, warps=1, stages=1, program_cap=3)


@pytest.fixture
def memory(device: torch.device) -> Iterator[Memory]:
    made = Memory(device)
    yield made
    made.close()


@pytest.fixture
def copier(device: torch.device) -> Iterator[TritonCopier]:
    made = TritonCopier(device, SMALL)
    yield made
    made.close()
