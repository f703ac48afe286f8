"""The stages of `bench gpu` that check: each must be right on this device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hma_triton.cli import gpu_correctness, gpu_ipc
from hma_triton.cli.gpu_stage import StageContext
from hma_triton.cuda_driver import CudaDriver
from hma_triton.kernels.addressing import ObjectLayout


@pytest.mark.parametrize("layout", ObjectLayout)
@pytest.mark.parametrize("model", ["lfm2-2.6b", "gpt-oss-20b", "deepseek-v3.2", "gemma-4-e4b-it"])
def test_a_geometry_comes_back_by_every_path(
    device: torch.device, driver: CudaDriver, model: str, layout: ObjectLayout
) -> None:
    outcome = gpu_correctness.check_case(
        gpu_correctness.Case(model, "main", layout), device, driver
    )
    assert outcome.wrong == ()


def test_cases_77_79_91_92_101_two_processes_over_ipc(device: torch.device, tmp_path: Path) -> None:
    context = StageContext(device.index or 0, time.monotonic() + 120, str(tmp_path))
    report = gpu_ipc.run(context)
    assert report.ok, report.lines
