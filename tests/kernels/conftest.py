"""Copiers of both implementations, and guarded memory that is freed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.guarded_memory import Memory
from support.prepared import Prepared

from hma_triton.kernels.cpu import CpuCopier


@pytest.fixture(scope="module", params=["compiled", "numpy"])
def copier(request: pytest.FixtureRequest) -> Iterator[CpuCopier]:
    made = CpuCopier(threads=2, implementation=request.param)
    yield made
    made.close()


@pytest.fixture
def prepared(copier: CpuCopier) -> Prepared:
    return Prepared(copier)


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(torch.device("cpu"))
    yield made
    made.close()
